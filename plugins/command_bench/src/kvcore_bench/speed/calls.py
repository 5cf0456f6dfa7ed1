"""`CacheEngine` as an engine plugin calls it: prompts of 128 chunks, one KV group, L1 only."""

import random
import time
from contextlib import closing

from kvcore.config import load_config
from kvcore.control import StorageManager
from kvcore.engine import CacheEngine, GroupSpec, Lookup, ModelSpec
from kvcore.observe import Metrics
from kvcore.plugins import Registry
from kvcore_bench.speed.measure import Case, measure, us_each
from kvcore_bench.speed.rows import Row
from kvcore_bench.speed.setting import Setting

CHUNKS, CHUNK_TOKENS, BLOCK_TOKENS = 128, 256, 16
OBJECT_BYTES, SLOTS = 64 << 10, 2048
_LAYERS = 32
_PROMPTS, _LOOKUPS, _WRITES = 8, 528, 32


def run(setting: Setting) -> list[Row]:
    """The rows `calls.*`, in us per chunk."""
    rng = random.Random(1)  # noqa: S311 - test data
    with setting.peer("calls", chunks=CHUNKS) as peer, closing(_Requests(rng)) as requests:
        looked_up, written = CHUNKS * _LOOKUPS, CHUNKS * _WRITES
        looked = requests.look_up_all
        cases = [
            Case("calls.lookup", "us", us_each(looked, looked_up, repeats=2, after=requests.release)),
            Case(
                "calls.retrieve",
                "us",
                us_each(requests.retrieve, looked_up, repeats=1, before=looked, after=requests.release),
            ),
            Case("calls.release", "us", us_each(requests.release, looked_up, repeats=1, before=looked)),
            Case("calls.reserve_publish", "us", us_each(requests.write, written, repeats=2, before=requests.make)),
        ]
        cases = [case._replace(peer=peer.sampler(case.name)) for case in cases]
        return measure(cases, max(3, setting.rounds // 2))


class _Requests:
    """A cache engine with some prompts in L1."""

    def __init__(self, rng: random.Random) -> None:
        registry = Registry()
        flags = {
            "l1.size": f"{SLOTS * OBJECT_BYTES >> 20}MiB",
            "l2": [],
            "chunk_tokens": CHUNK_TOKENS,
            "l1.lease": "600s",
        }
        config = load_config(env={}, flags=flags, registry=registry)
        self._engine = CacheEngine(StorageManager(config, registry, Metrics()), "bench")
        self._space = self._engine.register(_model())
        self._rng = rng
        self._block_ids = [list(range(CHUNKS * self._space.chunk_blocks))]
        self._lookups: list[Lookup] = []
        self._fresh: list[list[bytes]] = []
        self.make()
        self._write(self._fresh)
        self._prompts = self._fresh[-_PROMPTS:]
        time.sleep(0.2)  # the arena is being faulted in

    def look_up_all(self) -> None:
        lookup, space, prompts = self._engine.lookup, self._space, self._prompts
        self._lookups = [lookup(space, prompts[i % _PROMPTS]) for i in range(_LOOKUPS)]
        if {request.poll() for request in self._lookups} != {CHUNKS}:
            raise AssertionError("a resident chunk was not found")

    def retrieve(self) -> None:
        for request in self._lookups:
            self._engine.retrieve(request, 0, self._block_ids)

    def release(self) -> None:
        for request in self._lookups:
            self._engine.release(request)
        self._lookups = []

    def make(self) -> None:
        self._fresh = [[self._rng.randbytes(32) for _ in range(CHUNKS)] for _ in range(_WRITES)]

    def write(self) -> None:
        self._write(self._fresh)
        for prompt, hashes in enumerate(self._fresh[-_PROMPTS:]):
            self._prompts[prompt] = hashes

    def close(self) -> None:
        self._engine.close()

    def _write(self, prompts: list[list[bytes]]) -> None:
        for hashes in prompts:
            plan = self._engine.reserve(self._space, hashes, 0, CHUNKS, self._block_ids)
            if len(plan.copies) != CHUNKS:
                raise AssertionError(f"a chunk found no room: {plan.skipped}")
            self._engine.publish(plan.id)


def _model() -> ModelSpec:
    block_bytes = OBJECT_BYTES * BLOCK_TOKENS // CHUNK_TOKENS // _LAYERS
    layers = tuple(f"layer.{i}" for i in range(_LAYERS))
    return ModelSpec(
        engine="bench", model="bench", weights="", dtype="bfloat16", element_bytes=2, layout="bench", backend="bench",
        isa="bench", block_tokens=BLOCK_TOKENS, ranks=1, groups=(GroupSpec(layers, (block_bytes,) * _LAYERS),),
    )  # fmt: skip
