"""What a router makes of the stream."""

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

WAIT_MS = 15_000
END = (-1).to_bytes(8, "big", signed=True)


class Subscriber:
    """Reads a stream and counts what is where. What it missed it asks for, where it knows whom to ask."""

    def __init__(
        self, context: "zmq.Context[Any]", endpoint: str, topic: str = "", replay_endpoint: str | None = None
    ) -> None:
        self._replay_endpoint = replay_endpoint
        self._context = context
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.connect(endpoint)
        self._socket.subscribe(topic)
        self.seqs: list[int] = []
        self.payloads: list[bytes] = []
        self.topics: set[bytes] = set()
        self.events: list[dict[str, Any]] = []
        self.held: Counter[tuple[str, bytes]] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def read(self) -> None:
        """Take in one message."""
        assert self._socket.poll(WAIT_MS), f"no message came; so far {len(self.seqs)}"
        topic, number, payload = self._socket.recv_multipart()
        self.topics.add(topic)
        seq = int.from_bytes(number, "big")
        if seq > self._next:
            self.catch_up()
        if seq >= self._next or self._replay_endpoint is None:
            self._read(seq, payload)

    def catch_up(self) -> None:
        """Ask for what is missing so far."""
        if self._replay_endpoint is not None:
            for seq, payload in self.replay(self._replay_endpoint, self._next):
                self._read(seq, payload)

    @property
    def _next(self) -> int:
        return self.seqs[-1] + 1 if self.seqs else 0

    def _read(self, seq: int, payload: bytes) -> None:
        self.seqs.append(seq)
        self.payloads.append(payload)
        self.take(payload)

    def take(self, payload: bytes) -> None:
        """Take in a batch, as one that knows nothing but msgpack."""
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self.events.append(event)
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
                continue
            change = 1 if event["type"] == "BlockStored" else -1
            for block_hash in event["block_hashes"]:
                self.held[event["tier"], block_hash] += change

    def until(self, condition: "Callable[[], bool]") -> None:
        """Read until it holds."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not condition():
            assert time.monotonic() < deadline
            if self._socket.poll(100):
                self.read()
            else:  # it may have joined after the last message
                self.catch_up()

    def of(self, tier: str) -> set[bytes]:
        """The objects of a tier."""
        assert set(self.held.values()) <= {0, 1}
        return {h for (t, h), count in self.held.items() if t == tier and count}

    def replay(self, endpoint: str, start: int) -> list[tuple[int, bytes]]:
        """Ask for the batches from `start` on."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        found = []
        try:
            socket.connect(endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            while True:
                assert socket.poll(WAIT_MS)
                _, topic, seq, payload = socket.recv_multipart()
                if seq == END:
                    return found
                self.topics.add(topic)
                found.append((int.from_bytes(seq, "big"), payload))
        finally:
            socket.close()
