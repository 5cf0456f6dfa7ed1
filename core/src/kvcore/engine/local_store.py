"""An object store whose tiers are in this process: the L2 stack without L1, for engines that own their host memory."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, TypeVar

from kvcore.api import ConfigError, ObjectKey
from kvcore.config import Config
from kvcore.control import Batches, Lent, StorageManager, locate, unheard
from kvcore.engine import space as spaces
from kvcore.engine.identity import Identities, Identity
from kvcore.engine.presence import Presence
from kvcore.engine.space import ModelSpec
from kvcore.engine.store_base import StoreBase
from kvcore.engine.store_checks import checked, nameable, rounds
from kvcore.engine.store_face import Buffers
from kvcore.engine.store_space import StoreSpace
from kvcore.l2 import Parcel, Tier
from kvcore.observe import Asked, Decisions, Metrics, logger
from kvcore.observe.decisions import salt_word
from kvcore.plugins import Registry

T = TypeVar("T")
SLACK_S = 1.0
"""How much later than its own deadlines a call is given up, when the tiers' loop does not run."""
CLOSE_S = 20.0
"""How long `close` waits for calls under way."""
DRAIN_S = 10.0
"""How long `close` waits until tiers have taken what is written in the background."""


class LocalSpace(StoreSpace):
    """A `StoreSpace` of tiers in this process. `namespaces`: of each group."""

    namespaces: tuple[bytes, ...]


