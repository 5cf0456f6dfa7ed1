"""The record of what became of objects: one entry per batch, in memory, for whoever asks where an object has gone."""

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import NamedTuple, Protocol

from kvcore.api import Failed, LoadOutcome, Missing, ObjectKey, StoreOutcome

MAX_OBJECTS = 262_144
"""Entries are kept for so many objects in all: at some 150 bytes for one that is nowhere else, 40 MB at most; 50 MB
where each is another tenant's."""
_ENTRY = 2
"""An entry takes as much as so many objects, which is most of it where batches are small."""


class Named(Protocol):
    """What an entry is of, beside an `ObjectKey`: an object of L1."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def key(self) -> ObjectKey: ...


Object = Named | ObjectKey


class Event(NamedTuple):
    """What happened to an object.

    Args:
        at: seconds since the epoch.
        place: `l1`, or a tier's name.
        what: `stored` (it has it since), `loaded` (it had it, which came into L1, or the caller's memory), `evicted`
            (it has it no more), `dropped`, `held_back` and `skipped` (it was not written to it), `failed` (it could not
            be written to it, or loaded from it).
        reason: of `evicted`: `room`, `cleared`, `expired` (its `ttl`), `unused` (loaded and not used, or moved on to a
            tier with `write: evicted`). Of `dropped`, `skipped` and `failed`: a word of `kvcore_tier_dropped_total`,
            `kvcore_store_skipped_chunks_total`, or the outcomes of `kvcore_tier_operations_total`; also
            `evicted_from_tier` (it was gone when it was to be loaded) and `copy` (a worker could not copy it).
        detail: of `evicted` for room: the policy that chose it, or the storage that did so itself. Of `failed`: `load`
            or `store`.
    """

    at: float
    place: str
    what: str
    reason: str
    detail: str
    namespace: bytes
    group: int


_hash_of = attrgetter("chunk_hash")  # in C: asked of each object on record
_Note = tuple[float, str, str, str, str, Collection[Object]]
"""An event of all objects of a batch. A plain tuple: making it is part of somebody's call."""


class Journal:
    """The latest entries, of no more than `most` objects in all, each entry counted as two more.

    Thread-safe; `note` may be called under any lock.

    Objects are kept as they are given, so noting a batch costs the same however large it is.
    """

    def __init__(self, most: int = MAX_OBJECTS) -> None:
        self.most = most
        """0: nothing is kept."""
        self.since = time.time()
        """What happened before is not known here."""
        self._notes: deque[_Note] = deque()
        self._weight = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return sum(len(note[5]) for note in self._notes)

    def note(self, place: str, what: str, reason: str, objects: Collection[Object], detail: str = "") -> None:
        """Something has happened to a batch of objects, which nobody changes any more."""
        if not objects or not self.most:
            return
        made = (time.time(), place, what, reason, detail, objects)
        with self._lock:
            self._notes.append(made)
            self._weight += len(objects) + _ENTRY
            while self._weight > self.most and len(self._notes) > 1:
                self.since, *_, gone = self._notes.popleft()
                self._weight -= len(gone) + _ENTRY

    def outcomes(
        self,
        place: str,
        op: str,
        objects: Collection[Object],
        outcomes: Iterable[LoadOutcome | StoreOutcome],
        known: bool = True,
    ) -> None:
        """What came of a `load` from a tier, or of a `store` to it. `known`: the tier had said that it has them."""
        if not self.most:
            return
        good = []
        bad: dict[str, list[Object]] = {}
        for obj, outcome in zip(objects, outcomes, strict=True):
            if isinstance(outcome, Failed):
                bad.setdefault(outcome.kind, []).append(obj)
            elif isinstance(outcome, Missing):
                if known:
                    bad.setdefault("evicted_from_tier", []).append(obj)
            else:
                good.append(obj)
        self.note(place, "loaded" if op == "load" else "stored", "", good)
        for kind, some in bad.items():
            self.note(place, "failed", kind, some, op)

    def of(self, chunk_hash: bytes, namespace: bytes | None = None) -> list[Event]:
        """What happened to the objects of a chunk, the latest first; with `namespace` only to those of that one.

        Looks through all there is, which takes up to some 40 ms.
        """
        with self._lock:
            notes = list(self._notes)
        found = []
        for note in reversed(notes):
            for obj in note[5] if chunk_hash in map(_hash_of, note[5]) else ():
                if obj.chunk_hash == chunk_hash:
                    key = obj if isinstance(obj, ObjectKey) else obj.key
                    if namespace is None or key.namespace == namespace:
                        found.append(Event(*note[:5], key.namespace, key.group))
        return found

    def clear(self) -> None:
        """Let go of all objects."""
        with self._lock:
            self._notes.clear()
            self._weight = 0
            self.since = time.time()

    def forked(self) -> None:
        """In the child of a fork: a thread that is not here may have held the lock."""
        self._lock = threading.Lock()
