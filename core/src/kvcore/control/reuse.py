"""Admission of stores: what a tier with `write: reused` is written, which is only what somebody has asked for again.

Most of what is computed is never read again. A tier that is slow, small or wears out is spared it.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from kvcore.api import ObjectKey
from kvcore.l1 import ObjectSpace

REMEMBERED = 1 << 18
"""So many objects are known by a number of 64 bits each: some 25 MiB at most, for 256 GiB of KV and more."""
_PART = 16
"""When there are more, one part in so many is forgotten."""


class Reuse:
    """What one tier was offered, and what it was not because it was new. Used from one thread.

    The oldest are forgotten: a resident object that was is offered once more, which costs a question to the tier; one
    that has left L1 counts as new.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._offered: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._offered)

    def published(self, space: ObjectSpace | ObjectKey, hashes: Sequence[bytes]) -> list[bytes]:
        """Those of the objects just published that were published before: somebody asked, and they had gone."""
        return self._take(space, hashes, new=False)

    def asked(self, space: ObjectSpace | ObjectKey, hashes: Sequence[bytes]) -> list[bytes]:
        """Those of the objects that a lookup has found which the tier was not offered yet."""
        kind, offered = _kind(space.namespace, space.group), self._offered
        return self._take(space, [h for h in hashes if not offered.get(kind ^ hash(h))], new=True)

    def refused(self, keys: Iterable[ObjectKey]) -> None:
        """The tier did not take these objects: they are offered again when they are next asked for."""
        for key in keys:
            number = _kind(key.namespace, key.group) ^ hash(key.chunk_hash)
            if number in self._offered:
                self._offered[number] = False

    def _take(self, space: ObjectSpace | ObjectKey, hashes: Sequence[bytes], *, new: bool) -> list[bytes]:
        """Those to offer now: all that are known, and with `new` the others, too. All are known afterwards."""
        kind, offered = _kind(space.namespace, space.group), self._offered
        taken = []
        for chunk_hash in hashes:
            number = kind ^ hash(chunk_hash)
            offer = new or number in offered
            offered.pop(number, None)
            offered[number] = offer  # the latest is forgotten last
            if offer:
                taken.append(chunk_hash)
        if (over := len(offered) - self._remembered) > 0:
            # Many at once: to find a dict's first entry costs as much as has been deleted before it.
            for number in list(islice(offered, over + self._remembered // _PART)):
                del offered[number]
        return taken


def _kind(namespace: bytes, group: int) -> int:
    return hash((namespace, group))