class LocalStore(StoreBase):
    """An `ObjectStore` over the tiers of a configuration; `l1` and quotas of tenants are not used.

    A `load` whose storage hangs in a call beyond its deadline blocks until the storage has let go of the caller's
    buffers: the tier's circuit breaker keeps later calls away from it.
    """

    def __init__(self, manager: StorageManager, name: str = "kvcore") -> None:
        super().__init__(manager.metrics, Decisions(manager.config.inspect.requests, manager.config.inspect.tokens))
        self.manager = manager
        self.journal = manager.journal
        self.identities = Identities()
        self._batches = Batches(manager)
        self._idle = threading.Condition()
        self._calls = 0
        self._closed = False
        self._presence = Presence(manager, name)

    @classmethod
    def of(cls, config: Config, registry: Registry, name: str = "kvcore") -> "LocalStore":
        """Open the tiers of a configuration. Raises `ConfigError` or `PluginError`."""
        if not config.l2:
            raise ConfigError("l2 is empty: an object store needs at least one tier, such as `l2: [{storage: disk}]`")
        manager = StorageManager(config, registry, Metrics(), with_l1=False)
        try:
            if config.tenants:
                logger.warning("tenants: quotas are kept by a server only (`server:`), not by a store of this process")
            if manager.spans is not None:
                from kvcore.engine.traced import TracedStore

                return TracedStore(manager, name, manager.spans)
            return cls(manager, name)
        except BaseException:
            manager.close()
            raise

    def register(self, spec: ModelSpec, keys: str, tenant: str = "") -> LocalSpace:
        """See `ObjectStore.register`."""
        space = LocalSpace(spec, keys, tenant, self)
        lossy, salt = self.manager.lossy_tags, self.manager.config.salt
        groups = list(space.group_specs())
        space.namespaces = tuple(spaces.namespace(g, g.block_tokens, keys, lossy, salt, tenant) for g in groups)
        for name, one in zip(space.namespaces, groups, strict=True):
            self.identities.note(name, Identity(one, one.block_tokens, keys, tenant, salt_word(salt), lossy))
        return space

    def wait_ready(self, timeout_s: float) -> bool:
        """See `ObjectStore.wait_ready`."""
        return not (self._closed or self.manager.closed)

    # -- asking ------------------------------------------------------------------------------------------------------

    def exists(
        self, space: StoreSpace, hashes: Sequence[bytes], group: int = 0, asked: Asked | None = None, begin: int = 0
    ) -> list[bool]:
        """See `ObjectStore.exists`."""
        hashes = tuple(hashes)
        there = [False] * len(hashes)
        namespace = self._namespace(space, group)
        places: dict[bytes, list[int]] = {}
        for i, chunk_hash in enumerate(hashes):
            if namespace is not None and nameable(chunk_hash):
                places.setdefault(chunk_hash, []).append(i)
        if namespace is None or not places:
            return there
        keys = [ObjectKey(namespace, chunk_hash) for chunk_hash in places]
        begun = time.perf_counter()
        loop, tiers, patience_s = self.manager.loop, self.manager.tiers, self.lookup_timeout_s / 2
        silent: list[Tier] = []
        asking = locate(loop, tiers, keys, patience_s=patience_s, earlier_s=0.0, silent=silent)
        nothing: list[Tier | None] = [None] * len(keys)
        sources = self._run(asking, patience_s + SLACK_S, nothing)
        for indexes, source in zip(places.values(), sources, strict=True):
            for i in indexes:
                there[i] = source is not None
        seconds = time.perf_counter() - begun
        self.metrics.observe("lookup_seconds", seconds)
        decision = None
        if asked is not None:
            decision = self.decisions.begin(asked, namespace, hashes, 0, space.spec.block_tokens, begin)
        found = Counter(source.name for source in sources if source is not None)
        self._asked(decision, there, found, ("stalled", "") if sources is nothing else unheard(silent), seconds)
        return there

    # -- moving ------------------------------------------------------------------------------------------------------

    def load(
        self, space: StoreSpace, hashes: Sequence[bytes], buffers: Buffers, group: int = 0, request: str = ""
    ) -> list[bool]:
        """See `ObjectStore.load`."""
        tokens = space.spec.block_tokens if isinstance(space, StoreSpace) else 0  # else `_move` says what is wrong
        load = partial(self._batches.load, tokens=tokens)
        arrived = self._move(load, space, hashes, buffers, group, writable=True)
        self._loaded(request, group, arrived.count(True) * tokens)
        return arrived

    def store(
        self, space: StoreSpace, hashes: Sequence[bytes], buffers: Buffers, group: int = 0, request: str = ""
    ) -> list[bool]:
        """See `ObjectStore.store`."""
        stored = self._move(self._batches.store, space, hashes, buffers, group, writable=False)
        self._stored(request, stored.count(True))
        return stored

    def _move(
        self,
        how: Callable[[Sequence[Parcel], Lent], Coroutine[Any, Any, list[bool]]],
        space: StoreSpace,
        hashes: Sequence[bytes],
        buffers: Buffers,
        group: int,
        *,
        writable: bool,
    ) -> list[bool]:
        hashes = tuple(hashes)
        done = [False] * len(hashes)
        namespace = self._namespace(space, group)
        if namespace is None:
            return done
        layout = space.layouts[group]
        chosen = checked(hashes, buffers, layout, writable=writable, throttle=self._log)
        for batch in rounds(hashes, chosen):
            parcels = [Parcel(ObjectKey(namespace, hashes[i]), chosen[i], layout) for i in batch]
            lent = Lent(writable)
            moved = self._run(how(parcels, lent), self._batches.limit_s + SLACK_S, [False] * len(batch), lent)
            for i, ok in zip(batch, moved, strict=True):
                done[i] = ok
        return done

    def delete(self, space: StoreSpace, hashes: Sequence[bytes], group: int = 0) -> None:
        """See `ObjectStore.delete`."""
        namespace = self._namespace(space, group)
        if namespace is not None:
            keys = [ObjectKey(namespace, h) for h in dict.fromkeys(filter(nameable, hashes))]
            self._run(self._batches.delete(keys), self._batches.limit_s + SLACK_S, None)

    # -- the rest ----------------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> dict[str, str]:
        """The tiers' names in order, each with the name of its storage plugin."""
        return self.manager.tier_plugins

    @property
    def lookup_timeout_s(self) -> float:
        """See `ObjectStore.lookup_timeout_s`."""
        return self.manager.config.lookup_timeout

    def close(self) -> None:
        """See `ObjectStore.close`. Calls under way are waited for, in bounded time."""
        self._closed = True
        if not self.manager.closed:  # in a fork, another thread may have had the lock
            with self._idle:
                self._idle.wait_for(lambda: not self._calls, CLOSE_S)
            self._run(self._batches.drain(DRAIN_S), DRAIN_S + SLACK_S, None)
        self._presence.close()

    def _namespace(self, space: StoreSpace, group: int) -> bytes | None:
        """None when nothing can be asked: the store is closed, in a fork, or there is no such space or group."""
        mine = None if self._closed else self._mine(space, LocalSpace, group)
        return None if mine is None or self.manager.closed else mine.namespaces[group]

    def _run(self, coroutine: Coroutine[Any, Any, T], limit_s: float, nothing: T, lent: "Lent | None" = None) -> T:
        """Run it on the tiers' loop; `nothing` when that does not run it in time, or has ended.

        Memory that was `lent` for writing is only given up before anybody has begun to write into it.
        """
        with self._idle:
            self._calls += 1
        try:
            try:
                future = self.manager.loop.submit(coroutine)
            except RuntimeError:  # it was closed meanwhile
                coroutine.close()
                return nothing
            try:
                return future.result(limit_s)
            except TimeoutError:
                if lent is not None and not lent.take_back():
                    return future.result()
                future.cancel()
                self._log.warning("stalled", "the event loop of the tiers is blocked, by a plugin: requests miss")
                return nothing
        except CancelledError:  # closed in the midst of it
            return nothing
        except Exception:
            logger.exception("a request to the tiers failed; it counts as a miss")
            return nothing
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()
