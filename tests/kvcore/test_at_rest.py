"""Who rests is not woken: a cache looks after leases and pins while there are any."""

import time
from collections.abc import Callable, Iterator

import pytest

from kvcore.engine import CacheEngine, GroupSpec, ModelSpec, Space

SPEC = ModelSpec(
    engine="toy", model="toy", weights="w", dtype="float32", element_bytes=4, layout="toy", backend="toy", isa="toy",
    block_tokens=16, ranks=1, groups=(GroupSpec(("layer.0",), (4096,)),),
)  # fmt: skip


@pytest.fixture
def engine() -> Iterator[CacheEngine]:
    made = CacheEngine.open(flags={"l1.size": "64MiB", "l2": [], "chunk_tokens": 16})
    yield made
    made.close()


def next_round_s(engine: CacheEngine) -> float:
    return engine.manager.reap_by - time.monotonic()


def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.05)


def test_rounds_are_rare_until_something_is_begun(engine: CacheEngine) -> None:
    until(lambda: next_round_s(engine) > 3, "a new cache comes to rest")
    space: Space = engine.register(SPEC)
    keys = [bytes([i]) * 32 for i in range(4)]
    plan = engine.reserve(space, keys, 0, 4, [range(4)])
    engine.publish(plan.id)
    lookup = engine.lookup(space, keys)
    engine.pin(space, keys[:1], 1.0)  # a lease lasts until the next round in any case: a pin need not
    rounds = engine.manager.reap_by
    until(lambda: engine.manager.reap_by != rounds, "a pin does not wait for the next round")
    assert next_round_s(engine) <= 1.5
    until(lambda: not engine.l1._pins, "the pin ends")
    for _ in range(2):
        rounds = engine.manager.reap_by
        until(lambda before=rounds: engine.manager.reap_by != before, "there is a lease")  # type: ignore[misc]
        assert next_round_s(engine) <= 1.5
    engine.release(lookup)
    until(lambda: next_round_s(engine) > 3, "it comes to rest again")


def test_a_lookup_ends_the_rest_once_in_a_while(engine: CacheEngine) -> None:
    space: Space = engine.register(SPEC)
    until(lambda: engine.manager.resting and next_round_s(engine) > 30, "who rests does so for a lease")
    rounds = engine.manager.reaped_at
    engine.release(engine.lookup(space, [b"absent".ljust(32)]))
    until(lambda: engine.manager.reaped_at != rounds, "what a lookup began is looked after, and written down")
    points = len(engine.manager.history.since().times)
    assert points >= 2
    until(lambda: engine.manager.resting, "it comes to rest again")
