"""An object store whose cache is in a server: objects go between the caller's buffers and the server's arena.

To load is to look up, which leases; to copy, and to see afterwards that no slot has been given to another; to release.
To store is to reserve slots, to copy, to publish. A server that is away costs no time: everything is a miss.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

from kvcore.api import LeaseError
from kvcore.engine.copying import copy_in, copy_out
from kvcore.engine.space import ModelSpec
from kvcore.engine.store_base import StoreBase
from kvcore.engine.store_checks import checked, nameable, rounds
from kvcore.engine.store_face import Buffers
from kvcore.engine.store_space import StoreSpace
from kvcore.l2 import Payload
from kvcore.observe import Asked
from kvcore.service import wire
from kvcore.service.attachment import Attachment
from kvcore.service.client import RemoteEngine
from kvcore.service.lookup import SLACK_S, ServedSpace

_PART = 4
"""A batch takes at most one part in so many of the server's memory: others need some, too."""


class RemoteSpace(StoreSpace):
    """A `StoreSpace` of a server. `served`: what it knows each group as."""

    served: tuple[ServedSpace, ...]


class RemoteStore(StoreBase):
    """An `ObjectStore` over the cache of a server; its L1 and tiers are the server's. Owns `engine`."""

    def __init__(self, engine: RemoteEngine) -> None:
        super().__init__(engine.metrics, engine.decisions)
        self._engine = engine
        self._attachment = Attachment(engine.descriptor)

    def register(self, spec: ModelSpec, keys: str, tenant: str = "") -> RemoteSpace:
        """See `ObjectStore.register`."""
        space = RemoteSpace(spec, keys, tenant, self)
        admit = self._engine.admit
        space.served = tuple(admit(one, tenant, one.block_tokens, keys) for one in space.group_specs())
        return space

    def wait_ready(self, timeout_s: float) -> bool:
        """See `ObjectStore.wait_ready`."""
        return self._engine.wait_ready(timeout_s)

    # -- asking ------------------------------------------------------------------------------------------------------

    def exists(
        self, space: StoreSpace, hashes: Sequence[bytes], group: int = 0, asked: Asked | None = None, begin: int = 0
    ) -> list[bool]:
        """See `ObjectStore.exists`. On record, what a server has is at `server`: it does not say where."""
        begun = time.monotonic()
        hashes = tuple(hashes)
        there = [False] * len(hashes)
        served = self._served(space, group)
        if served is None:
            return there
        chosen = (i for i, chunk_hash in enumerate(hashes) if nameable(chunk_hash))
        for batch in _batches(hashes, chosen, wire.MAX_HASHES):
            for i, found in zip(batch, self._engine.exists(served, [hashes[i] for i in batch]), strict=True):
                there[i] = found
        decision = None
        if asked is not None:
            decision = self.decisions.begin(asked, served.namespace, hashes, 0, served.chunk_tokens, begin)
        count = there.count(True)
        broke = "absent" if self._engine.ready(served) else "no_server"
        self._asked(decision, there, {"server": count} if count else {}, (broke, ""), time.monotonic() - begun)
        return there

    # -- moving ------------------------------------------------------------------------------------------------------

    def load(
        self, space: StoreSpace, hashes: Sequence[bytes], buffers: Buffers, group: int = 0, request: str = ""
    ) -> list[bool]:
        """See `ObjectStore.load`."""
        hashes = tuple(hashes)
        arrived = [False] * len(hashes)
        for served, batch, payloads in self._batches(space, hashes, buffers, group, writable=True):
            for i in self._load(served, [hashes[i] for i in batch], payloads):
                arrived[batch[i]] = True
        tokens = arrived.count(True) * space.spec.block_tokens if True in arrived else 0
        self._loaded(request, group, tokens)
        return arrived

    def _load(self, space: ServedSpace, hashes: Sequence[bytes], payloads: Sequence[Payload]) -> list[int]:
        """The indexes of what has arrived."""
        lookup = self._engine.lookup(space, hashes, each=True)
        try:
            link = lookup.link
            if link is None or not lookup.wait(link.welcome.lookup_timeout_s + SLACK_S):
                return []
            copies = self._engine.retrieve(lookup, 0, [range(len(hashes))])
            size = space.groups[0].nbytes
            with self._attachment.use(lookup.arena) as view:
                if view is None:
                    return []
                filled = [
                    copy
                    for copy in copies
                    if copy_out(view.buffer[copy.slot : copy.slot + size], payloads[copy.blocks[0]])
                ]
                # a slot that has gone to another has another generation: what was copied then is not ours
                return [copy.blocks[0] for copy in filled if view.generation(copy.slot) == copy.generation]
        except LeaseError:
            return []
        except ValueError as error:
            self._log.warning("released", f"buffers were released while they were filled ({error}): a miss")
            return []
        finally:
            self._engine.release(lookup)

    def store(
        self, space: StoreSpace, hashes: Sequence[bytes], buffers: Buffers, group: int = 0, request: str = ""
    ) -> list[bool]:
        """See `ObjectStore.store`."""
        hashes = tuple(hashes)
        stored = [False] * len(hashes)
        given, patience_s = 0, self.lookup_timeout_s
        for served, batch, payloads in self._batches(space, hashes, buffers, group, writable=False):
            given += len(batch) * space.layouts[group].nbytes
            descriptor = self._engine.descriptor()
            if descriptor is not None and 2 * given > descriptor["size"] and patience_s > 0:
                # more than half of L1 is not let wait for the tiers: it would be refused, or stay unwritten
                begun = time.monotonic()
                self._engine.drain(patience_s)
                patience_s -= time.monotonic() - begun
            kept = self._store(served, [hashes[i] for i in batch], payloads)
            for i, ok in zip(batch, kept, strict=True):
                stored[i] = ok
        self._stored(request, stored.count(True))
        return stored

    def _store(self, space: ServedSpace, hashes: Sequence[bytes], payloads: Sequence[Payload]) -> list[bool]:
        plan = self._engine.reserve(space, hashes, 0, len(hashes), [range(len(hashes))], chained=False)
        # What was there before takes no slot. Which of several were refused for other reasons is not known.
        kept = [not set(plan.skipped) - {"known"}] * len(hashes)
        if "l1_full" in plan.skipped:
            self._no_room(space.groups[0].nbytes)
        copied = False
        try:
            with self._attachment.use(plan.arena) as view:
                size = space.groups[0].nbytes
                # nothing of a slot that is not all written may be seen: it holds what another object left there
                copied = view is not None and all(
                    copy_in(payloads[copy.blocks[0]], view.buffer[copy.slot : copy.slot + size]) for copy in plan.copies
                )
        except ValueError as error:
            self._log.warning("released", f"buffers were released while they were copied ({error}): nothing is stored")
        finally:
            if plan.id:
                self._engine.publish(plan.id, copied)
        for copy in plan.copies:
            kept[copy.blocks[0]] = copied
        return kept

    def delete(self, space: StoreSpace, hashes: Sequence[bytes], group: int = 0) -> None:
        """See `ObjectStore.delete`."""
        served = self._served(space, group)
        if served is not None:
            hashes = tuple(hashes)
            chosen = (i for i, chunk_hash in enumerate(hashes) if nameable(chunk_hash))
            for batch in _batches(hashes, chosen, wire.MAX_HASHES):
                self._engine.delete(served, [hashes[i] for i in batch])

    # -- the rest ----------------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> dict[str, str]:
        """The tiers' names in order, each with the name of its storage plugin."""
        return self._engine.tiers

    @property
    def lookup_timeout_s(self) -> float:
        """See `ObjectStore.lookup_timeout_s`."""
        return self._engine.lookup_timeout_s

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._engine.close()
        self._attachment.close()

    def _served(self, space: StoreSpace, group: int) -> ServedSpace | None:
        mine = self._mine(space, RemoteSpace, group)
        return None if mine is None else mine.served[group]

    def _no_room(self, nbytes: int) -> None:
        """The server's L1 had no room for objects of so many bytes. That is passing, but for large ones."""
        descriptor = self._engine.descriptor()
        if descriptor is not None and nbytes * _PART > descriptor["size"]:
            self._log.warning(
                "large",
                f"the server's L1 has no room for an object of {nbytes} bytes: it has {descriptor['size']} in all. "
                "Give it several times an object's size (`l1.size`), or store smaller objects",
            )

    def _batches(
        self, space: StoreSpace, hashes: Sequence[bytes], buffers: Buffers, group: int, *, writable: bool
    ) -> Iterator[tuple[ServedSpace, list[int], list[Payload]]]:
        """What can be moved, in batches: what the server knows the group as, the indexes, and their payloads."""
        served = self._served(space, group)
        if served is None:
            return
        layout = space.layouts[group]
        chosen = checked(hashes, buffers, layout, writable=writable, throttle=self._log)
        descriptor = self._engine.descriptor()
        room = descriptor["size"] // _PART // layout.nbytes if descriptor is not None else wire.MAX_HASHES
        for batch in _batches(hashes, chosen, max(1, min(room, wire.MAX_HASHES))):
            yield served, batch, [chosen[i] for i in batch]


def _batches(hashes: Sequence[bytes], indexes: Iterable[int], most: int) -> Iterator[list[int]]:
    """The indexes in batches as one message takes them: hashes of one length, none twice, at most so many."""
    by_length: dict[int, list[int]] = {}
    for i in indexes:
        by_length.setdefault(len(hashes[i]), []).append(i)
    for alike in by_length.values():
        for batch in rounds(hashes, alike):
            for at in range(0, len(batch), most):
                yield batch[at : at + most]
