"""One client's session: its spaces, lookups and plans, for as long as its connection lasts. All of it on the server's
thread, where every call of the engine returns at once.

When the client is gone, its leases end. What it had reserved is disowned: its keys are free at once, its slots when
none of its workers has the arena mapped any more. Each session has an arena token of its own, so that a worker which
attaches too late is refused, and nothing that an earlier session planned is ever copied.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvcore.api import KVCoreError, LayoutError
from kvcore.engine import CacheEngine, Lookup, Space
from kvcore.engine import space as spaces
from kvcore.engine.objects import delete, exists
from kvcore.l1 import L1Object
from kvcore.service import wire
from kvcore.service.connection import Connection
from kvcore.service.news import Box, Newsroom

MAX_SPACES = 65536
MAX_LOOKUPS = 65536
"""What a client may hold at once, far beyond what an engine does."""
CLEARED = 8192
"""Objects that are cleared in one turn."""

Later = Callable[[Callable[[], None]], None]
"""Has something called on the server's thread, from any thread."""


class Session:
    """See above.

    Args:
        engine: the cache.
        connection: to the client.
        hello: its first message.
        searching: told when lookups begin to wait for tiers.
    """

    def __init__(
        self,
        engine: CacheEngine,
        connection: Connection,
        hello: wire.Hello,
        later: Later,
        searching: "Callable[[Session], None]",
    ) -> None:
        self.token = secrets.token_hex(16)
        self.name = hello.name
        self.pid = hello.pid
        self.began = time.time()
        self.ended = False
        self.workers: set[Connection] = set()
        self.waiting: dict[int, Lookup] = {}
        """Lookups that tiers are asked for, oldest first."""
        self._engine = engine
        self._connection = connection
        self._later = later
        self._searching = searching
        self._thread = threading.get_ident()
        self._spaces: dict[int, Space] = {}
        self._lookups: dict[int, Lookup] = {}
        self._plans: dict[int, None] = {}
        self._namespaces: set[bytes] = set()
        """Those that it has had since it asks for news."""
        self._box: Box | None = None

    def handle(self, body: memoryview) -> None:
        """One message. Raises `ProtocolError` when it is none, or about what does not exist."""
        message = wire.decode_request(body)
        _HANDLERS[type(message)](self, message)

    def end(self) -> None:
        """The client is gone."""
        self.ended = True
        if self._box is not None:
            Newsroom.of(self._engine).close(self._box)
        for lookup in self._lookups.values():
            self._engine.release(lookup)
        self._lookups.clear()
        self.waiting.clear()
        for plan in self._plans:
            self._engine.disown(plan)
        self.settle()

    def settle(self) -> None:
        """Give back the slots of a client that is gone, once nobody can write into them."""
        if self.ended and not self.workers:
            for plan in self._plans:
                self._engine.publish(plan, False)
            self._plans.clear()

    def give_up(self) -> None:
        """Answer the lookups that have waited for too long, because something holds the tiers' loop."""
        for number, lookup in list(self.waiting.items()):
            if lookup.poll() is not None:
                self._later(partial(self._answer_late, number))  # the client may be gone
            else:
                self._engine.renew(lookup)  # the tiers may take longer than its leases last

    def status(self) -> dict[str, Any]:
        """Plain values, for people."""
        return {
            "name": self.name,
            "pid": self.pid,
            "since": self.began,
            "spaces": len(self._spaces),
            "lookups": len(self._lookups),
            "plans": len(self._plans),
            "workers": len(self.workers),
        }

    # -- messages ----------------------------------------------------------------------------------------------------

    def _register(self, message: wire.Register) -> None:
        try:
            if len(self._spaces) >= MAX_SPACES:
                raise LayoutError(f"this engine has more than {MAX_SPACES} models and tenants")
            spaces.check(message.spec)
            spaces.resolve_chunk_tokens(message.spec, message.chunk_tokens, 0)
            space = self._engine.admit(
                message.spec, message.tenant, message.chunk_tokens, message.key_scheme, message.salt
            )
        except (KVCoreError, ValueError, OverflowError) as error:
            self._connection.send(wire.Registered(message.id, b"", str(error)))
            return
        self._spaces[message.id] = space
        if self._box is not None:
            self._namespaces.add(space.namespace)
        self._connection.send(wire.Registered(message.id, space.namespace))

    def _forget(self, message: wire.Forget) -> None:
        self._spaces.pop(message.space, None)

    def _find(self, message: wire.Find) -> None:
        number = message.id
        hashes = wire.split_hashes(message.hashes, message.hash_bytes)
        space = self._spaces.get(message.space)
        if space is None:  # refused at its registration
            self._connection.send(wire.Found(number, 0, False, {}, {"refused": len(hashes)}, [], "refused"))
            return
        _bound(hashes, space)
        if number in self._lookups or len(self._lookups) >= MAX_LOOKUPS:
            raise wire.ProtocolError(f"lookup {number} is one too many")
        who, answered = message.who, partial(self._answered, number)
        asked, begin = (None, 0) if who is None else (wire.asked_of(who), who.first)
        coming = partial(self._later, partial(self._tell_coming, number))
        lookup = self._engine.lookup(space, hashes, 0, asked, answered, message.each, begin, coming)
        self._lookups[number] = lookup
        self.waiting[number] = lookup
        if lookup.answer is None:
            self._searching(self)
            self._connection.send(wire.Searching(number))
        else:
            self._answer(number)

    def _queued(self, message: wire.Queued) -> None:
        hashes = wire.split_hashes(message.hashes, message.hash_bytes)
        space = self._spaces.get(message.space)
        if space is not None:
            _bound(hashes, space)
            self._engine.queued(space, hashes, None if message.who is None else wire.asked_of(message.who))

    def _tell_coming(self, number: int) -> None:
        lookup = self.waiting.get(number)
        coming = None if lookup is None else lookup.coming()
        if coming is not None:  # else it has been answered since
            self._connection.send(wire.Coming(number, coming.end, coming.sources))

    def _answered(self, number: int) -> None:
        """From any thread; on the server's, whoever asks sees it."""
        if threading.get_ident() != self._thread:
            self._later(partial(self._answer_late, number))

    def _answer_late(self, number: int) -> None:
        lookup, now = self.waiting.get(number), time.monotonic()
        if lookup is not None:
            lookup.poll()  # which begins the time of its leases anew
            self._answer(number, now)

    def _answer(self, number: int, leased: float = 0.0) -> None:
        lookup = self.waiting.pop(number, None)
        if lookup is None or lookup.answer is None:
            return  # answered at once, or released since
        chunks = lookup.answer
        if not lookup.held:
            del self._lookups[number]
        groups = [_slots(self._engine, found, chunks) for found in lookup.objects] if chunks else []
        found = wire.Found(
            number, chunks, lookup.held, lookup.sources, lookup.misses, groups, lookup.broke, lookup.blame, leased
        )
        self._connection.send(found)

    def _hold(self, message: wire.Hold) -> None:
        lookup = self._lookups.get(message.lookup)
        if lookup is not None:
            self._engine.renew(lookup)

    def _use(self, message: wire.Use) -> None:
        lookup = self._lookups.get(message.lookup)
        if lookup is not None and self._engine.renew(lookup):
            self._engine.used(lookup, message.tokens)

    def _take(self, message: wire.Take) -> None:
        lookup = self._lookups.get(message.lookup)
        held = lookup is not None and len(lookup.objects) == 1 and self._engine.renew(lookup)
        fresh = lookup.take() if held and lookup is not None else {}
        slots = _packed(self._engine, wire.pack_indexes(list(fresh)), [o.slot for o in fresh.values()])
        self._connection.send(wire.Taken(message.id, held, slots))

    def _release(self, message: wire.Release) -> None:
        self.waiting.pop(message.lookup, None)
        lookup = self._lookups.pop(message.lookup, None)
        if lookup is not None:
            self._engine.release(lookup)

    def _reserve(self, message: wire.Reserve) -> None:
        hashes = wire.split_hashes(message.hashes, message.hash_bytes)
        space = self._spaces.get(message.space)
        if space is None:
            self._connection.send(wire.Reserved(message.id, 0, {"refused": len(hashes)}, []))
            return
        _bound(hashes, space)
        if len(message.chosen) != len(space.groups):
            raise wire.ProtocolError(f"{len(message.chosen)} groups of a space that has {len(space.groups)}")
        wanted = []
        for packed in message.chosen:
            if packed is None:
                wanted.append(hashes)
                continue
            indexes = wire.unpack_indexes(packed)
            if len(indexes) > len(hashes) or max(indexes, default=0) >= len(hashes):
                raise wire.ProtocolError("an index beyond the hashes")
            wanted.append([hashes[i] for i in indexes])
        chain = [message.parent, *hashes] if message.chained else []
        claim = self._engine.claim(space, wanted, chain, message.request)
        if claim.id:
            self._plans[claim.id] = None
        places = {h: i for i, h in enumerate(hashes)}
        groups = []
        for objects in claim.objects:
            whole = len(objects) == len(hashes)
            indexes = b"" if whole else wire.pack_indexes([places[o.chunk_hash] for o in objects])
            groups.append(_packed(self._engine, indexes, [o.slot for o in objects]))
        self._connection.send(wire.Reserved(message.id, claim.id, claim.skipped, groups if claim.id else []))

    def _publish(self, message: wire.Publish) -> None:
        if message.plan in self._plans:
            del self._plans[message.plan]
            self._engine.publish(message.plan, message.ok)

    def _prefilled(self, message: wire.Prefilled) -> None:
        space = self._spaces.get(message.space)
        if space is not None:
            self._engine.prefilled(space, message.tokens, message.seconds)

    def _exists(self, message: wire.Exists) -> None:
        def told(there: Sequence[bool]) -> None:
            indexes = wire.pack_indexes([i for i, found in enumerate(there) if found])
            self._connection.send(wire.There(message.id, indexes))

        hashes = wire.split_hashes(message.hashes, message.hash_bytes)
        space = self._single(message.space)
        if space is None:
            told(())
        else:
            self._reply_later(exists(self._engine, space, hashes), told, ())

    def _delete(self, message: wire.Delete) -> None:
        def told(gone: int) -> None:
            self._connection.send(wire.Number(message.id, gone))

        hashes = wire.split_hashes(message.hashes, message.hash_bytes)
        space = self._single(message.space)
        if space is None:
            told(0)
        else:
            self._reply_later(delete(self._engine, space, hashes), told, 0)

    def _single(self, number: int) -> Space | None:
        """A space of one group; None where its registration was refused."""
        space = self._spaces.get(number)
        if space is not None and len(space.groups) != 1:
            raise wire.ProtocolError(f"a question about objects of a space with {len(space.groups)} groups")
        return space

    def _reply_later(self, waiting: "Future[Any]", told: Callable[[Any], None], nothing: Any) -> None:
        def done() -> None:
            if not self.ended:
                told(nothing if waiting.cancelled() or waiting.exception() else waiting.result())

        waiting.add_done_callback(lambda _: self._later(done))

    def _clear(self, message: wire.Clear) -> None:
        self._clear_some(message.id, self._spaces.get(message.space), 0)

    def _clear_some(self, number: int, space: Space | None, before: int) -> None:
        gone = self._engine.clear(space, CLEARED) if space is not None and not self.ended else 0
        if gone == CLEARED:  # others have their turn before the rest
            self._later(partial(self._clear_some, number, space, before + gone))
        elif not self.ended:
            self._connection.send(wire.Number(number, before + gone))

    def _drain(self, message: wire.Drain) -> None:
        def told(left: int) -> None:
            self._connection.send(wire.Number(message.id, left))

        self._reply_later(self._engine.draining(message.timeout_s), told, 0)

    def _news(self, message: wire.News) -> None:
        if self._box is None:
            self._namespaces.update(space.namespace for space in self._spaces.values())
            self._box = Newsroom.of(self._engine).open(self._namespaces.__contains__)
        self._connection.send(wire.Told(message.id, *self._box.take()))

    def _ping(self, message: wire.Ping) -> None:
        self._connection.send(wire.Number(message.id, 0))


