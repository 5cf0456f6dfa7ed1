"""A server with two tiers, engines of several tenants, and a storm of faults for as long as wanted: no wrong byte is
believed, no call raises or takes long, and at rest nothing is left of what was begun.

    KVCORE_TEST_SOAK_S=600 pytest tests/kvcore/service/test_soak.py -s
"""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import LEASE_S, Chaos
from served import blocks, connected, until
from storm import TENANTS, Storm

from taken import open_files, taken

SOAK_S = float(os.environ.get("KVCORE_TEST_SOAK_S", "18"))
SEED = int(os.environ.get("KVCORE_TEST_SOAK_SEED", "1"))
ROUND_S = min(45.0, SOAK_S / 3)
VETERANS = (False, False, True)
"""Engines that live as long as the server; the last is an object store."""
RECORD = 262_144
"""What became of so many objects is on record."""
CALM_S = 5.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240 + 3 * SOAK_S)]


@pytest.fixture
def storm(folder: Path) -> Iterator[Storm]:
    print(f"KVCORE_TEST_SOAK_S={SOAK_S:g} KVCORE_TEST_SOAK_SEED={SEED}")
    with Storm(folder, SEED) as made:
        yield made


def test_soak_nothing_grows_and_nothing_is_left(storm: Storm, folder: Path) -> None:
    server = storm.server
    fill_the_record(storm)
    struck: Counter[str] = Counter()
    rounds: list[dict[str, Any]] = []
    begun = time.monotonic()
    how = {"tenants": TENANTS, "models": ("plain", "windowed"), "guests": 0.02, "documents": 8}
    with Chaos(server, folder / "diary", SEED, **how) as chaos:
        veterans = [chaos.start(tidy=True, store=store) for store in VETERANS]
        schedulers = [pids[0] for pids in veterans]
        while time.monotonic() < begun + SOAK_S or len(rounds) < 3:
            chaos.tell(schedulers, signal.SIGUSR2)
            end = time.monotonic() + ROUND_S
            while (now := time.monotonic()) < end:
                chaos.grow(2)
                chaos.rest(0.1, 0.8)
                storm.pass_by(now)
                if chaos.ran.random() < 0.3:
                    struck[chaos.strike()] += 1
                else:
                    storm.strike()
            storm.calm()
            chaos.kill_all()
            chaos.tell(schedulers, signal.SIGUSR1)
            at_rest(storm)
            now_taken = taken(server.pid)
            rounds.append({"server": now_taken, "engines": [taken(pid) for pids in veterans for pid in pids]})
            print(f"{time.monotonic() - begun:5.0f} s", *now_taken[:3], dict(chaos.counts()), flush=True)
            chaos.check()
            assert storm.odd == []
        before = taken(server.pid)
        time.sleep(CALM_S)
        resting = (taken(server.pid).cpu_s - before.cpu_s) / CALM_S
        lines = server.log.read_text().splitlines()
        tell(chaos, storm, struck, rounds, resting, lines, time.monotonic() - begun)

        assert chaos.ended() == [], "those who live go on"
        assert resting < 0.05
        assert not [line for line in lines if "Traceback" in line], server.log.read_text()
        assert len(lines) < 60 + 3 * (storm.begun.total() + struck.total())
        flat([r["server"] for r in rounds])
        for i in range(2 * len(VETERANS)):
            flat([r["engines"][i] for r in rounds])

        right = chaos.counts()["right"]
        chaos.tell(schedulers, signal.SIGUSR2)
        until(lambda: chaos.counts()["right"] > right + 50, "they find what they have stored since", 60)
        chaos.kill_all()
        for pids in veterans:
            chaos.tell(pids, signal.SIGKILL)
    nothing_is_left(storm)


def fill_the_record(storm: Storm) -> None:
    """The record of what became of objects grows up to a bound, which is no leak: have it reach that now."""
    engine, space = connected(storm.server)
    noted, one = 0, 16_000
    while noted < RECORD + one:
        plan = engine.reserve(space, [os.urandom(32) for _ in range(one)], 0, one, blocks(space, one))
        noted += plan.skipped["l1_full"]
        engine.publish(plan.id, False)
    engine.close()


def at_rest(storm: Storm) -> None:
    """Everybody rests, and nothing is held, waits, or is open."""
    server = storm.server

    def held() -> dict[str, float]:
        found = server.metrics()
        names = ["kvcore_leases", 'kvcore_l1_bytes{state="quarantined"}']
        names += [name for name in found if name.startswith("kvcore_tier_queue_bytes")]
        held = {name: found[name] for name in names if found[name]}
        if found["kvcore_sessions"] != len(VETERANS):
            held["kvcore_sessions"] = found["kvcore_sessions"]
        return held

    end = time.monotonic() + LEASE_S + 30
    while left := held():
        assert time.monotonic() < end, left
        time.sleep(0.1)
    writing = storm.disk / "tier" / ".kvcore" / "writing"
    until(lambda: not os.listdir(writing), "no write is unfinished", 30)
    tier = str(storm.disk / "tier")
    until(lambda: not open_files(server.pid, lambda name: name.startswith(tier) and ".kvcore" not in name),
          "no object is open", 30)  # fmt: skip


def flat(taken_at_rest: list[Any]) -> None:
    """As much after the last round as after half of them: the first ones fill pools and tables."""
    early, last = taken_at_rest[len(taken_at_rest) // 2], taken_at_rest[-1]
    assert last.anon_kib - early.anon_kib < 8 << 10, taken_at_rest
    assert last.files - early.files <= 4, taken_at_rest
    assert last.threads - early.threads <= 4, taken_at_rest


def nothing_is_left(storm: Storm) -> None:
    """Once all is forgotten, L1 is one free piece, and the stores are empty."""
    server = storm.server
    until(lambda: server.metrics()["kvcore_sessions"] == 0, "all are gone", 30)
    until(lambda: server.metrics()["kvcore_leases"] == 0, "no lease is held", LEASE_S + 30)
    storm.clear()
    found = server.metrics()
    assert found["kvcore_l1_objects"] == 0
    assert found['kvcore_l1_bytes{state="free"}'] == found['kvcore_l1_bytes{state="size"}']
    assert storm.objects_on_disk() == []
    assert storm.redis.ask("DBSIZE") == 0


def tell(
    chaos: Chaos,
    storm: Storm,
    struck: Counter[str],
    rounds: list[dict[str, Any]],
    resting: float,
    lines: list[str],
    seconds: float,
) -> None:
    """What has happened."""
    counts, took = chaos.counts(), chaos.took_ms()
    kinds = Counter(re.sub(r"[0-9a-f]{8,}|\d+", "N", line.split("] ")[-1])[:100] for line in lines)
    print(f"{seconds:.0f} s, {len(rounds)} rounds, faults {dict(storm.begun + struck)}")
    print(f"{dict(counts)}, {counts['bytes'] / 1e9:.1f} GB of objects compared")
    print("lookups, ms:", *(f"p{p} {took[int(len(took) * p / 100)]}" for p in (50, 90, 99)), f"most {took[-1]}")
    print("server at rest:", *(tuple(r["server"][:3]) for r in rounds), f"{100 * resting:.1f} % of a core")
    print(
        "engines and workers at rest:",
        *([tuple(t[:3]) for t in r["engines"]] for r in (rounds[len(rounds) // 2], rounds[-1])),
    )
    print(f"{60 * len(lines) / seconds:.1f} log lines a minute")
    for kind, count in kinds.most_common(12):
        print(f"  {count:4} {kind}")
