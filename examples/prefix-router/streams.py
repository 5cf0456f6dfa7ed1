"""Reads an engine's KV events: vLLM's stream, in which kvcore tells of its objects, too."""

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio
from index import EngineIndex

log = logging.getLogger("router")
END = (-1).to_bytes(8, "big", signed=True)
REPLAY_S = 5.0


class Stored(msgspec.Struct, tag="BlockStored"):
    """Blocks that came to be. Fields that are not named here are not read."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    """Blocks that are gone."""

    block_hashes: list[int | bytes]
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The engine has forgotten everything."""


class Batch(msgspec.Struct, array_like=True):
    """One message."""

    ts: float
    events: list[Stored | Removed | Cleared]


class Stream:
    """Keeps an engine's index up to date. Batches are numbered: what is missing is asked for, and when it cannot be had
    any more, all is forgotten, because a router is better off with a gap than with what is no longer true."""

    def __init__(self, events: str, replay: str, index: EngineIndex) -> None:
        self._events = events
        self._replay = replay
        self._index = index
        self._next = 0
        self._live = -1
        """The last batch that came by itself."""
        self._decoder = msgspec.msgpack.Decoder(Batch)

    async def run(self) -> None:
        """Until cancelled."""
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.SUB) as socket:
            socket.connect(self._events)
            socket.subscribe(b"")
            await self._catch_up()  # what was told before this router began
            while True:
                _, number, payload = await socket.recv_multipart()
                seq = int.from_bytes(number, "big")
                if seq <= self._live:
                    self._forget("it has been started again")
                self._live = seq
                if seq > self._next:
                    await self._catch_up()
                    if seq > self._next:
                        self._forget(f"batches {self._next} to {seq - 1} are lost")
                        self._next = seq
                if seq == self._next:  # else it came with a replay
                    self._take(seq, payload)

    async def _catch_up(self) -> None:
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            await socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            while True:
                try:
                    _, _, number, payload = await asyncio.wait_for(socket.recv_multipart(), REPLAY_S)
                except TimeoutError:
                    return
                if number == END:
                    return
                seq = int.from_bytes(number, "big")
                if seq > self._next > 0:
                    return  # what is missing is not kept any more
                self._take(seq, payload)

    def _take(self, seq: int, payload: bytes) -> None:
        self._next = seq + 1
        for event in self._decoder.decode(payload).events:
            if isinstance(event, Stored):
                self._index.stored(event)
            elif isinstance(event, Removed):
                self._index.removed(event)
            else:
                self._index.cleared()

    def _forget(self, why: str) -> None:
        log.warning("%s: forgetting what this engine holds: %s", self._events, why)
        self._index.cleared()
        self._next = 0
