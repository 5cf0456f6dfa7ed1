"""The engine's side of a server: an `Engine` whose cache is in another process."""

import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.api import LeaseError, ObjectEvent, ObjectKey
from kvcore.config import Config
from kvcore.engine import Coming, ModelSpec, Space, StorePlan
from kvcore.engine import space as spaces
from kvcore.engine.answers import check_blocks, count_answer, promised
from kvcore.observe import Asked, Decision, Decisions, Metrics, Throttle
from kvcore.observe.savings import count_saved
from kvcore.plugins import Registry
from kvcore.service import wire
from kvcore.service.copies import load_copies, spans_of, store_copies
from kvcore.service.greeting import hello_of
from kvcore.service.keeper import Keeper
from kvcore.service.link import Link
from kvcore.service.lookup import RemoteLookup, ServedSpace
from kvcore.transfer.plan import Copy

CLEAR_S = 10.0
"""How long `clear` waits for the server's count."""
DELETE_S = 30.0
"""How long `delete` waits until the server's tiers have deleted."""


class RemoteEngine:
    """An `Engine` behind a server. Thread-safe; without a server everything is a miss, at once.

    Args:
        config: with `server`, of one address.
        registry: where the key generator comes from.
        name: of this engine, for the server's log.
        start: starts a server where none is, or does nothing.
    """

    def __init__(self, config: Config, registry: Registry, name: str, start: Callable[[], None]) -> None:
        assert config.server is not None
        self.config = config
        self.name = name
        self.metrics = Metrics()
        self.metrics.set("server_up", 0)
        self.decisions = Decisions(config.inspect.requests, config.inspect.tokens)
        self._server = config.server
        (self._address,) = config.server.url
        self.address = str(self._address)
        self._keys = registry.create("keys", config.keys)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._spaces: weakref.WeakValueDictionary[int, ServedSpace] = weakref.WeakValueDictionary()
        self._registered: set[int] = set()
        """Spaces that the server of now knows, those included that nobody here uses any more."""
        self._unused: deque[int] = deque()
        """Spaces that nobody uses since the last `register`."""
        self._waiting: dict[int, RemoteLookup] = {}
        self._late: dict[int, list[Any]] = {}
        """What is answered when it is done -> its answer, once there is one."""
        self._plans: dict[int, tuple[Link, int, int, Decision | None]] = {}
        self._link: Link | None = None
        self._up = threading.Event()
        self._observer: Any = None
        self._heard_over: Link | None = None
        self._child = False
        self._closed = False
        self.leaving: Callable[[], None] = _nothing
        """Called by `close`."""
        self._log = Throttle()
        self._keeper = Keeper(self._address, hello_of(config.server, name, os.getpid()), self._adopt, start)
        _engines.add(self)

    @property
    def lookup_timeout_s(self) -> float:
        """The server's `lookup_timeout`; while there is none, that of the client's own configuration."""
        link = self._link
        return self.config.lookup_timeout if link is None else link.welcome.lookup_timeout_s

    def wait_ready(self, timeout_s: float) -> bool:
        """Is there a server? Waits at most `timeout_s` (seconds) until there is one."""
        if not self._closed and timeout_s > 0:  # which a NaN is not
            self._up.wait(min(timeout_s, threading.TIMEOUT_MAX))
        return self._link is not None and not self._closed

    def spaces(self) -> list[ServedSpace]:
        """Those that are registered and that somebody here uses."""
        return list(self._spaces.values())

    def ready(self, space: ServedSpace) -> bool:
        """Is there a server, which has not refused this space?"""
        return self._link is not None and not space.refused

    def register(self, spec: ModelSpec, tenant: str = "") -> ServedSpace:
        """See `Engine.register`."""
        spaces.check(spec)
        chunk_tokens = spaces.resolve_chunk_tokens(spec, self.config.chunk_tokens, int(self.config.min_object_size))
        return self.admit(spec, tenant, chunk_tokens, self._keys.scheme)

    def admit(self, spec: ModelSpec, tenant: str, chunk_tokens: int, key_scheme: str) -> ServedSpace:
        """Register a model whose hashes are made by `key_scheme`, of chunks of this size."""
        space = ServedSpace(spec, self._keys, b"", chunk_tokens, self.descriptor, tenant)
        space.id = next(self._ids)
        space.key_scheme = key_scheme
        weakref.finalize(space, self._unused.append, space.id).atexit = False
        with self._lock:
            self._spaces[space.id] = space
            if self._link is not None:
                while self._unused:
                    unused = self._unused.popleft()
                    if unused in self._registered:
                        self._registered.discard(unused)
                        self._link.tell(wire.Forget(unused))
                self._introduce(self._link, space)
        return space

    # -- loading -----------------------------------------------------------------------------------------------------

    def lookup(
        self, space: Space, hashes: Sequence[bytes], first: int = 0, asked: Asked | None = None, each: bool = False
    ) -> RemoteLookup:
        """See `Engine.lookup`. `each`: every chunk for itself, and `retrieve` gives those that are there."""
        assert isinstance(space, ServedSpace)
        link = self._link
        first = min(first, len(hashes))
        most = wire.most_hashes(len(space.groups))
        wanted = hashes[first : first + most] if first or len(hashes) > most else hashes
        lookup = RemoteLookup(space, first, len(wanted), next(self._ids), link, self._answered)
        if (asked is not None or not each) and not self._closed:
            lookup.decision = self.decisions.begin(asked, space.namespace, hashes, first, space.chunk_tokens)
        if link is None or space.refused or not wanted or not spaces.can_name_chunks(wanted):
            lookup.lose("refused" if link is not None else "no_server")
            return lookup
        self._waiting[lookup.id] = lookup
        who = None if asked is None else wire.who_of(asked, first)
        answer = link.ask(wire.Find(lookup.id, space.id, len(wanted[0]), b"".join(wanted), each, who))
        if isinstance(answer, wire.Found):
            self._reply(answer)
        elif answer is None:
            self._lost_lookup(lookup)
        return lookup

    def queued(self, space: Space, hashes: Sequence[bytes], asked: Asked | None = None) -> None:
        """See `Engine.queued`."""
        assert isinstance(space, ServedSpace)
        link = self._link
        if link is None or not link.welcome.queued or space.refused or not hashes:
            return
        front = hashes[: wire.most_hashes(len(space.groups))]
        if spaces.can_name_chunks(front):
            who = None if asked is None else wire.who_of(asked, 0)
            link.tell(wire.Queued(space.id, len(front[0]), b"".join(front), who))

    def coming(self, lookup: RemoteLookup) -> Coming | None:
        """See `Engine.coming`."""
        return lookup.coming if lookup.answer is None else None

    def retrieve(self, lookup: RemoteLookup, first_block: int, block_ids: Sequence[Sequence[int]]) -> list[Copy]:
        """See `Engine.retrieve`."""
        end = promised(lookup)
        if end <= lookup.first:
            return []
        return self._plan_loads(lookup, lookup.groups, first_block, block_ids)

    def arrived(self, lookup: RemoteLookup, first_block: int, block_ids: Sequence[Sequence[int]]) -> list[Copy]:
        """See `Engine.arrived`."""
        answer = lookup.take(next(self._ids))
        if answer is None:
            raise LeaseError("the lookup's leases have ended")
        if not answer.fresh.slots:
            return []
        end = lookup.first + max(wire.unpack_indexes(answer.fresh.indexes)) + 1
        check_blocks(lookup.space, block_ids, end)
        return self._plan_loads(lookup, [answer.fresh], first_block, block_ids)

    def _plan_loads(
        self, lookup: RemoteLookup, groups: Sequence[wire.Slots], first_block: int, block_ids: Sequence[Sequence[int]]
    ) -> list[Copy]:
        copies, loaded = load_copies(lookup, groups, first_block, block_ids)
        tokens = loaded * lookup.space.spec.block_tokens
        if not lookup.use(tokens):
            raise LeaseError("the lookup's leases have ended")
        coming = lookup.coming.sources if lookup.coming is not None else {}
        count_saved(self.metrics, tokens, lookup.sources or coming)
        if lookup.decision is not None:
            lookup.decision.retrieved += tokens
        return copies

    def renew(self, lookup: RemoteLookup) -> bool:
        """See `Engine.renew`."""
        return lookup.renew()

    def release(self, lookup: RemoteLookup) -> None:
        """See `Engine.release`."""
        if lookup.released:
            return
        lookup.released = True
        self._waiting.pop(lookup.id, None)
        if lookup.link is not None and lookup.held:
            lookup.link.tell(wire.Release(lookup.id))

    # -- storing -----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        space: Space,
        hashes: Sequence[bytes],
        first: int,
        last: int,
        block_ids: Sequence[Sequence[int]],
        request: str = "",
        chained: bool = True,
    ) -> StorePlan:
        """See `Engine.reserve`. `chained`: the hashes are of chunks that follow each other."""
        assert isinstance(space, ServedSpace)
        link, blocks = self._link, space.chunk_blocks
        groups = len(space.groups)
        last = min(last, len(hashes))
        end = min(last, first + wire.most_hashes(groups))
        wanted = hashes[first:end]
        count = len(wanted)
        parent = [hashes[first - 1]] if first > 0 and count else []
        if len(block_ids) != groups or not spaces.can_name_chunks([*parent, *wanted]):
            return self._plan(0, [], {"refused": max(0, last - first) * groups}, "")
        spans = [spans_of(ids[first * blocks : (first + count) * blocks], blocks, count) for ids in block_ids]
        no_block = sum(span is None for group in spans for span in group)
        skipped = {"no_block": no_block} if no_block else {}
        if end < last:
            skipped["too_long"] = (last - end) * groups
        asked = sum(map(len, spans)) - no_block
        if link is None or space.refused:
            if asked:
                skipped["refused" if link is not None else "no_server"] = asked
            return self._plan(0, [], skipped, "")
        if not asked:
            return self._plan(0, [], skipped, link.token)
        chosen = tuple(
            wire.pack_indexes([i for i, span in enumerate(group) if span is not None]) if None in group else None
            for group in spans
        )
        size, blob = len(wanted[0]), b"".join(wanted)
        above, name = b"".join(parent), wire.word(request)
        answer = link.ask(wire.Reserve(next(self._ids), space.id, size, blob, above, chosen, chained, name))
        if answer is not None and not all(wire.whole(found, count) for found in answer.groups):
            link.lose("protocol")
        if answer is None or not link.alive:
            return self._plan(0, [], {**skipped, "no_server": asked}, "")
        for reason, n in answer.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + n
        copies = store_copies(answer.groups, spans)
        plan_id = next(self._ids) if answer.plan else 0
        if plan_id:
            self._plans[plan_id] = (link, answer.plan, len(copies), self.decisions.latest(request))
        return self._plan(plan_id, copies, skipped, link.token)

    def publish(self, plan_id: int, ok: bool = True) -> None:
        """See `Engine.publish`."""
        link, plan, count, decision = self._plans.pop(plan_id, (None, 0, 0, None))
        if link is not None and link.tell(wire.Publish(plan, bool(ok))) and ok:
            self.metrics.add("stored_chunks", count)
            if decision is not None:
                decision.stored += count

    def prefilled(self, space: Space, tokens: int, seconds: float) -> None:
        """See `Engine.prefilled`."""
        assert isinstance(space, ServedSpace)
        link = self._link
        if link is not None and 0 < tokens < wire.MAX_ID and 0 < seconds < math.inf:  # else it says nothing
            link.tell(wire.Prefilled(space.id, int(tokens), float(seconds)))

    # -- observing ---------------------------------------------------------------------------------------------------

    def observe(self, name: str, observer: Any) -> None:
        """Have `observer`'s methods `stored(events)` and `evicted(events)` called by `hear`, of this engine's spaces,
        and `lost()` when what was told so far may be no longer true."""
        with self._lock:  # a connection that is just being made asks for news, or we do
            self._observer = observer
            if self._link is not None:
                self._link.tell(wire.News(0))

    def hear(self) -> None:
        """Ask the server what has come and gone since the last time. Call it from one thread at a time."""
        link, observer = self._link, self._observer
        if observer is None:
            return
        answer = link.ask(wire.News(next(self._ids))) if link is not None else None
        told = answer if isinstance(answer, wire.Told) else None
        if self._heard_over not in (None, link if told is not None else None) or (told is not None and told.lost):
            observer.lost()
        self._heard_over = link if told is not None else None
        for heard in told.news if told is not None else ():
            events = [ObjectEvent(ObjectKey(heard.namespace, h, heard.group), heard.tier, 0) for h in heard.hashes]
            (observer.stored if heard.here else observer.evicted)(events)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def descriptor(self) -> dict[str, Any] | None:
        """See `Engine.descriptor`."""
        link = self._link
        if link is None:
            return None
        arena = link.welcome.arena
        return {
            **arena,
            "header": arena["token"],
            "token": link.token,
            "server": self._address.path or ("127.0.0.1", self._address.port),
            "timeout": self._server.timeout,
        }

    def clear(self, space: Space) -> int:
        """See `Engine.clear`."""
        assert isinstance(space, ServedSpace)
        return self._number(wire.Clear(next(self._ids), space.id), CLEAR_S)

    def drain(self, timeout_s: float = 10.0) -> int:
        """See `Engine.drain`. Without a server nothing waits."""
        timeout_s = float(min(timeout_s, wire.MAX_DRAIN_S)) if timeout_s > 0 else 0.0  # which a NaN is not
        return self._number(wire.Drain(next(self._ids), timeout_s), timeout_s + self._server.timeout)

    def exists(self, space: ServedSpace, hashes: Sequence[bytes]) -> list[bool]:
        """Which objects of a space with one group are there, as a hint. Hashes as `lookup` takes them."""
        there = [False] * len(hashes)
        link = self._link
        if link is None or space.refused or not hashes or not spaces.can_name_chunks(hashes):
            return there
        message = wire.Exists(next(self._ids), space.id, len(hashes[0]), b"".join(hashes))
        answer = self._ask_late(message, link.welcome.lookup_timeout_s + link.timeout_s)
        if isinstance(answer, wire.There) and len(answer.indexes) % 4 == 0:
            for i in wire.unpack_indexes(answer.indexes):
                if i < len(there):
                    there[i] = True
        return there

    def delete(self, space: ServedSpace, hashes: Sequence[bytes]) -> int:
        """Forget objects of a space with one group, in L1 and the tiers; how many left L1."""
        if space.refused or not hashes or not spaces.can_name_chunks(hashes):
            return 0
        return self._number(wire.Delete(next(self._ids), space.id, len(hashes[0]), b"".join(hashes)), DELETE_S)

    def _number(self, message: wire.Clear | wire.Drain | wire.Delete, timeout_s: float) -> int:
        answer = self._ask_late(message, timeout_s)
        return answer.value if isinstance(answer, wire.Number) else 0

    def _ask_late(self, message: wire.Clear | wire.Drain | wire.Delete | wire.Exists, timeout_s: float) -> Any:
        """The answer to what may take the server longer than others wait; None when there is none by then."""
        link, number = self._link, message.id
        if link is None:
            return None
        answers: list[Any] = []
        self._late[number] = answers
        try:
            if link.tell(message):
                link.wait(lambda: bool(answers), timeout_s)
            return answers[0] if answers else None
        finally:
            del self._late[number]

    @property
    def tiers(self) -> dict[str, str]:
        """See `Engine.tiers`. Without a server, those of the configuration."""
        link = self._link
        return dict(link.welcome.tiers) if link is not None else {t.name: t.storage.plugin for t in self.config.l2}

    def stats(self) -> dict[str, float]:
        """See `Engine.stats`. What the server counts, for all its engines, are its own metrics."""
        return self.metrics.values()

    def metrics_text(self) -> str:
        """See `Engine.metrics_text`."""
        return self.metrics.text()

    def close(self) -> None:
        """Leave the server. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._keeper.close()
        self.leaving()

    # -- the link ----------------------------------------------------------------------------------------------------

    def _adopt(self, made: Any, welcome: wire.Welcome) -> Link:
        link = Link(made, welcome, self._server.timeout, self._reply, self._lost)
        with self._lock:
            self._registered.clear()
            self._unused.clear()  # the new server has heard of none of them
            for space in list(self._spaces.values()):
                self._introduce(link, space)
            if self._observer is not None:
                link.tell(wire.News(0))  # what comes and goes from now on is kept for `hear`
            if link.alive:
                self._link = link
                self._up.set()
                self.metrics.set("server_up", 1)
                if self._link is not link:  # lost again by who has used it at once
                    self._up.clear()
                    self.metrics.set("server_up", 0)
        return link

    def _introduce(self, link: Link, space: ServedSpace) -> None:
        keys, salt = space.key_scheme, self.config.salt
        message = wire.Register(space.id, space.spec, space.tenant, space.chunk_tokens, keys, salt)
        try:
            framed = memoryview(wire.frame(message))[wire.LENGTH.size :]
            if len(framed) > wire.MAX_FRAME:
                raise ValueError(f"it takes {len(framed)} bytes, at most {wire.MAX_FRAME} are sent")
            wire.decode_request(framed)  # a wrong one would end the link
            space.refused = False
            self._registered.add(space.id)
            link.tell(message)
        except (ValueError, TypeError, OverflowError, wire.ProtocolError) as error:  # such as a path that is no text
            space.refused = True
            self._log.warning("register", f"model {space.spec.model[:100]!a} cannot be told to a server: {error}")

    def _reply(self, reply: Any) -> None:
        if isinstance(reply, wire.Found):
            lookup = self._waiting.pop(reply.id, None)
            if lookup is not None:
                lookup.found(reply)
        elif isinstance(reply, wire.Coming):
            lookup = self._waiting.get(reply.id)
            if lookup is not None:
                lookup.coming = Coming(lookup.first + reply.chunks, reply.sources)
        elif isinstance(reply, wire.Registered):
            if (space := self._spaces.get(reply.id)) is not None:
                space.namespace, space.refused = reply.namespace, bool(reply.refused)
            if reply.refused:
                self._log.warning("registered", f"the server cannot cache this model: {reply.refused}")
        elif (answers := self._late.get(reply.id)) is not None:  # else whoever asked has given up
            answers.append(reply)

    def _lost(self, link: Link, reason: str) -> None:
        if self._link is link:
            self._link = None
            self._up.clear()
        self.metrics.set("server_up", 0)
        if not self._closed:
            self.metrics.add("server_lost", 1, reason)
            text = (
                f"the server at {self._address} is gone ({reason}): this engine runs without a cache until it is back"
            )
            self._log.warning("lost", text)
        for lookup in list(self._waiting.values()):
            if lookup.link is link:
                self._lost_lookup(lookup)
        for plan_id, (of, *_) in list(self._plans.items()):
            if of is link:
                self._plans.pop(plan_id, None)

    def _lost_lookup(self, lookup: RemoteLookup) -> None:
        if self._waiting.pop(lookup.id, None) is not None:
            lookup.lose("no_server")

    def _answered(self, lookup: RemoteLookup, seconds: float) -> None:
        if not self._child:
            count_answer(self.metrics, lookup, seconds)
        if (decision := lookup.decision) is not None:
            decision.namespace = lookup.space.namespace
            decision.answered(lookup, seconds)

    def _plan(self, plan_id: int, copies: list[Copy], skipped: dict[str, int], arena: str) -> StorePlan:
        for reason, count in skipped.items() if not self._child else ():
            self.metrics.add("store_skipped_chunks", count, reason)
        return StorePlan(plan_id, copies, skipped, arena)

    def _forked(self) -> None:
        """In a child everything is a miss, and nothing is counted: another thread may have held a lock."""
        self._closed = self._child = True
        self._lock = threading.Lock()
        self._up = threading.Event()
        link, self._link = self._link, None
        if link is not None:
            link.forked()
        for lookup in list(self._waiting.values()):
            self._lost_lookup(lookup)


def _nothing() -> None:
    pass


_engines: "weakref.WeakSet[RemoteEngine]" = weakref.WeakSet()


def _forked() -> None:
    for engine in list(_engines):
        engine._forked()


os.register_at_fork(after_in_child=_forked)
