"""Through the core: a pool that loses its master or a holder costs hits and no request, and is used again by itself."""

from pathlib import Path

import pytest
from mooncake_place import Pool, freeze, within

from kvcore.engine import CacheEngine, Space
from kvcore.testing.chunks import CHUNKS, contents, hashes, publish, put, spec
from moved import eventually

pytestmark = pytest.mark.usefixtures("private")

EVERYTHING = list(range(1, CHUNKS + 1))


def opened(tmp_path: Path, *pools: Pool, tier: str = "") -> CacheEngine:
    """An engine over a tier for each pool, with a place of its own in it."""
    config = tmp_path / "kvcore.yaml"
    storage = "{{storage: {{plugin: mooncake, master_server_address: '{}', key_prefix: {}/{}/}}{}}}"
    tiers = [storage.format(pool.master.address, tmp_path.name, i, tier) for i, pool in enumerate(pools)]
    config.write_text(f"l1: {{size: 8MiB}}\nmin_object_size: 128KiB\nl2: [{', '.join(tiers)}]\n")
    return CacheEngine.open(str(config))


def forget(engine: CacheEngine, space: Space) -> None:
    """Nothing is left in L1, once a tier has let go of what it has stored."""

    def is_empty() -> bool:
        engine.clear(space)
        return bool(engine.l1.usage()["objects"] == 0)

    eventually(is_empty)


def is_used_again(engine: CacheEngine, space: Space) -> bool:
    """What is stored now is found again. After a restart of the master the pool has no room until holders are back."""
    forget(engine, space)
    put(engine, space, hashes())
    forget(engine, space)
    return contents(engine, space, hashes()) == EVERYTHING


def serves(engine: CacheEngine) -> bool:
    return engine.stats()['kvcore_tier_open{tier="mooncake"}'] == 1


@pytest.mark.parametrize("tier", ["", ", serde: [zstd]"], ids=["raw", "zstd"])
def test_another_engine_finds_what_one_has_stored(pool: Pool, tmp_path: Path, tier: str) -> None:
    one, two = opened(tmp_path, pool, tier=tier), opened(tmp_path, pool, tier=tier)
    put(one, one.register(spec()), hashes())
    space = two.register(spec())
    assert contents(two, space, hashes()) == EVERYTHING
    assert two.stats()['kvcore_hit_chunks_total{source="mooncake"}'] == CHUNKS
    assert not two.stats().get('kvcore_miss_chunks_total{reason="corrupt"}')
    one.close()
    two.close()


def test_two_tiers_are_told_of_the_arena(own_pool: Pool, tmp_path: Path) -> None:
    engine = opened(tmp_path, own_pool, own_pool)
    put(engine, engine.register(spec()), hashes())
    for tier in engine.manager.tiers:
        with tier.storage._client.session() as session:  # type: ignore[union-attr]
            assert [region.end - region.start for region in session.regions] == [engine.manager.arena.size]
    engine.close()


def test_the_master_dies_in_the_middle(own_pool: Pool, tmp_path: Path) -> None:
    """Requests go on, each in time; what was stored is forgotten with the master; then it is used again."""
    engine = opened(tmp_path, own_pool)
    space = engine.register(spec())
    put(engine, space, hashes())
    own_pool.master.kill()
    for i in range(1, 5):
        with within(15):  # the lookup's own limit is 2 s
            assert contents(engine, space, hashes(start=100 * i)) == []
        publish(engine, space, hashes(4, start=1000 * i))
        assert contents(engine, space, hashes(4, start=1000 * i)) == [1, 2, 3, 4]
    eventually(lambda: not serves(engine), 60)
    own_pool.master.start()
    eventually(lambda: serves(engine), 60)
    eventually(lambda: is_used_again(engine, space), 60)
    engine.close()


def test_the_master_comes_after_the_engine(own_pool: Pool, tmp_path: Path) -> None:
    own_pool.master.kill()
    with within(20):
        engine = opened(tmp_path, own_pool)
    space = engine.register(spec())
    publish(engine, space, hashes())
    assert contents(engine, space, hashes()) == EVERYTHING
    assert not serves(engine)
    own_pool.master.start()
    eventually(lambda: serves(engine), 60)
    eventually(lambda: is_used_again(engine, space), 60)
    engine.close()


def test_a_frozen_holder_costs_hits_only(own_pool: Pool, tmp_path: Path) -> None:
    """The tier's deadline is shorter than Mooncake's: calls are abandoned, and no slot is used again before they have
    returned."""
    engine = opened(tmp_path, own_pool, tier=", timeout: 500ms")
    space = engine.register(spec())
    put(engine, space, hashes())
    forget(engine, space)
    freeze(own_pool.holders[0])
    with within(15):
        assert contents(engine, space, hashes()) == []
    for i in range(20):  # as many as L1 has room for, while the abandoned loads still have slots
        publish(engine, space, hashes(2, start=100 * i))
        assert contents(engine, space, hashes(2, start=100 * i)) in ([1, 2], [])
    own_pool.holders[0].thaw()

    def quarantined() -> float:
        engine.manager.refresh_gauges()
        return engine.stats()['kvcore_l1_bytes{state="quarantined"}']

    eventually(lambda: quarantined() == 0)
    for i in range(20):
        assert contents(engine, space, hashes(2, start=100 * i)) in ([1, 2], [])
    engine.close()
