"""Engines, their workers and the server are killed and paused at 200 random instants under load: no wrong byte is
believed, no call raises or takes long, nothing leaks, and what lives goes on. And a soak: memory and files stay flat.

    KVCORE_TEST_CHAOS_SEED=7 KVCORE_TEST_CHAOS_TIMES=10 pytest tests/kvcore/service/test_chaos.py  # 2,000 instants
    KVCORE_TEST_SOAK_S=600 pytest tests/kvcore/service/test_chaos.py -k soak
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chaos_clients import OBJECT_BYTES, SLOW_S
from served import connected, contents, hashes, nothing_held, put, until

from kvcore.testing.servers.kvcore import KVCoreServer

SEED = int(os.environ.get("KVCORE_TEST_CHAOS_SEED", "1"))
TIMES = float(os.environ.get("KVCORE_TEST_CHAOS_TIMES", "1"))
SOAK_S = float(os.environ.get("KVCORE_TEST_SOAK_S", "18"))
LEASE_S = 1.0
ENGINES = 4
STRIKES = ("engine", "worker", "both", "orphan worker", "orphan worker", "pause engine", "pause worker", "pause both")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 120 * TIMES + 2 * SOAK_S)]


@pytest.fixture
def chaos(folder: Path) -> Iterator["Chaos"]:
    """A server with a small L1 and a tier that outlives it, and nobody yet."""
    config = {
        "server": {"url": f"unix://{folder}/kvcore.sock", "timeout": "300ms"},
        "l1": {"size": "8MiB", "lease": f"{LEASE_S}s"},
        "l2": [{"storage": {"plugin": "disk", "path": str(folder / "tier"), "capacity": "16MiB"}}],
        "min_object_size": "128KiB",
        "log_level": "warning",
    }
    print(f"KVCORE_TEST_CHAOS_SEED={SEED} KVCORE_TEST_CHAOS_TIMES={TIMES:g}")
    with KVCoreServer(folder, config) as server, Chaos(server, folder / "diary") as made:
        yield made


class Chaos:
    """A server and engines, and what happens to them. Everything is drawn from `ran`."""

    def __init__(self, server: KVCoreServer, diary: Path) -> None:
        self.server = server
        self.ran = random.Random(SEED)
        self.engines: list[list[int]] = []
        """Of each, its process and its worker's."""
        self._diary = diary
        self._paused: dict[int, list[list[float]]] = {}
        self._thaws: list[tuple[float, list[int]]] = []
        self._halves: list[int] = []
        self._seeds = iter(range(1000 * SEED, 1 << 60, 2))
        self._forks = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("chaos_clients.py")), str(server.config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> "Chaos":
        return self

    def __exit__(self, *error: object) -> None:
        if self._forks.poll() is None:
            self.kill_all()
        self._forks.kill()
        self._forks.communicate()

    def grow(self, count: int = ENGINES) -> None:
        """Start engines until there are so many."""
        while len(self.engines) < count:
            self.engines.append(self._ask("start", str(self._diary), next(self._seeds)))

    def rest(self, least_s: float, most_s: float) -> None:
        """A random time, in which the paused go on when theirs is over."""
        end = time.monotonic() + self.ran.uniform(least_s, most_s)
        while (now := time.monotonic()) < end:
            self._thaw(now)
            time.sleep(max(0.0, min(0.02, end - now)))

    def strike(self) -> str:
        """One engine or worker, or both, are killed, or paused for longer than a lease; or a worker goes on to copy
        when its engine is long gone."""
        what = self.ran.choice(STRIKES)
        chosen = self.ran.choice(self.engines)
        pids = {"engine": chosen[:1], "worker": chosen[1:], "both": chosen}[what.split()[-1]]
        if what == "orphan worker":
            self._ask("signal", pids, signal.SIGSTOP)
            self._thaws.append((time.monotonic() + self.ran.random(), pids))
            self._ask("kill", chosen[:1])
            self.engines.remove(chosen)
            self._halves += pids
        elif what.startswith("pause"):
            self._ask("signal", pids, signal.SIGSTOP)
            self._thaws.append((time.monotonic() + 1.5 * LEASE_S, pids))
            for pid in pids:
                self._paused.setdefault(pid, []).append([time.monotonic(), float("inf")])
        else:
            self._ask("kill", pids)
            self.engines.remove(chosen)
            self._halves += chosen
        self.grow()
        return what

    def vanish(self) -> None:
        """The youngest engine is killed, and another comes."""
        self._ask("kill", self.engines.pop())
        self.grow()

    def ended(self) -> list[int]:
        """Processes that have ended by themselves."""
        return list(self._ask("ended"))

    def kill_all(self) -> None:
        """All engines and workers, also those that were left alone by their other half."""
        self._ask("kill", [pid for pids in self.engines for pid in pids] + self._halves)
        self.engines.clear()
        self._halves.clear()
        self._thaws.clear()

    def counts(self) -> Counter[str]:
        """What the engines have counted so far."""
        total: Counter[str] = Counter()
        for event in self._events():
            if event[0] == "counts":
                total.update(event[1])
        return total

    def check(self) -> None:
        """Nothing has happened that must not."""
        faults = [e for e in self._events() if e[0] in ("wrong", "raised")]
        for _, pid, call, begun, ended, waited in (e for e in self._events() if e[0] == "slow"):
            paused = sum(max(0.0, min(ended, b) - max(begun, a)) for a, b in self._paused.get(pid, ()))
            if ended - begun - paused - waited > SLOW_S:
                faults.append(("slow", pid, call, ended - begun, paused, waited))
        assert faults == []

    def check_server(self) -> None:
        """With everybody gone, L1 holds what is resident and nothing else; and it serves."""
        self.kill_all()
        until(lambda: nothing_held(self.server), "every lease ends and every slot comes back", LEASE_S + 15)
        found = self.server.metrics()
        used = found['kvcore_l1_bytes{state="size"}'] - found['kvcore_l1_bytes{state="free"}']
        assert used == found["kvcore_l1_objects"] * OBJECT_BYTES
        engine, space = connected(self.server)
        keys = hashes(6, start=1000)
        engine.clear(space)
        put(engine, space, keys)
        assert contents(engine, space, keys) == [1, 2, 3, 4, 5, 6]
        engine.close()

    def _thaw(self, now: float) -> None:
        for due in [d for d in self._thaws if d[0] <= now]:
            self._thaws.remove(due)
            self._ask("signal", due[1], signal.SIGCONT)
            for pid in due[1]:
                for pause in self._paused.get(pid, [])[-1:]:
                    pause[1] = min(pause[1], time.monotonic())

    def _events(self) -> list[Any]:
        return [json.loads(line) for line in self._diary.read_text().splitlines()] if self._diary.exists() else []

    def _ask(self, *words: Any) -> Any:
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(json.dumps(words) + "\n")
        self._forks.stdin.flush()
        return json.loads(self._forks.stdout.readline())


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


def test_soak_memory_and_files_stay_flat(chaos: Chaos) -> None:
    """Rounds of load and of engines that come and go. After each, with nobody there, the server has as many files, and
    as much memory beside its arena, as after the second: the first rounds fill pools and tables."""
    rounds = max(5, round(SOAK_S / 4))
    files, memory = [], []
    for _ in range(rounds):
        chaos.grow()
        end = time.monotonic() + SOAK_S / rounds
        while time.monotonic() < end:
            chaos.rest(0.05, 0.15)
            chaos.vanish()
        chaos.kill_all()
        until(lambda: nothing_held(chaos.server), "every lease ends and every slot comes back", LEASE_S + 15)
        files.append(len(os.listdir(f"/proc/{chaos.server.pid}/fd")))
        memory.append(_beside_arena_kib(chaos.server.pid))
    counts = chaos.counts()
    chaos.check()
    print(files, memory, dict(counts))
    assert counts["right"] > 20 * SOAK_S
    assert max(files[1:]) - min(files[1:]) <= 2, files  # a connection of our own to its metrics may be closing
    assert memory[-1] - memory[1] < 6 << 10, memory
    chaos.check_server()


def _beside_arena_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
