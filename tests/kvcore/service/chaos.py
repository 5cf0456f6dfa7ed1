"""Engines and workers at work on a server, and what happens to them: killed, paused, left alone by each other."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos_clients import OBJECT_BYTES
from served import connected, contents, hashes, nothing_held, put, until

from kvcore.testing.servers.kvcore import KVCoreServer

LEASE_S = 1.0
"""`l1.lease` of the servers."""
ENGINES = 4
STRIKES = ("engine", "worker", "both", "orphan worker", "orphan worker", "pause engine", "pause worker", "pause both")


class Chaos:
    """A server and engines, and what happens to them. Everything is drawn from `ran`.

    Args:
        diary: the file that all engines and workers write to.
        how: arguments of `chaos_clients.Client`.
    """

    def __init__(self, server: KVCoreServer, diary: Path, seed: int, **how: Any) -> None:
        self.server = server
        self.ran = random.Random(seed)
        self._how = how
        self.engines: list[list[int]] = []
        """Of each, its process and its worker's."""
        self._diary = diary
        self._paused: dict[int, list[list[float]]] = {}
        self._thaws: list[tuple[float, list[int]]] = []
        self._halves: list[int] = []
        self._seeds = iter(range(1000 * seed, 1 << 60, 2))
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

    def start(self, **how: Any) -> list[int]:
        """Start an engine that nothing will happen to; its process and its worker's."""
        pids: list[int] = self._ask("start", str(self._diary), next(self._seeds), {**self._how, **how})
        return pids

    def grow(self, count: int = ENGINES) -> None:
        """Start engines until there are so many."""
        while len(self.engines) < count:
            self.engines.append(self.start())

    def tell(self, pids: list[int], number: int) -> None:
        """Send processes a signal."""
        self._ask("signal", pids, number)

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

    def took_ms(self) -> list[float]:
        """How long each lookup of theirs took, to its answer, so far. Sorted."""
        return sorted(ms for event in self._events() if event[0] == "took" for ms in event[1])

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
        for _, pid, call, begun, ended, waited, most_s in (e for e in self._events() if e[0] == "slow"):
            paused = sum(max(0.0, min(ended, b) - max(begun, a)) for a, b in self._paused.get(pid, ()))
            if ended - begun - paused - waited > most_s:
                faults.append(("slow", pid, call, ended - begun, paused, waited))
        assert faults == [], faults

    def check_server(self) -> None:
        """With everybody gone, L1 holds what is resident and nothing else; and it serves."""
        self.kill_all()
        until(lambda: nothing_held(self.server), "every lease ends and every slot comes back", LEASE_S + 15)
        found = self.server.metrics()
        used = found['kvcore_l1_bytes{state="size"}'] - found['kvcore_l1_bytes{state="free"}']
        assert used == found["kvcore_l1_objects"] * OBJECT_BYTES, found
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
