"""Which prefixes can be restored when a model keeps more than KV: states and windows that exist at some pages only."""

from collections.abc import Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """What the storage holds of one side pool.

    Args:
        pool: its name.
        pages: for each page of the prefix, whether it is there.
        trailing: how many of a prefix's last pages it takes to restore it; None: all.
    """

    pool: str
    pages: Sequence[bool]
    trailing: int | None


class Prefixes(NamedTuple):
    """What can be restored.

    Attributes:
        lengths: every restorable length in pages, ascending.
        by_pool: pool -> the longest prefix that this one would allow, where that is more than nothing.
    """

    lengths: list[int]
    by_pool: dict[str, int]


def restorable(kv_pages: int, pools: Sequence[Held]) -> Prefixes:
    """The lengths up to `kv_pages` for which every pool has what it takes."""
    lengths = list(range(1, kv_pages + 1))
    by_pool = {}
    for held in pools:
        run, good = 0, set()
        for length in range(1, kv_pages + 1):
            run = run + 1 if held.pages[length - 1] else 0
            if run >= min(length, held.trailing or length):
                good.add(length)
        if good:
            by_pool[held.pool] = max(good)
        lengths = [length for length in lengths if length in good]
    return Prefixes(lengths, by_pool)