_HANDLERS: dict[type, Callable[[Session, Any], None]] = {
    wire.Find: Session._find,
    wire.Queued: Session._queued,
    wire.Hold: Session._hold,
    wire.Use: Session._use,
    wire.Take: Session._take,
    wire.Release: Session._release,
    wire.Reserve: Session._reserve,
    wire.Publish: Session._publish,
    wire.Prefilled: Session._prefilled,
    wire.Register: Session._register,
    wire.Forget: Session._forget,
    wire.Exists: Session._exists,
    wire.Delete: Session._delete,
    wire.Clear: Session._clear,
    wire.Drain: Session._drain,
    wire.News: Session._news,
    wire.Ping: Session._ping,
}


def _bound(hashes: list[bytes], space: Space) -> None:
    most = wire.most_hashes(len(space.groups))
    if len(hashes) > most:
        raise wire.ProtocolError(f"{len(hashes)} hashes of {len(space.groups)} groups, at most {most} are taken")


def _slots(engine: CacheEngine, found: Mapping[int, L1Object], chunks: int) -> wire.Slots:
    """Where the objects of one group are that a lookup of so many chunks can use."""
    whole = len(found) == chunks and max(found) < chunks
    indexes = range(chunks) if whole else sorted(i for i in found if i < chunks)
    slots = [found[i].slot for i in indexes]
    return _packed(engine, b"" if len(slots) == chunks else wire.pack_indexes(indexes), slots)


def _packed(engine: CacheEngine, indexes: bytes, slots: list[int]) -> wire.Slots:
    return wire.Slots(indexes, wire.pack_slots(slots), wire.pack_slots(engine.l1.arena.generations(slots)))
