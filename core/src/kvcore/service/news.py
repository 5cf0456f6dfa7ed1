"""What comes into a server's cache and leaves it, kept for the clients that ask: see `wire.News`."""

import threading
import weakref
from collections.abc import Callable, Sequence

from kvcore.api import ObjectEvent
from kvcore.engine import CacheEngine
from kvcore.service import wire

MAX_OBJECTS = 32_768
"""Objects kept for a client that does not ask; more are lost, and it is told so. So many fit into one message, however
long their hashes and the names of their tiers are."""


class Box:
    """What one client has not heard yet. Thread-safe.

    Args:
        knows: is this namespace one of the client's?
    """

    def __init__(self, knows: Callable[[bytes], bool]) -> None:
        self._knows = knows
        self._lock = threading.Lock()
        self._news: list[wire.Heard] = []
        self._objects = 0
        self._lost = False

    def put(self, here: bool, events: Sequence[ObjectEvent]) -> None:
        """Keep this for the client, where it is about its own spaces."""
        kinds: dict[tuple[bytes, int, str], list[bytes]] = {}
        for event in events:
            if self._knows(event.key.namespace):
                kind = (event.key.namespace, event.key.group, event.tier)
                kinds.setdefault(kind, []).append(event.key.chunk_hash)
        with self._lock:
            for (namespace, group, tier), hashes in kinds.items():
                if self._objects + len(hashes) > MAX_OBJECTS:
                    self._lost = True
                    return
                self._objects += len(hashes)
                self._news.append(wire.Heard(here, tier, namespace, group, hashes))

    def take(self) -> tuple[list[wire.Heard], bool]:
        """All of it, and whether some is lost."""
        with self._lock:
            news, self._news = self._news, []
            lost, self._lost = self._lost, False
            self._objects = 0
        return news, lost


class Newsroom:
    """An observer of the cache for all clients that ask. One for each engine, made when the first client does."""

    def __init__(self, engine: CacheEngine) -> None:
        self._boxes: tuple[Box, ...] = ()
        self._lock = threading.Lock()
        engine.observe("clients", self)

    @classmethod
    def of(cls, engine: CacheEngine) -> "Newsroom":
        """The engine's."""
        found = _rooms.get(engine)
        if found is None:
            found = _rooms[engine] = cls(engine)
        return found

    def open(self, knows: Callable[[bytes], bool]) -> Box:
        """Keep news from now on."""
        box = Box(knows)
        with self._lock:
            self._boxes = (*self._boxes, box)
        return box

    def close(self, box: Box) -> None:
        """Nobody asks any more."""
        with self._lock:
            self._boxes = tuple(b for b in self._boxes if b is not box)

    def stored(self, events: Sequence[ObjectEvent]) -> None:
        """See `kvcore_stored`."""
        for box in self._boxes:
            box.put(True, events)

    def evicted(self, events: Sequence[ObjectEvent]) -> None:
        """See `kvcore_evicted`."""
        for box in self._boxes:
            box.put(False, events)


_rooms: "weakref.WeakKeyDictionary[CacheEngine, Newsroom]" = weakref.WeakKeyDictionary()
