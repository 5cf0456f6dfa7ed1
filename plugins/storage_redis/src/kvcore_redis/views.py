"""Several ranges of memory as one."""

from collections.abc import Sequence
from typing import TypeVar

Part = bytes | memoryview
_Part = TypeVar("_Part", memoryview, Part)


def take(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the concatenation, or all of it when it is shorter."""
    taken = []
    for view in views:
        if nbytes <= 0:
            break
        if len(view):
            taken.append(view if len(view) <= nbytes else view[:nbytes])
            nbytes -= len(view)
    return taken


def drop(views: Sequence[_Part], nbytes: int) -> list[_Part]:
    """The concatenation without its first `nbytes`."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            rest = list(views[i:])
            if nbytes:
                rest[0] = view[nbytes:]
            return rest
        nbytes -= len(view)
    return []
