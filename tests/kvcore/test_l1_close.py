"""The end of an L1: nothing of it stays in the process, and what is called late is harmless."""

import gc
import tracemalloc

from kvcore.engine import CacheEngine
from kvcore.testing.chunks import hashes, put, spec


def opened() -> CacheEngine:
    return CacheEngine.open(flags={"l1.size": "64MiB", "l2": "[]", "min_object_size": "128KiB"})


def test_engines_that_were_closed_leave_no_objects() -> None:
    """Objects and their spaces lead to each other, and the garbage collector does not know the objects."""
    only = [tracemalloc.Filter(True, "*/kvcore/l1/*"), tracemalloc.Filter(True, "*/kvcore/builtin/*")]
    count = 400

    def one() -> int:
        """Allocations of L1 that are still there when it was opened, filled and closed."""
        engine = opened()
        space = engine.register(spec())
        for at in range(0, count, 40):
            put(engine, space, hashes(40, at))
        reading, evicted = engine.lookup(space, hashes(40)), engine.reserve(space, hashes(8, count), 0, 8, [range(64)])
        assert reading.poll() == 40
        assert len(evicted.copies) == 8
        engine.close()
        del engine, space, reading, evicted
        gc.collect()
        return sum(s.count for s in tracemalloc.take_snapshot().filter_traces(only).statistics("filename"))

    tracemalloc.start()
    try:
        first = one()
        assert [one() for _ in range(4)][-1] - first < count
    finally:
        tracemalloc.stop()


def test_what_is_called_after_the_end_is_harmless() -> None:
    engine = opened()
    space = engine.register(spec())
    put(engine, space, hashes())
    lookup = engine.lookup(space, hashes())
    plan = engine.reserve(space, hashes(8, 100), 0, 8, [range(64)])
    l1 = engine.l1
    read = l1.reserve_read(engine.object_space(space, 0), hashes())
    write, known, _ = l1.reserve_write(engine.object_space(space, 0), hashes(4, 200))
    assert (len(read.objects), len(write.objects), known) == (8, 4, 0)
    disowned = l1.reserve_write(engine.object_space(space, 0), hashes(4, 300))[0]
    l1.disown(disowned)
    engine.close()
    l1.close()
    assert (l1.renew(read), l1.renew(write)) == (False, False)
    l1.keep(read)
    l1.end_read(read)
    assert l1.finish_write(write)[0] == l1.finish_write(disowned)[0] == []
    engine.publish(plan.id)
    engine.release(lookup)
    usage = l1.usage()
    assert (usage["objects"], usage["staging"], usage["leases"]) == (0, 0, 0)
    assert l1.reap() == (0, 0)
