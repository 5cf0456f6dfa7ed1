"""An engine of several servers: its ranks are split over them, and a prefix is cached where all of them have it.

Rank r of R uses server r * N // R of N. Each holds objects of its ranks only, under a namespace that says so; what one
has and another has not is of no use, so an answer is the shortest of all.
"""

import dataclasses
import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvcore.api import ConfigError, LeaseError
from kvcore.engine import ModelSpec, Space, StorePlan
from kvcore.engine.answers import promised
from kvcore.engine.parts import joined
from kvcore.observe import Asked, Decision, Decisions
from kvcore.service.client import RemoteEngine
from kvcore.service.lookup import RemoteLookup, ServedSpace
from kvcore.transfer.plan import Copy

T = TypeVar("T", int, float)
_SERVER = "kvcore_server_"
_UP = f"{_SERVER}up"


class SeveralSpace(Space):
    """A space of all servers. Its `groups` are the layouts of one server's objects."""

    def __init__(self, spec: ModelSpec, parts: "Sequence[ServedSpace]", tenant: str) -> None:
        first = parts[0]
        super().__init__(first.spec, first._keys, b"", first.chunk_tokens, first.descriptor, tenant)
        self.spec = spec
        self.parts = tuple(parts)

    @property
    def namespace(self) -> bytes:
        """That of the first server's part, once all servers have said theirs."""
        return self.parts[0].namespace if all(part.namespace for part in self.parts) else b""

    @namespace.setter
    def namespace(self, value: bytes) -> None:
        """It is the servers' to say."""


