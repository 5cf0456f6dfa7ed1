"""Engines, their workers and the server are killed and paused at 200 random instants under load: no wrong byte is
believed, no call raises or takes long, nothing leaks, and what lives goes on.

    KVCORE_TEST_CHAOS_SEED=7 KVCORE_TEST_CHAOS_TIMES=10 pytest tests/kvcore/service/test_chaos.py  # 2,000 instants
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos import LEASE_S, STRIKES, Chaos

from kvcore.testing.servers.kvcore import KVCoreServer

SEED = int(os.environ.get("KVCORE_TEST_CHAOS_SEED", "1"))
TIMES = float(os.environ.get("KVCORE_TEST_CHAOS_TIMES", "1"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 120 * TIMES)]


@pytest.fixture
def chaos(folder: Path) -> Iterator[Chaos]:
    """A server with a small L1 and a tier that outlives it, and nobody yet."""
    config = {
        "server": {"url": f"unix://{folder}/kvcore.sock", "timeout": "300ms"},
        "l1": {"size": "8MiB", "lease": f"{LEASE_S}s"},
        "l2": [{"storage": {"plugin": "disk", "path": str(folder / "tier"), "capacity": "16MiB"}}],
        "min_object_size": "128KiB",
        "log_level": "warning",
    }
    print(f"KVCORE_TEST_CHAOS_SEED={SEED} KVCORE_TEST_CHAOS_TIMES={TIMES:g}")
    with KVCoreServer(folder, config) as server, Chaos(server, folder / "diary", SEED) as made:
        yield made


def test_engines_and_workers_killed_and_paused(chaos: Chaos) -> None:
    chaos.grow()
    struck: Counter[str] = Counter()
    for _ in range(round(110 * TIMES)):
        chaos.rest(0.0, 0.25)
        struck[chaos.strike()] += 1
    chaos.rest(2 * LEASE_S, 2 * LEASE_S)
    counts = chaos.counts()
    chaos.check()
    print(dict(struck), dict(counts))
    assert len(struck) == len(set(STRIKES))
    assert counts["right"] > 300
    assert counts["stored"] > 100
    chaos.check_server()


def test_the_server_killed(chaos: Chaos) -> None:
    chaos.grow()
    for _ in range(round(25 * TIMES)):
        chaos.rest(0.05, 0.6)
        chaos.server.kill()
        chaos.rest(0.0, 0.1)
        chaos.server.start()
    before = chaos.counts()
    chaos.rest(2.0, 2.0)
    counts = chaos.counts()
    chaos.check()
    print(dict(counts))
    assert chaos.ended() == []
    assert counts["right"] - before["right"] > 50, "they go on with the last server"
    assert counts["alone"] > 0, "they also went on without"
    chaos.check_server()


def test_everybody_killed(chaos: Chaos) -> None:
    chaos.grow()
    for _ in range(round(65 * TIMES)):
        chaos.rest(0.0, 0.25)
        if chaos.ran.random() < 0.2:
            with frozen(chaos) if chaos.ran.random() < 0.3 else running():
                chaos.rest(0.0, 0.4)
            chaos.server.kill()
            if chaos.ran.random() < 0.5:
                chaos.strike()  # while there is none
            chaos.server.start()
        else:
            chaos.strike()
    chaos.rest(2 * LEASE_S, 2 * LEASE_S)
    counts = chaos.counts()
    chaos.check()
    print(dict(counts))
    assert counts["right"] > 200
    chaos.check_server()


@contextmanager
def frozen(chaos: Chaos) -> Iterator[None]:
    chaos.server.freeze()
    yield
    chaos.server.thaw()


@contextmanager
def running() -> Iterator[None]:
    yield
