"""A lookup: which chunks of a request can be retrieved, and the leases that keep them until they are."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from kvcore.control import Fetch, Step, StorageManager, Want, unheard
from kvcore.engine.face import Coming
from kvcore.engine.space import Space
from kvcore.l1 import L1Object, ObjectSpace, ReadLease
from kvcore.l2 import Tier
from kvcore.observe import Decision, logger

_ABSENT = "absent"
SLACK_S = 1.0
"""How much later than `lookup_timeout` a lookup gives up by itself, when its timer on the tiers' loop did not fire."""


class Lookup:
    """One request's lookup. `poll` answers it; `CacheEngine.retrieve` uses it; `CacheEngine.release` ends it.

    Attributes:
        space: the model's space.
        first: index of the first chunk that the engine does not hold itself.
        objects: per group, chunk index -> leased object, in the order in which they came.
        sources: where found chunks were (`l1` or a tier's name) -> objects.
        misses: why the others were not -> objects. What lies behind the end of the prefix counts as what ended it.
        answer: what `poll` last said.
        broke, blame: why there is no more, and the tiers that are the cause: see `Decision`.
        decision: the record of it, or None.
        arena: the arena's token.
    """

    def __init__(
        self,
        manager: StorageManager,
        space: Space,
        tables: Sequence[ObjectSpace],
        hashes: Sequence[bytes],
        first: int,
        answered: "Callable[[Lookup, float], None]",
        each: bool = False,
        on_coming: Callable[[], None] | None = None,
    ) -> None:
        """`tables`: L1's table of each group. `answered`: called with the lookup and its seconds, once. `each`: not the
        prefix is wanted, but every chunk for itself; the answer then only says where the last of them ends.
        `on_coming`: called once `coming` has something to say, if it ever has."""
        self.space = space
        self.first = first
        self.objects: list[dict[int, L1Object]] = [{} for _ in space.groups]
        self.sources: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self.broke = self.blame = ""
        self.decision: Decision | None = None
        self.arena: str = manager.l1.arena.descriptor["token"]
        self._manager = manager
        self._l1 = manager.l1
        self._tables = tables
        self._answered = answered
        self._on_coming = on_coming
        self._each = each
        self._prefix = space.windows == (None,) and not each
        self._hashes = hashes
        self._began = time.perf_counter()
        self._give_up = self._began + manager.config.lookup_timeout + SLACK_S
        self._leases: list[ReadLease] = []
        self._lock = threading.Lock()
        self._released = False
        self._located_end: int | None = None  # of what is there, in L1 or a tier
        self._coming: Coming | None = None
        self._taken = 0
        self.answer: int | None = None
        self._done: threading.Event | None = None

    def poll(self) -> int | None:
        """None while tiers are asked; then the n for which chunks `[first, n)` can be retrieved. Never blocks.

        Each poll renews the leases; when they ran out before it, the answer becomes `first`: nothing.
        """
        if self._manager.closed:
            self.answer = self.first
            return self.first
        answer = self.answer
        if answer is None and time.perf_counter() > self._give_up:
            answer = self._stalled()
        if answer is not None and answer > self.first and not self.renew():
            lost = answer - self.first  # counted as found, and no longer usable
            self.answer = answer = self.first
            self._miss("lease_expired", lost)
            if self.decision is not None and not self._released:
                self.decision.lost("lease_expired")
            self._manager.metrics.add("miss_chunks", lost, "lease_expired")
            self.release()
        return answer

    def _stalled(self) -> int:
        """Something holds the tiers' loop, such as a plugin that blocks it: the request goes on with nothing."""
        with self._lock:
            if self.answer is not None:  # it was in time after all
                return self.answer
            self.answer = self.first
            self.sources, self.misses = {}, {}
            self._miss("stalled", (len(self._hashes) - self.first) * len(self._tables))
            self.broke = "stalled"
        self._answered(self, time.perf_counter() - self._began)
        self.release()
        return self.first

    @property
    def held(self) -> bool:
        """Whether there are leases to release."""
        return bool(self._leases)

    def renew(self) -> bool:
        """Start the leases' time again. False when one has ended: look up again."""
        if self._released:
            return False
        renew = self._l1.renew
        return False not in [renew(lease) for lease in self._leases]  # every one, also after a False

    def coming(self) -> Coming | None:
        """See `Engine.coming`."""
        return self._coming if self.answer is None and self.objects[0] else None

    def take(self, check: Callable[[dict[int, L1Object]], None] = lambda fresh: None) -> dict[int, L1Object]:
        """What has come since the last call: chunk -> object. Only of a lookup that has told what is coming. `check`:
        what it refuses, by raising, is for the next call."""
        with self._lock:
            fresh = dict(list(self.objects[0].items())[self._taken :])
            check(fresh)
            self._taken += len(fresh)
        return fresh

    def wait(self, timeout_s: float) -> bool:
        """Is it answered? Waits at most `timeout_s`."""
        return self.answer is not None or (self._done is not None and self._done.wait(timeout_s))

    def release(self) -> None:
        """End all leases. Idempotent; what still arrives is let go at once."""
        if self._manager.closed:
            return
        with self._lock:
            self._released = True
            leases, self._leases = self._leases, []
        for lease in leases:
            self._l1.end_read(lease)

    def keep(self) -> None:
        """What was fetched is being used: it stays resident."""
        for lease in self._leases:
            self._l1.keep(lease)

    # -- the engine's side -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Lease what is resident, and ask the tiers for the rest."""
        if self._manager.closed:
            self.answer = self.first
            return
        l1, space, first = self._l1, self.space, self.first
        hashes = self._hashes[first:] if first else self._hashes
        missing: list[tuple[int, int]] = []  # (group, chunk)
        if self._prefix:
            lease = l1.reserve_read(self._tables[0], hashes)
            found = lease.objects
            self.objects[0] = dict(zip(range(first, first + len(found)), found, strict=True))
            self._add_lease(lease, "l1")
            missing = [(0, i) for i in range(first + len(found), len(self._hashes))]
        else:
            for g in range(len(space.groups)):
                lease, objects = l1.reserve_each(self._tables[g], hashes)
                self._add_lease(lease, "l1")
                for i, obj in enumerate(objects, first):
                    if obj is None:
                        missing.append((g, i))
                    else:
                        self.objects[g][i] = obj
        if missing and self._manager.tiers:
            self._done = threading.Event()
            self._manager.loop.begin(self._run, missing)
        else:
            self._finish(Fetch.of(_ABSENT, len(missing)))

    def refuse(self) -> None:
        """Instead of `start`, for hashes that cannot name chunks: nothing is found."""
        self._finish(Fetch.of("refused", (len(self._hashes) - self.first) * len(self._tables)))

    async def _run(self, missing: list[tuple[int, int]]) -> None:
        fetch = Fetch(self._arrived)
        self._due = sum(self.sources.values()) + len(missing)
        try:
            timeout_s = self._manager.config.lookup_timeout
            task = asyncio.ensure_future(self._fetch(fetch, missing))
            _, pending = await asyncio.wait((task,), timeout=timeout_s)
            if pending:
                # What still comes is kept in L1 for the next request; this one goes on with what it has.
                task.add_done_callback(_log_fault)
                fetch.over = "lookup_timeout"
            else:
                task.result()
        except asyncio.CancelledError:
            fetch.over = "closed"
        except BaseException:
            logger.exception("a lookup failed; it counts as a miss")
            fetch.over = "internal"
        if not self._released:  # else nobody has taken what came
            rest = self._due - sum(self.sources.values()) - sum(fetch.reasons.values())
            fetch.lost(fetch.over or next(iter(fetch.reasons), _ABSENT), max(0, rest))
        self._finish(fetch)

    async def _fetch(self, fetch: Fetch, missing: list[tuple[int, int]]) -> None:
        fetcher = self._manager.fetcher
        loads, end, absent = await self.located(missing, self.objects, fetch)
        self._located_end = end
        unused = len(missing) - len(loads) - absent
        if self.space.windows.count(None) < len(self.space.windows):
            self._due, unused = self._due - unused, 0  # in no window that is needed
        fetch.lost(unheard(fetch.silent)[0], absent + unused)
        end = self._worth(loads, end)
        refused = [(want, tier) for i, want, tier in loads if i >= end]
        loads = [load for load in loads if load[0] < end]
        if self._prefix and loads:
            self._coming = Coming(end, dict(Counter(self.sources) + Counter(tier.name for *_, tier in loads)))
            self._tell_coming()
        for want, tier in refused:
            fetch.lost("slow_tier", 1, want, tier)
        for tier in dict.fromkeys(tier for _, tier in refused):
            if self._manager.admission.probe_due(tier):
                fetcher.probe(tier, [want for want, t in refused if t is tier])
        await fetcher.load(fetch, [want for _, want, _ in loads], [tier for _, _, tier in loads])

    async def located(
        self, missing: list[tuple[int, int]], here: Sequence[Collection[int]], fetch: Fetch | None = None
    ) -> tuple[list[tuple[int, Want, Tier]], int, int]:
        """What to load of `missing` (group, chunk) for the longest prefix that there is with the chunks `here`: the
        chunk, the object and its tier. Also where that prefix ends, and how many objects no tier has."""
        wants = [Want(self._tables[g], self._hashes[i], self.space.groups[g]) for g, i in missing]
        sources = await self._manager.fetcher.locate(wants, fetch=fetch)
        there = [set(chunks) for chunks in here]
        for (g, i), source in zip(missing, sources, strict=True):
            if source:
                there[g].add(i)
        end = self._usable(there)
        found = zip(missing, wants, sources, strict=True)
        loads = [(i, want, s) for (g, i), want, s in found if s and i < end and self._in_window(g, i, end)]
        return loads, end, sources.count(None)

    def _worth(self, loads: "Sequence[tuple[int, Want, Tier]]", end: int) -> int:
        """Where the prefix ends that is sooner loaded than computed. With windows it is all or nothing: a window lies
        where the prefix ends, and what was found are those of this end."""
        admission, model = self._manager.admission, self.space.spec.computed_as
        if self._each or admission.speed(model) is None:
            return end
        begin, tokens = self._usable(self.objects), self.space.chunk_tokens
        chunks: dict[int, list[tuple[Tier, int]]] = {}
        windowed = self.space.windows.count(None) < len(self.space.windows)
        for i, want, tier in loads:
            if want.chunk_hash not in want.space.objects:  # else it lies in L1, behind a gap
                chunks.setdefault(begin if windowed else i, []).append((tier, want.space.nbytes))
        if windowed:
            steps = [Step((end - begin) * tokens, chunks.get(begin, ()))]
            return end if admission.cut(model, steps) else begin
        steps = [Step(tokens, chunks.get(i, ())) for i in range(begin, end)]
        return begin + admission.cut(model, steps)

    def _arrived(self, lease: ReadLease, source: str) -> None:
        if not lease.objects:
            return
        groups = {table: g for g, table in enumerate(self._tables)}
        with self._lock:
            if self._released or self.answer is not None:
                late = True
            else:
                late = False
                for obj in lease.objects:
                    self.objects[groups[obj.space]][self._places[obj.chunk_hash]] = obj
                self._add_lease(lease, source)
        if late:
            self._l1.keep(lease)
            self._l1.end_read(lease)
        else:
            self._tell_coming()

    def _tell_coming(self) -> None:
        if self._on_coming is not None and self.coming() is not None:
            self._on_coming()
            self._on_coming = None

    @cached_property
    def _places(self) -> dict[bytes, int]:
        return {h: i for i, h in enumerate(self._hashes)}

    def _usable(self, there: Sequence["set[int] | dict[int, L1Object]"]) -> int:
        """The largest n so that each full group has `[first, n)` and each windowed one the window before n."""
        if self._each:
            return max((i + 1 for found in there for i in found), default=self.first)
        end = len(self._hashes)
        for g, window in enumerate(self.space.windows):
            if window is None:
                i = self.first
                while i < end and i in there[g]:
                    i += 1
                end = i
        while end > self.first and not all(
            i in there[g]
            for g, window in enumerate(self.space.windows)
            if window is not None
            for i in range(max(self.first, end - window), end)
        ):
            end -= 1
        return end

    def _in_window(self, group: int, chunk: int, end: int) -> bool:
        window = self.space.windows[group]
        return window is None or chunk >= end - window

    def _add_lease(self, lease: ReadLease, source: str) -> None:
        if lease.objects:
            self._leases.append(lease)
            self.sources[source] = self.sources.get(source, 0) + len(lease.objects)

    def _miss(self, reason: str, count: int) -> None:
        if count:
            self.misses[reason] = self.misses.get(reason, 0) + count

    def _broken(self, answer: int, fetch: Fetch) -> tuple[str, str]:
        """Why the chunk where the answer ends could not be had, and the tiers that are the cause."""
        chunk_hash = self._hashes[answer]
        if chunk_hash in fetch.why:
            return fetch.why[chunk_hash]
        if fetch.over and (self._located_end is None or answer < self._located_end):
            return fetch.over, ""
        if all(answer in found for found in self.objects):
            return "window", ""
        if fetch.silent:
            return unheard(fetch.silent)
        return next(iter(fetch.reasons), _ABSENT), ""

    def _finish(self, fetch: Fetch) -> None:
        with self._lock:
            if self.answer is not None:
                return  # given up meanwhile
            if self._done is None and self._prefix:  # as it was leased
                answer = self.first + len(self.objects[0])
            else:
                answer = self._usable(self.objects)
            for reason, count in fetch.reasons.items():
                self._miss(reason, count)
            if answer < len(self._hashes) and not self._each:
                self.broke, self.blame = self._broken(answer, fetch)
            self.answer = answer
        self._answered(self, time.perf_counter() - self._began)
        if self._done is not None:
            self._done.set()


def _log_fault(task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("a late load failed: %r", error)
