"""A tier: a storage behind its serde chain, with a deadline on every call and a circuit breaker around it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from kvcore.api import (
    BlockingStorage,
    Entry,
    Failed,
    LoadOutcome,
    ObjectKey,
    Storage,
    StorageUnavailable,
    StoreOutcome,
    Usage,
)
from kvcore.l2.bounded import BoundedCalls
from kvcore.l2.breaker import Breaker
from kvcore.l2.buffers import StagingPool
from kvcore.l2.calls import Calls
from kvcore.l2.capacity import Capacity
from kvcore.l2.codec import Codec
from kvcore.l2.loading import Loader
from kvcore.l2.parcels import Moved, Parcel
from kvcore.l2.record import Record
from kvcore.l2.speed import LoadSpeed
from kvcore.l2.storing import Storer
from kvcore.l2.threads import DeadlineExceeded, Threads, ignore_error
from kvcore.l2.told import Told
from kvcore.l2.tools import Tools
from kvcore.l2.turns import Turns
from kvcore.observe import Metrics, logger

T = TypeVar("T")
START_S = 10.0
"""So long a start waits for a storage to open."""
CLOSE_S = 5.0
_QUIET, _QUIET_S = 3, 0.01
"""So often in a row, at this distance, nobody is at work in a tier that is to be closed."""
_ROUNDS = ((4, 8 << 20), (2, 1 << 20), (1, 0))
"""Rounds of batches, and the bytes from which a batch of so many is worth its own call."""
_PROBE = [ObjectKey(bytes(16), bytes(32), 0)]
"""A key that nobody stores."""


class _NotUsable(Exception):
    """The tier is not to be asked any more."""


class Tier:
    """One storage of the L2 stack. All methods run on one event loop and never raise for a storage's faults.

    Args:
        name: as in metrics and logs.
        storage: the plugin's instance.
        codec: the serde chain.
        threads: where encoding, decoding and checksums run.
        timeout_s: the deadline of every storage call, and of encoding or decoding a batch.
        useful_s: an answer to `exists` that takes longer is of no use to a lookup, and a load that takes longer counts
            against the tier.
        capacity: the account, for a capacity, quotas or a time to live that the storage does not keep itself.
        always: it is loaded from however long it takes.
        told: keeps the order in which observers are told of stores and of what is deleted.
        on_evict: hears why something was deleted, `room` or `expired`, and what.
    """

    def __init__(
        self,
        name: str,
        storage: Storage | BlockingStorage,
        codec: Codec,
        *,
        threads: Threads,
        timeout_s: float,
        metrics: Metrics,
        useful_s: float = float("inf"),
        capacity: Capacity | None = None,
        always: bool = False,
        told: Told | None = None,
        on_evict: Callable[[str, Sequence[Entry]], None] = lambda reason, gone: None,
    ) -> None:
        self.name = name
        self.codec = codec
        self.storage = storage
        self.told = told or Told()
        self._on_evict = on_evict
        self.capacity = capacity
        """What is known of what it holds, where kvcore looks after that itself."""
        self._calls = Calls(storage, name, timeout_s)
        if capacity is not None:
            self._calls = BoundedCalls(storage, name, timeout_s, capacity, self._evicted)
        self._timeout_s = timeout_s
        self._useful_s = useful_s
        self._threads = threads
        self._opened = False
        self._closed = False
        self._callers = 0
        self._memory: memoryview | None = None
        self._healing: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._metrics = metrics
        self.concurrency = self._calls.concurrency
        """So many calls its storage takes at once."""
        self._turns = Turns(self.concurrency)
        self._load_turns = Turns(2 * self.concurrency)  # some are read while others are decoded
        self._always = always
        self._speed = LoadSpeed()
        self.breaker = Breaker(self._changed)
        self._record = Record(name, metrics, self.breaker, useful_s)
        staging = StagingPool(8 * self.concurrency)
        tools = Tools(codec, self._calls, staging, self._record, self._on_thread, self.delete)
        self._loader, self._storer = Loader(storage, tools), Storer(tools)
        metrics.set("tier_open", 1, name)

    async def open(self) -> None:
        """Open the storage. Raises what the storage raises: at start, a fault is the user's to see.

        One that is unavailable, or takes longer than a start may be delayed, is opened later.
        """
        self._opening = asyncio.create_task(self._open())
        await asyncio.wait((self._opening,), timeout=START_S)
        try:
            if self._opening.done():
                self._opening.result()
            else:
                self.breaker.open(f"it is still being opened after {START_S:g} s")
        except (StorageUnavailable, DeadlineExceeded) as error:
            self.breaker.open(str(error))

    async def _open(self) -> None:
        """Runs to its end, however long the storage takes: it is never called again before."""
        try:
            await self._calls.open()
        except DeadlineExceeded as error:
            if error.settled is None:
                raise
            await asyncio.wait((error.settled,))
            if error.settled.cancelled():
                raise StorageUnavailable("it was still being opened when its time was up") from error
            error.settled.result()
        self._opened = True
        self._calls.opened()
        if self._memory is not None:
            self.register_memory(self._memory)

    def register_memory(self, memory: memoryview) -> None:
        """Tell a storage that declares `zero_copy` where the arena is. Raises what the storage raises."""
        self._memory = memory
        if self.storage.zero_copy and self._opened:
            self.storage.register_memory(memory)

    @property
    def usable(self) -> bool:
        """It is asked. Otherwise whatever is asked of it is a miss."""
        return self.breaker.closed and not self._closed

    @property
    def opened(self) -> bool:
        """The storage has been opened: it was there."""
        return self._opened

    @property
    def stuck_s(self) -> float | None:
        """For how many seconds calls hang in the storage or a serde beyond their deadline; None: none does."""
        since = [t for t in (self._calls.stuck_since, self._threads.stuck_since) if t is not None]
        return time.monotonic() - min(since) if since else None

    async def finish(self) -> None:
        """Wait until nobody is at work in it: callers that still come must be few. Then all it is asked is a miss.

        A storage that hangs is waited for as long as its deadlines allow, twice over.
        """
        give_up = time.monotonic() + 2 * self._timeout_s
        quiet = 0
        while quiet < _QUIET and time.monotonic() < give_up:  # a caller may stand between `exists` and `load`
            quiet = 0 if self._callers else quiet + 1
            await asyncio.sleep(_QUIET_S)
        self._closed = True

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._callers += 1
        try:
            yield
        finally:
            self._callers -= 1

    @asynccontextmanager
    async def _turn(self, who: bytes, since: float) -> AsyncIterator[None]:
        """One of the calls that the storage takes at once, to load what has waited `since` then. Raises `_NotUsable`:
        the breaker may open while it waits."""
        async with self._turns.turn(who):
            self._metrics.observe("tier_wait_seconds", time.perf_counter() - since, self.name, "load")
            if not self.usable:
                raise _NotUsable
            yield

    async def close(self) -> None:
        """Close the storage; a fault is logged."""
        self._closed = True
        if self._healing is not None:
            self._healing.cancel()
        if self._opening is not None and not self._opening.done():
            await asyncio.wait((self._opening,), timeout=CLOSE_S)
            self._opening.cancel()
        try:
            await self._calls.close()
        except Exception as error:
            logger.warning("tier %s: close failed: %s", self.name, error)

    def batch_size(self, objects: int, nbytes: int) -> int:
        """Into how large batches to cut `objects` of `nbytes`: enough of them to keep the storage busy, and more rounds
        of as many where a batch is still worth its own call: what one has brought is used while the next is read."""
        for rounds, worth in _ROUNDS:
            share = -(-objects // (rounds * self.concurrency))
            if share * nbytes >= worth:
                break
        return max(1, min(share, (32 << 20) // max(1, nbytes)))

    def pieces(self, batch: Sequence[T], nbytes: int) -> list[Sequence[T]]:
        """A batch of objects of `nbytes`, cut by `batch_size`."""
        size = self.batch_size(len(batch), nbytes)
        return [batch[at : at + size] for at in range(0, len(batch), size)]

    async def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which objects the storage says it has; all False when it does not answer. See `ask`."""
        found = await self.ask(keys)
        return [False] * len(keys) if found is None else found

    async def ask(self, keys: Sequence[ObjectKey]) -> list[bool] | None:
        """Which objects the storage says it has; None when it does not answer.

        What was found unreadable here counts as absent, so that it is not fetched again, and a store replaces it.
        """
        if not self.usable:
            return None
        if not keys:
            return []
        try:
            with self._at_work():
                answer = await self._calls.exists(keys, min(self._useful_s, self._timeout_s))
            found = [bool(x) and k not in self._record.unreadable for k, x in zip(keys, answer, strict=True)]
        except Exception as error:
            self._record.failed("exists", len(keys), error)
            return None
        self.breaker.success("exists")
        return found

    async def load(self, wanted: Sequence[Parcel], held: Callable[[], bool] = lambda: True) -> Moved[LoadOutcome]:
        """Bring objects into their payloads, checked and decoded.

        Args:
            held: asked just before the payloads' memory is used: may it still be written? False loads nothing.
        """
        down: Moved[LoadOutcome] = Moved([Failed("the circuit breaker is open", "tier_down")] * len(wanted))
        if not wanted or not self.usable:
            return down
        begun = time.perf_counter()
        with self._at_work():
            who = wanted[0].key.namespace
            async with self._load_turns.turn(who):
                try:
                    return await self._loader.load(wanted, held, self._turn(who, begun))
                except _NotUsable:
                    return down

    async def store(
        self, given: Sequence[Parcel], held: Callable[[], bool] = lambda: True, since: float | None = None
    ) -> Moved[StoreOutcome]:
        """Encode objects and write them.

        Args:
            held: asked once the checksums are made: are the payloads still what the caller gave? False stores nothing.
            since: when they began to wait, by `time.perf_counter`. Default: now.
        """
        down: Moved[StoreOutcome] = Moved([Failed("the circuit breaker is open", "tier_down")] * len(given))
        if not given or not self.usable:
            return down
        since = since or time.perf_counter()
        with self._at_work():
            async with self._turns.turn(given[0].key.namespace):
                self._metrics.observe("tier_wait_seconds", time.perf_counter() - since, self.name, "store")
                return await self._storer.store(given, held) if self.usable else down

    def load_seconds(self, nbytes: int) -> float:
        """How long it takes to deliver `nbytes` of payloads; 0 while that is not known, or does not matter."""
        return 0.0 if self._always else self._speed.seconds(nbytes)

    def delivered(self, nbytes: int, seconds: float, *, probe: bool = False) -> None:
        """All that one lookup had from this tier, in how long; `probe`: nobody waited for it."""
        (self._speed.probed if probe else self._speed.loaded)(nbytes, seconds)
        if self._speed.known and not self._closed:  # gauges that have ended must not come back
            self._metrics.set("tier_load_latency_seconds", self._speed.latency_s, self.name)
            if self._speed.seconds_per_byte:
                self._metrics.set("tier_load_bytes_per_second", 1 / self._speed.seconds_per_byte, self.name)

    async def delete(self, keys: Sequence[ObjectKey]) -> bool:
        """Delete objects; whether the storage has. A fault is counted."""
        if self._closed:
            return False
        try:
            await self._calls.delete(keys)
        except Exception as error:
            self._record.failed("delete", len(keys), error)
            return False
        return True

    def entries(self, batch: int) -> AsyncIterator[Sequence[Entry]]:
        """What the storage lists, `batch` objects at a time. Raises what the storage raises, `NotImplementedError`
        where it cannot list."""
        return self._calls.entries(batch)

    @property
    def expires(self) -> bool:
        """Its objects have a time to live, which `expire` keeps."""
        return self.capacity is not None and self.capacity.ttl_s is not None

    async def expire(self) -> None:
        """Delete objects whose time is over; a fault is counted."""
        if not isinstance(self._calls, BoundedCalls) or not self._opened or not self.usable:
            return
        try:
            with self._at_work():
                gone = await self._calls.expire()
        except Exception as error:
            self._record.failed("delete", 1, error)
            return
        self._metrics.add("expired_objects", len(gone), self.name)
        self._on_evict("expired", gone)

    async def usage(self) -> Usage | None:
        """What the storage holds, or None."""
        try:
            return await self._calls.usage()
        except Exception:
            return None

    async def ping(self) -> None:
        """Prove that the storage answers. Raises what it raises."""
        await self._calls.ping()

    async def probe(self) -> None:
        """Try a tier that is left alone, when that is due: a ping and a question whose answer is no."""
        if not self.breaker.allow_probe():
            return
        try:
            if not self._opened:
                await self._reopen()
            await self._calls.ping()
            await self._calls.exists(_PROBE, min(self._useful_s, self._timeout_s))
        except Exception as error:
            self.breaker.probed(False, str(error) or repr(error))
        else:
            self.breaker.probed(True)

    async def _reopen(self) -> None:
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(ignore_error)  # the next probe says it
        await asyncio.wait((self._opening,), timeout=self._timeout_s)
        if not self._opening.done():
            raise StorageUnavailable("it is still being opened")
        self._opening.result()

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def _on_thread(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        return await self._threads.run(function, *args, timeout_s=self._timeout_s, what=f"{self.name}: {what}")

    def _evicted(self, gone: Sequence[Entry]) -> None:
        self._metrics.add("tier_evicted", len(gone), self.name)
        self._on_evict("room", gone)

    def _changed(self, closed: bool, cause: str) -> None:
        if self._closed:
            return
        self._metrics.set("tier_open", int(closed), self.name)
        if closed:
            logger.warning("tier %s answers again and is used again", self.name)
        else:
            self._metrics.add("tier_opened", 1, self.name)
            logger.warning(
                "tier %s does not serve and is left alone for a while; requests go on without it (%s)", self.name, cause
            )
            self._healing = asyncio.create_task(self._heal())

    async def _heal(self) -> None:
        """Probe until it answers. No request ever waits for a tier that is down."""
        while not self.breaker.closed and not self._closed:
            await asyncio.sleep(max(self.breaker.pause_s, 0.01))
            await self.probe()
