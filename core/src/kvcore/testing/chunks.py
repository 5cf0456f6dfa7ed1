"""Chunks of known bytes through a `CacheEngine`: for tests of a storage beneath the whole cache.

engine = CacheEngine.open(path)  # with `l1: {size: 8MiB}`, `min_object_size: 128KiB` and the storage in `l2`
space = engine.register(spec())
put(engine, space, hashes())
assert contents(engine, space, hashes()) == list(range(1, CHUNKS + 1))
"""

import hashlib
from collections.abc import Sequence

from kvcore.engine import CacheEngine, GroupSpec, ModelSpec, Space, attach_arena

CHUNKS = 8
_BLOCK_BYTES = 64 << 10
_TIMEOUT_S = 10.0


def spec(weights: str = "w") -> ModelSpec:
    """A model of two layers, whose objects have 128 KiB. Other weights, other namespace."""
    group = GroupSpec(("a", "b"), (_BLOCK_BYTES, _BLOCK_BYTES))
    return ModelSpec("test", "m", weights, "bfloat16", 2, "LBHNC", "CPU", "vec", 32, 1, (group,))


def hashes(count: int = CHUNKS, start: int = 0) -> list[bytes]:
    """The hashes of the chunks `[start, start + count)`."""
    return [hashlib.sha256(f"chunk {i}".encode()).digest() for i in range(start, start + count)]


def publish(engine: CacheEngine, space: Space, keys: Sequence[bytes], first: int = 0) -> None:
    """Store chunks whose every byte is `first` + their index + 1; the tiers need not have them yet."""
    plan = engine.reserve(space, keys, 0, len(keys), [list(range(len(keys) * space.chunk_blocks))])
    view = attach_arena(space.descriptor())
    size = space.groups[0].nbytes
    for copy in plan.copies:
        view.buffer[copy.slot : copy.slot + size] = bytes([first + copy.blocks[0] // space.chunk_blocks + 1]) * size
    view.close()
    engine.publish(plan.id)


def put(engine: CacheEngine, space: Space, keys: Sequence[bytes], first: int = 0) -> None:
    """The same, and wait until the tiers have taken or lost them."""
    publish(engine, space, keys, first)
    assert engine.drain() == 0


def contents(engine: CacheEngine, space: Space, keys: Sequence[bytes]) -> list[int]:
    """First byte of each chunk that a lookup promises; all its bytes must be equal."""
    lookup = engine.lookup(space, keys)
    assert lookup.wait(_TIMEOUT_S)
    found = []
    for copy in engine.retrieve(lookup, 0, [list(range(1000))]):
        assert engine.manager.arena is not None
        data = bytes(engine.manager.arena.buffer[copy.slot : copy.slot + space.groups[0].nbytes])
        assert data == data[:1] * len(data)
        found.append(data[0])
    engine.release(lookup)
    return found
