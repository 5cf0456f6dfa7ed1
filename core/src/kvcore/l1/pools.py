"""A pool: the objects of one tenant in L1, in the order in which its eviction policy gives them up.

The policy hears of uses in batches, when it is needed: a lookup only notes what it touched. Without tenants there is
one pool.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from typing import Any

from kvcore.api import EvictionPolicy
from kvcore.l1.spaces import L1Object, ObjectSpace
from kvcore.observe import Throttle
from kvcore.tenants import Account

_MAX_NOTES = 32
"""Telling the policy is part of somebody's lookup: the fewer at once, the less longer that one takes than others."""

_pinned: Callable[[Any], Any] = attrgetter("readers")  # in C: asked once for each victim


class _Nothing(EvictionPolicy):
    """The policy of a pool that is closed."""

    def __init__(self) -> None:
        pass

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        pass

    def touch(self, keys: Sequence[Hashable]) -> None:
        pass

    def remove(self, keys: Sequence[Hashable]) -> None:
        pass

    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        return []

    def __len__(self) -> int:
        return 0


class Pool(Account):
    """One tenant's account, spaces and policy. Under the table's lock.

    Args:
        tenant: its name; "" for nobody's.
        policy: which object goes first; its keys are `L1Object`s.
        log: where a policy's faults go.
    """

    def __init__(self, tenant: str, policy: EvictionPolicy, log: Throttle) -> None:
        super().__init__(tenant)
        self.spaces: list[ObjectSpace] = []
        self.kept_bytes = 0
        """Of objects that `L1.pin` keeps."""
        self.taken_bytes = 0
        """Asked for since room was last made for it, at `made_room_s`."""
        self.made_room_s = 0.0
        self._policy = policy
        self._trusted = type(policy).__module__.startswith("kvcore.builtin.")  # proven by their tests; checks cost
        self._insert_new = getattr(policy, "insert_new", None) if self._trusted else None
        self._orphans: dict[L1Object, None] = {}  # what the policy may not know, because it has failed: oldest first
        self._notes: list[tuple[int, list[L1Object]]] = []  # (size of each if they are new, else 0; objects), in order
        self._log = log

    def note(self, new_bytes: int, objects: list[L1Object]) -> None:
        """Objects came (`new_bytes`: the size of each) or were used (0)."""
        self._notes.append((new_bytes, objects[::-1]))  # tail first: the head of a prefix is the most recent
        if len(self._notes) >= _MAX_NOTES:
            self.settle()

    def settle(self) -> None:
        """Tell the policy what happened since it was last needed. Comes before every drop of what it knows, so no
        note is of an object that has gone; temporary ones it never heard of, and ignores."""
        for new_bytes, objects in self._notes:
            try:
                if new_bytes and self._insert_new is not None:
                    self._insert_new(objects, new_bytes)
                elif new_bytes:
                    self._policy.insert(objects, [new_bytes] * len(objects))
                else:
                    self._policy.touch(objects)
            except Exception as error:  # a plugin's fault may cost hits, never a request
                self._failed(error)
                if new_bytes:
                    self._orphans.update(dict.fromkeys(objects))
        self._notes.clear()

    def victims(self, need: int) -> list[L1Object]:
        """The policy's next, of at least `need` bytes where there are as many; none is leased. It forgets them."""
        self.settle()
        if self._orphans and (orphans := self._take_orphans(need)):
            return orphans
        try:
            chosen: list[Any] = self._policy.evict(need, _pinned)
            if self._trusted:
                return chosen
            chosen = self._checked(chosen)
        except Exception as error:
            self._failed(error)
            # It may have forgotten any of them: those that are here now go in the order in which they came.
            self._orphans.update((o, None) for s in self.spaces for o in s.objects.values())
            return self._take_orphans(need)
        if any(map(_pinned, chosen)):  # whatever a policy says, what is leased stays
            self._notes += [(o.space.slot_bytes, [o]) for o in chosen if o.readers]
            chosen = [o for o in chosen if not o.readers]
        return chosen

    def remove(self, objects: Collection[L1Object]) -> bool:
        """They leave for another reason. False when the policy fails: it may still name them as victims."""
        self.settle()
        try:
            self._policy.remove(list(objects))
        except Exception as error:
            self._failed(error)
            return False
        return True

    def dropped(self, objects: Collection[L1Object]) -> None:
        """They have left the table."""
        for obj in objects if self._orphans else ():
            self._orphans.pop(obj, None)

    def close(self) -> None:
        """Let go of all objects. Idempotent."""
        self._policy = _Nothing()
        self._insert_new = None
        self._orphans.clear()
        self._notes.clear()

    def by_space(self, objects: Collection[L1Object]) -> list[tuple[ObjectSpace, Collection[L1Object]]]:
        """Objects of this pool, by their space."""
        if len(self.spaces) == 1:  # the usual case, several times as fast
            return [(self.spaces[0], objects)]
        spaces = dict.fromkeys(o.space for o in objects)  # not a set: where slots lie must not depend on addresses
        return [(space, [o for o in objects if o.space is space]) for space in spaces]

    def _take_orphans(self, need: int) -> list[L1Object]:
        chosen = []
        for obj in self._orphans:
            if need <= 0:
                break
            if not obj.readers:
                chosen.append(obj)
                need -= obj.space.slot_bytes
        for obj in chosen:
            del self._orphans[obj]
        with suppress(Exception):  # it may know them after all
            self._policy.remove(chosen)
        return chosen

    def _checked(self, chosen: Iterable[Any]) -> list[L1Object]:
        """What a policy from elsewhere named, less what is not, or no longer, a resident object of this pool. Raises
        `LookupError` when that is nothing."""
        most = sum(len(s.objects) for s in self.spaces)
        named = dict.fromkeys(islice(chosen, most))
        here = [
            o
            for o in named
            if isinstance(o, L1Object) and o.space.pool is self and o.space.objects.get(o.chunk_hash) is o
        ]
        if named and not here:
            raise LookupError("it names only what is not here")
        return here

    def _failed(self, error: Exception) -> None:
        self._log.warning("policy", f"the eviction policy failed: {error!r}", exc_info=True)


def nowhere(log: Throttle) -> Pool:
    """A pool that takes nothing and knows nobody."""
    pool = Pool("", _Nothing(), log)
    pool.quota = 0
    return pool
