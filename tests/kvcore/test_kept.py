"""What is kept of keys that have gone: nothing, once the records of them have reached their bounds."""

import gc
import os
import sys
from pathlib import Path

from kvcore.engine import CacheEngine, GroupSpec, ModelSpec

SMALL = ModelSpec("test", "m", "w", "bfloat16", 2, "LBHNC", "CPU", "vec", 32, 1, (GroupSpec(("a",), (4096,)),))
CONFIG = """
l1: {size: 4MiB}
l2: [{storage: {plugin: memory, capacity: 4MiB}}]
min_object_size: 4KiB
"""
ROOM = 1024
"""So many of the objects fit L1, and the tier."""


def test_nothing_is_kept_of_keys_that_have_gone(tmp_path: Path) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text(CONFIG)
    engine = CacheEngine.open(str(path))
    engine.journal.most, engine.decisions.most = 300, 16
    space = engine.register(SMALL)

    def live(count: int) -> int:
        """So many keys are asked for, stored, and sooner or later evicted; how many objects Python has then."""
        for n in range(count):
            keys = [os.urandom(32)]
            lookup = engine.lookup(space, keys)
            assert lookup.wait(10)
            engine.release(lookup)
            plan = engine.reserve(space, keys, 0, 1, [[0]], f"request {n}")
            assert plan.copies
            engine.publish(plan.id)
            if n % 100 == 99:
                assert engine.drain() == 0
        engine.l1.reap()
        gc.collect()
        return sys.getallocatedblocks()

    before, count = live(4 * ROOM), 4 * ROOM
    grown = live(count) - before
    print(f"{grown} more objects after {count} more keys")
    assert engine.stats()["kvcore_evicted_objects_total"] > 6 * ROOM
    engine.close()
    assert grown < count / 10
