"""Conversations, as a cache sees them: a request whose prompt goes on where an earlier one, with its answer, ended."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcore.api import ObjectEvent

Place = tuple[bytes, bytes]
"""Namespace and chunk hash."""


class Conversation:
    """The chunks of one conversation so far.

    Attributes:
        turns: its requests so far.
        used: when it was last computed or asked for, in seconds of the policy's clock.
        waits: its last request is queued and not yet looked up.
        foreseen: what the policy has foreseen of its next turn, if anything.
    """

    __slots__ = ("foreseen", "hashes", "namespace", "turns", "used", "waits")

    def __init__(self, namespace: bytes, now: float) -> None:
        self.namespace = namespace
        self.hashes: list[bytes] = []
        self.turns = 0
        self.used = now
        self.waits = False
        self.foreseen: Any = None

    @property
    def tail(self) -> Place:
        """Where the next turn goes on."""
        return self.namespace, self.hashes[-1]


class Turn(NamedTuple):
    """A request.

    Args:
        gap: seconds since the last use of its conversation; None for a new one, and for a request that is known,
            because it was queued.
        gone: the conversation had left L1.
    """

    conversation: Conversation
    gap: float | None
    gone: bool = False


class Conversations:
    """All that are remembered, found by their last chunk. Not thread-safe.

    Args:
        most_chunks: of more than these, the conversations that were used longest ago are forgotten.
        forgotten: told of each of those.
    """

    def __init__(self, most_chunks: int, forgotten: Callable[[Conversation], None]) -> None:
        self._most_chunks = most_chunks
        self._forgotten = forgotten
        self._by_tail: dict[Place, Conversation] = {}
        self._chunks = 0
        self._bytes: dict[bytes, dict[int, int]] = {}
        self.here: OrderedDict[Conversation, None] = OrderedDict()
        """Those whose last chunk is in L1, or on its way there: the one that came or was used longest ago first."""
        self.gone: OrderedDict[Conversation, None] = OrderedDict()
        """Those whose last chunk has left L1: the one that left first is the first."""

    def __len__(self) -> int:
        return len(self._by_tail)

    def turn(self, namespace: bytes, hashes: Sequence[bytes], now: float, *, queued: bool = False) -> Turn:
        """A request was queued or looked up."""
        found = None
        for chunk_hash in reversed(hashes):
            found = self._by_tail.get((namespace, chunk_hash))
            if found is not None:
                break
        if found is not None and found.waits and found.hashes[-1] == hashes[-1]:
            found.waits = queued
            return Turn(found, None)
        gap, gone = None, found in self.gone
        if found is None:
            found = Conversation(namespace, now)
        else:
            gap = now - found.used
            self._remove(found)
        # Over a server, a lookup names only the chunks that the engine has not: those before them are known.
        known = found.hashes[: found.hashes.index(hashes[0])] if hashes[0] in found.hashes else []
        found.hashes = [*known, *hashes]
        found.turns += 1
        found.used = now
        found.waits = queued
        self._by_tail[found.tail] = found
        self._chunks += len(found.hashes)
        self.here[found] = None
        self._forget()
        return Turn(found, gap, gone)

    def stored(self, events: Sequence[ObjectEvent], now: float) -> None:
        """Objects came into L1: computed, which makes a conversation longer, or loaded."""
        for event in events:
            namespace, chunk_hash = event.key.namespace, event.key.chunk_hash
            if event.parent and (before := self._by_tail.get((namespace, event.parent))) is not None:
                if (same := self._by_tail.get((namespace, chunk_hash))) is not None:  # another one has said the same
                    self._remove(same)
                del self._by_tail[before.tail]
                before.hashes.append(chunk_hash)
                self._chunks += 1
                self._by_tail[before.tail] = before
            found = self._by_tail.get((namespace, chunk_hash))
            if found is None:
                continue
            self._bytes.setdefault(namespace, {})[event.key.group] = event.nbytes
            if event.parent is not None:
                found.used = now
            self.gone.pop(found, None)
            self.here[found] = None
            self.here.move_to_end(found)

    def evicted(self, events: Sequence[ObjectEvent]) -> list[tuple[Conversation, str]]:
        """Objects left L1: the conversations that are no longer whole there, and why."""
        left = []
        for event in events:
            found = self._by_tail.get((event.key.namespace, event.key.chunk_hash))
            if found is not None and found in self.here:
                del self.here[found]
                self.gone[found] = None
                left.append((found, event.reason))
        return left

    def nbytes(self, conversation: Conversation) -> int:
        """What its chunks take in L1, in all groups."""
        return len(conversation.hashes) * sum(self._bytes.get(conversation.namespace, {}).values())

    def _remove(self, conversation: Conversation) -> None:
        del self._by_tail[conversation.tail]
        self._chunks -= len(conversation.hashes)
        self.gone.pop(conversation, None)
        self.here.pop(conversation, None)

    def _forget(self) -> None:
        while self._chunks > self._most_chunks and len(self._by_tail) > 1:
            oldest = next(iter(self.gone or self.here))
            self._remove(oldest)
            self._forgotten(oldest)
