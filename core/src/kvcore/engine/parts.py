"""How an engine's ranks are split over several caches, each of which holds the KV of its ranks only.

The descriptor of such an engine has `parts`, a descriptor for each, and in its plans `Copy.group` counts on: group g of
part p is p * groups + g. Where there is one cache, nothing of this is to be seen.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcore.transfer.plan import Copy


class Part(NamedTuple):
    """Where a rank belongs.

    Args:
        part: number of its cache. parts: how many there are.
        rank: its number among the ranks of that cache.
    """

    part: int
    parts: int
    rank: int

    @classmethod
    def find(cls, descriptor: Mapping[str, Any], rank: int, ranks: int) -> "Part":
        """The part of `rank`, where each cache holds `ranks` of them (see `ObjectLayout.ranks`)."""
        return cls(rank // ranks, len(descriptor.get("parts", (descriptor,))), rank % ranks)

    def descriptor(self, descriptor: dict[str, Any]) -> dict[str, Any]:
        """That of its own cache."""
        parts = descriptor.get("parts")
        return dict(parts[self.part]) if parts is not None else descriptor

    def own(self, copies: Sequence[Copy], groups: int) -> Sequence[Copy]:
        """Its copies of a plan; a model has so many KV `groups`."""
        if self.parts == 1:
            return copies
        first = self.part * groups
        return [c._replace(group=c.group - first) for c in copies if first <= c.group < first + groups]


def joined(plans: Sequence[Sequence[Copy]], groups: int) -> list[Copy]:
    """One plan of those of all parts, in order."""
    return [c._replace(group=c.group + p * groups) for p, plan in enumerate(plans) for c in plan]
