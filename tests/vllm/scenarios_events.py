"""kvcore's objects in vLLM's own KV-event stream. Run by `scenarios.py`."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from engines import Engine, engine, tokens
from scenarios_basic import LONG, PROMPTS
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvcore.testing.servers.kvcore import KVCoreServer

CHUNK_BLOCKS = 4
SETTINGS = {"block_size": 32}


class Router:
    """What a router makes of the stream: which blocks are where, and which tokens a hash stands for."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe("")
        self.held: dict[str, Counter[Any]] = {m: Counter() for m in ("GPU", "CPU", "STORAGE")}
        self.tokens: dict[Any, tuple[Any, ...]] = {}
        self.events = 0
        self.disagreements = 0

    def read(self) -> None:
        """Take in what has come."""
        while self._socket.poll(300):
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                self.events += 1
                self._take(event)

    def _take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            for held in self.held.values():
                held.clear()
        elif isinstance(event, BlockRemoved):
            known = [h for h in event.block_hashes if self.held[event.medium][h]]  # others went with AllBlocksCleared
            self.held[event.medium].subtract(known)
        else:
            self.held[event.medium].update(event.block_hashes)
            parent = event.parent_block_hash
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            for i, block_hash in enumerate(event.block_hashes):
                at = i * event.block_size
                said = (parent, *event.token_ids[at : at + event.block_size], event.group_idx)
                self.disagreements += self.tokens.setdefault((block_hash, event.group_idx), said) != said
                parent = block_hash

    def blocks(self, medium: str) -> set[Any]:
        """The blocks there."""
        assert set(self.held[medium].values()) <= {0, 1}, self.held[medium]
        return set(+self.held[medium])

    def close(self) -> None:
        """Leave."""
        self._context.destroy(0)


@contextmanager
def published(model: str, folder: Path, name: str, extra: dict[str, Any]) -> Iterator[tuple[Engine, Router]]:
    """An engine that publishes KV events, and their reader."""
    endpoint = f"ipc://{folder}/{name}"
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    options = {"kvcore.chunk_tokens": 32 * CHUNK_BLOCKS, **extra}
    router = Router(endpoint)
    try:
        with engine(model, options, kv_events_config=events, **SETTINGS) as e:
            until = time.monotonic() + 20
            while not router.events:  # a subscription takes a moment
                assert time.monotonic() < until
                e.one(tokens(int(time.monotonic() * 1000), 40), 1)
                router.read()
            e.forget()
            yield e, router
    finally:
        router.close()


def kv_events(models: Path, folder: str) -> dict[str, Any]:
    """A small L1 before a disk: what is told is what is there, at every turn, and in the next engine too."""
    out: dict[str, Any] = {}
    disk = {"plugin": "disk", "path": f"{folder}/disk", "direct": "off"}
    extra = {"kvcore.l1.size": "2MiB", "kvcore.l2": [{"storage": disk}]}
    model = str(models / "tiny")
    with published(model, Path(folder), "a", extra) as (e, router):
        for prompts in ([LONG], PROMPTS, [tokens(50, 1500)], [tokens(51, 1500)], [LONG]):
            e.run(prompts)
        out["evicted"] = e.stat("kvcore_evicted_objects_total")
        out["first"] = _compared(e, router)
        e.forget(connector=True)
        e.one([5, 6, 7], 1)
        router.read()
        out["after_reset"] = [len(router.blocks(m)) for m in ("CPU", "STORAGE")]
        out["faults"], out["disagreements"] = e.faults(), router.disagreements
    extra["kvcore.l1.size"] = "64MiB"
    with published(model, Path(folder), "b", extra) as (e, router):
        _, out["loaded"] = e.one(LONG)
        out["second"] = _compared(e, router)
        out["second_faults"] = e.faults()
    with engine(model, extra, **SETTINGS) as e:
        e.one(LONG)
        out["off"] = [e.half.take_events(), e.half.engine.l1.watched, e.half.engine.manager.hooks.listens("stored")]
    return out


def _compared(e: Engine, router: Router) -> dict[str, Any]:
    """What is resident, and what of it the router knows."""
    e.half.engine.drain()
    until = time.monotonic() + 10
    while True:
        e.one([5, 6, 7], 1)  # vLLM publishes once a step
        router.read()
        l1 = {maybe_convert_block_hash(h) for s in _tables(e) for h in s.objects}
        disk = {maybe_convert_block_hash(x.key.chunk_hash) for x in e.half.engine.manager.tiers[0].storage.list()}
        told = {m: router.blocks(m) for m in ("CPU", "STORAGE")}
        same = told["CPU"] >= l1 and len(told["CPU"]) == CHUNK_BLOCKS * len(l1)
        if same or time.monotonic() > until:
            break
    return {
        "l1": len(l1),
        "l1_told": same,
        "disk": len(disk),
        "disk_told": len(told["STORAGE"] & disk),
        "disk_blocks": len(told["STORAGE"]),
    }


def _tables(e: Engine) -> list[Any]:
    return list(e.half.engine._object_spaces.values())


def kv_events_served(models: Path, folder: str) -> dict[str, Any]:
    """The same over a server with a small L1: its evictions are told, and its end takes all back."""
    out: dict[str, Any] = {}
    served = KVCoreServer(Path(folder), {"l1": {"size": "2MiB"}, "l2": []})
    extra = {"kvcore.server": served.url}
    with served, published(str(models / "tiny"), Path(folder), "c", extra) as (e, router):
        for prompts in ([LONG], PROMPTS, [tokens(60, 1500)]):
            e.run(prompts)
        until = time.monotonic() + 10
        while True:
            e.one([5, 6, 7], 1)
            router.read()
            objects = served.metrics()["kvcore_l1_objects"]
            if len(router.blocks("CPU")) == CHUNK_BLOCKS * objects or time.monotonic() > until:
                break
        out["told"], out["objects"] = len(router.blocks("CPU")), objects
        out["evicted"] = served.metrics()["kvcore_evicted_objects_total"]
        served.kill()
        while e.half.engine.descriptor() is not None:
            time.sleep(0.01)
        time.sleep(0.3)
        e.one([5, 6, 7], 1)
        router.read()
        out["without_server"] = len(router.blocks("CPU"))
        out["faults"], out["disagreements"] = e.faults(), router.disagreements
    return out
