"""Several memoryviews as one range of bytes."""

from collections.abc import Sequence


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


def drop(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The concatenation without its first `nbytes`."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:] if nbytes else view, *views[i + 1 :]]
        nbytes -= len(view)
    return []
