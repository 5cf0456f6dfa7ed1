"""A capacity for storages that hold none of their own: an account of what a tier holds, and victims by a policy."""

from collections.abc import Iterable, Sequence

from kvcore.api import Entry, EvictionPolicy, ObjectKey


class Capacity:
    """The account of one tier. Used from one event loop.

    It knows what this process has stored and what the storage listed at open, so it survives a restart. Of a shared
    storage each process has an account of its own, brought in line by listing again.

    Args:
        nbytes: the limit; frames count as stored, headers included.
        policy: who goes first.
    """

    def __init__(self, nbytes: int, policy: EvictionPolicy) -> None:
        self.limit = nbytes
        self.used = 0
        self.coming = 0
        """Bytes that are being written."""
        self._policy = policy
        self._sizes: dict[ObjectKey, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, entries: Iterable[Entry]) -> None:
        """Objects that the storage holds."""
        new = {e.key: e.nbytes for e in entries if _sound(e) and e.key not in self._sizes}
        self._sizes.update(new)
        self.used += sum(new.values())
        self._policy.insert(list(new), list(new.values()))

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Objects that were used."""
        self._policy.touch([k for k in keys if k in self._sizes])

    def remove(self, keys: Iterable[ObjectKey]) -> None:
        """Objects that are gone."""
        gone = [k for k in dict.fromkeys(keys) if k in self._sizes]
        self.used -= sum(self._sizes.pop(k) for k in gone)
        self._policy.remove(gone)

    def over(self, nbytes: int) -> int:
        """By how many bytes `nbytes` more would not fit."""
        return self.used + self.coming + nbytes - self.limit

    def victims(self, nbytes: int) -> list[ObjectKey]:
        """Whom to delete so that `nbytes` more fit; they count until they are removed, and are known until then.

        Fewer than needed when there is nobody left.
        """
        over = self.over(nbytes)
        if over <= 0:
            return []
        named = [k for k in self._policy.evict(over, _never) if k in self._sizes]
        chosen = [k for k in named if isinstance(k, ObjectKey)]
        self._policy.insert(chosen, [self._sizes[k] for k in chosen])  # should deleting them fail
        return chosen

    def entries(self, keys: Sequence[ObjectKey]) -> list[Entry]:
        """What the account says of these objects."""
        return [Entry(k, self._sizes[k]) for k in keys if k in self._sizes]

    def known(self) -> set[ObjectKey]:
        """The keys now in the account."""
        return set(self._sizes)


def _sound(entry: Entry) -> bool:
    """What a plugin lists need not be."""
    return isinstance(entry.key, ObjectKey) and isinstance(entry.nbytes, int) and entry.nbytes >= 0


def _never(key: object) -> bool:
    return False