class SeveralLookup:
    """An `EngineLookup` of one lookup on each server. `sources` and `misses` count the objects of all servers."""

    def __init__(
        self,
        engine: "SeveralEngine",
        space: SeveralSpace,
        hashes: Sequence[bytes],
        first: int,
        asked: Asked | None = None,
    ) -> None:
        self.space = space
        self.answer: int | None = None
        self.sources: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self.broke = self.blame = ""
        self.decision: Decision | None = None
        self._released = False
        self._engine = engine
        self._hashes = hashes
        self._asked = asked
        self._began = time.monotonic()
        self.parts = [engine._ask(p, space, hashes, first, asked) for p in range(len(space.parts))]
        self.first = self.parts[0].first
        self.decision = engine.decisions.begin(asked, space.namespace, hashes, self.first, space.chunk_tokens)
        self.arena = ""
        self._look()

    def poll(self) -> int | None:
        """See `EngineLookup.poll`."""
        while True:
            answers = [part.poll() for part in self.parts]
            known = [answer for answer in answers if answer is not None]
            if len(known) < len(answers):
                return None
            end = min(known)
            longer = [p for p, answer in enumerate(known) if answer > end]
            if end > self.first and longer and any(self.space.windows):
                # A window before a later end is another one than that before this end: ask for that.
                for p in longer:
                    self._engine.parts[p].release(self.parts[p])
                    self.parts[p] = self._engine._ask(p, self.space, self._hashes[:end], self.first, self._asked)
                continue
            if end == self.first:
                self.release()
            before, self.answer = self.answer, end
            self._look()
            if self.decision is not None and before is None:
                self.decision.namespace = self.space.namespace
                self.decision.answered(self, time.monotonic() - self._began)
            elif self.decision is not None and end < (before or 0) and not self._released:
                self.decision.lost(self.broke)
            return end

    def wait(self, timeout_s: float) -> bool:
        """See `EngineLookup.wait`."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            for part in self.parts:
                if not part.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return True

    def _look(self) -> None:
        self.arena = _token([part.arena for part in self.parts])
        self.sources = _sum([part.sources for part in self.parts])
        self.misses = _sum([part.misses for part in self.parts])
        shortest = min(self.parts, key=lambda part: part.first if part.answer is None else part.answer)
        self.broke, self.blame = shortest.broke, shortest.blame

    def release(self) -> None:
        """End all leases."""
        self._released = True
        for engine, part in zip(self._engine.parts, self.parts, strict=True):
            engine.release(part)


class SeveralEngine:
    """An `Engine` over `parts`, one for each server. Thread-safe, as they are."""

    def __init__(self, parts: Sequence[RemoteEngine]) -> None:
        self.parts = tuple(parts)
        inspect = self.parts[0].config.inspect
        self.decisions = Decisions(inspect.requests, inspect.tokens)
        for part in self.parts:
            part.decisions = Decisions(0)  # one record of each lookup, not one per server
        self._plans: dict[int, tuple[list[int], int, Decision | None]] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def register(self, spec: ModelSpec, tenant: str = "") -> SeveralSpace:
        """See `Engine.register`. Raises `ConfigError` when the ranks cannot be split evenly."""
        count = len(self.parts)
        if spec.ranks % count:
            raise ConfigError(
                f"server: {count} servers for {spec.ranks} tensor-parallel ranks: the ranks are split evenly over the "
                f"servers, so give a number of servers that divides {spec.ranks}"
            )
        spaces = []
        for p, engine in enumerate(self.parts):
            extra = {**spec.extra, "part": f"{p}/{count}"}
            spaces.append(engine.register(dataclasses.replace(spec, ranks=spec.ranks // count, extra=extra), tenant))
        return SeveralSpace(spec, spaces, tenant)

    # -- loading -----------------------------------------------------------------------------------------------------

    def lookup(
        self, space: Space, hashes: Sequence[bytes], first: int = 0, asked: Asked | None = None
    ) -> SeveralLookup:
        """See `Engine.lookup`."""
        assert isinstance(space, SeveralSpace)
        return SeveralLookup(self, space, hashes, first, asked)

    def queued(self, space: Space, hashes: Sequence[bytes], asked: Asked | None = None) -> None:
        """See `Engine.queued`."""
        assert isinstance(space, SeveralSpace)
        for engine, part in zip(self.parts, space.parts, strict=True):
            engine.queued(part, hashes, asked)

    def _ask(
        self, part: int, space: SeveralSpace, hashes: Sequence[bytes], first: int, asked: Asked | None
    ) -> RemoteLookup:
        return self.parts[part].lookup(space.parts[part], hashes, first, asked)

    def coming(self, lookup: SeveralLookup) -> None:
        """See `Engine.coming`: not known before all servers have answered."""

    def retrieve(self, lookup: SeveralLookup, first_block: int, block_ids: Sequence[Sequence[int]]) -> list[Copy]:
        """See `Engine.retrieve`."""
        end = promised(lookup)
        ids = [group[: end * lookup.space.chunk_blocks] for group in block_ids]
        plans = [e.retrieve(part, first_block, ids) for e, part in zip(self.parts, lookup.parts, strict=True)]
        # Of a group with a window a server may have more than the window: what all have is enough.
        common = set.intersection(*({_span(c) for c in plan} for plan in plans))
        copies = [[c for c in plan if _span(c) in common] for plan in plans]
        if lookup.decision is not None:
            loaded = Counter[int]()
            for copy in copies[0]:
                loaded[copy.group] += len(copy.blocks)
            lookup.decision.retrieved += max(loaded.values(), default=0) * lookup.space.spec.block_tokens
        return joined(copies, len(lookup.space.groups))

    def arrived(self, lookup: SeveralLookup, first_block: int, block_ids: Sequence[Sequence[int]]) -> list[Copy]:
        """See `Engine.arrived`: as `coming` never says anything, this is never called."""
        raise LeaseError("several servers do not say what is coming: use `retrieve`")

    def renew(self, lookup: SeveralLookup) -> bool:
        """See `Engine.renew`."""
        renewed = [e.renew(part) for e, part in zip(self.parts, lookup.parts, strict=True)]  # each, also after a False
        return all(renewed)

    def release(self, lookup: SeveralLookup) -> None:
        """See `Engine.release`."""
        lookup.release()

    # -- storing -----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        space: Space,
        hashes: Sequence[bytes],
        first: int,
        last: int,
        block_ids: Sequence[Sequence[int]],
        request: str = "",
    ) -> StorePlan:
        """See `Engine.reserve`. With a server away nothing is stored on the others: it would be of no use."""
        assert isinstance(space, SeveralSpace)
        for engine, part in zip(self.parts, space.parts, strict=True):
            if not engine.ready(part):  # nobody else gives up room for it
                plan = engine.reserve(part, hashes, first, last, block_ids, request)
                engine.publish(plan.id, ok=False)  # it may have come just now
                return StorePlan(0, [], plan.skipped, "")
        each = zip(self.parts, space.parts, strict=True)
        plans = [engine.reserve(part, hashes, first, last, block_ids, request) for engine, part in each]
        skipped = _most([plan.skipped for plan in plans])
        arena = _token([plan.arena for plan in plans])
        ids = [plan.id for plan in plans]
        if not arena or not any(ids):
            self._publish(ids, ok=False)
            return StorePlan(0, [], skipped, arena)
        plan_id = next(self._ids)
        with self._lock:
            self._plans[plan_id] = (ids, max(len(plan.copies) for plan in plans), self.decisions.latest(request))
        return StorePlan(plan_id, joined([plan.copies for plan in plans], len(space.groups)), skipped, arena)

    def publish(self, plan_id: int, ok: bool = True) -> None:
        """See `Engine.publish`."""
        with self._lock:
            ids, count, decision = self._plans.pop(plan_id, ([], 0, None))
        self._publish(ids, ok)
        if ok and decision is not None:
            decision.stored += count

    def _publish(self, ids: Sequence[int], ok: bool) -> None:
        for engine, plan_id in zip(self.parts, ids, strict=False):
            engine.publish(plan_id, ok)

    def prefilled(self, space: Space, tokens: int, seconds: float) -> None:
        """See `Engine.prefilled`."""
        assert isinstance(space, SeveralSpace)
        for engine, part in zip(self.parts, space.parts, strict=True):
            engine.prefilled(part, tokens, seconds)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def descriptor(self) -> dict[str, Any] | None:
        """See `Engine.descriptor` and `kvcore.engine.parts`. None unless all servers are there."""
        parts = [engine.descriptor() for engine in self.parts]
        tokens = [part["token"] if part is not None else "" for part in parts]
        return {"token": _token(tokens), "parts": parts} if all(tokens) else None

    def clear(self, space: Space) -> int:
        """See `Engine.clear`: the objects of all servers."""
        assert isinstance(space, SeveralSpace)
        return sum(engine.clear(part) for engine, part in zip(self.parts, space.parts, strict=True))

    def drain(self, timeout_s: float = 10.0) -> int:
        """See `Engine.drain`."""
        deadline = time.monotonic() + timeout_s
        return sum(engine.drain(max(0.0, deadline - time.monotonic())) for engine in self.parts)

    @property
    def tiers(self) -> dict[str, str]:
        """See `Engine.tiers`: those of all servers."""
        return {name: plugin for engine in reversed(self.parts) for name, plugin in engine.tiers.items()}

    def stats(self) -> dict[str, float]:
        """See `Engine.stats`. What each server is asked alike is counted once; servers that were lost are counted
        each, and they are up when all of them are."""
        each = [engine.stats() for engine in self.parts]
        servers = _sum([{k: v for k, v in one.items() if k.startswith(_SERVER)} for one in each])
        return {**each[0], **servers, _UP: min(one[_UP] for one in each)}

    def metrics_text(self) -> str:
        """See `Engine.metrics_text`: as `stats`."""
        servers = {name: value for name, value in self.stats().items() if name.startswith(_SERVER)}
        lines = []
        for line in self.parts[0].metrics_text().splitlines():
            if not line.startswith(_SERVER):
                lines.append(line)
            if line.startswith(f"# TYPE {_SERVER}"):
                family = line.split()[2]
                lines += [f"{name} {value}" for name, value in servers.items() if name.partition("{")[0] == family]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Leave all servers. Idempotent."""
        for engine in self.parts:
            engine.close()


def _span(copy: Copy) -> tuple[int, int, tuple[int, ...]]:
    """What of the request a copy fills."""
    return copy.group, copy.first, copy.blocks


def _token(tokens: Sequence[str]) -> str:
    """The name of all arenas together; "" when one is not there."""
    return "+".join(tokens) if all(tokens) else ""


def _sum(counts: "Sequence[Mapping[str, T]]") -> dict[str, T]:
    total: dict[str, Any] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total


def _most(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: max(one.get(name, 0) for one in counts) for name in dict.fromkeys(n for one in counts for n in one)}
