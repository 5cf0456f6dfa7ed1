"""What the caller of an object store hands over: checked, and in rounds without a key twice."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from kvcore.api import ObjectLayout
from kvcore.api.keys import MAX_HASH_BYTES, MIN_HASH_BYTES
from kvcore.l2 import Payload
from kvcore.observe import Throttle

T = TypeVar("T")


def nameable(chunk_hash: bytes) -> bool:
    """Whether this can name an object."""
    return isinstance(chunk_hash, bytes) and MIN_HASH_BYTES <= len(chunk_hash) <= MAX_HASH_BYTES


def checked(
    hashes: Sequence[bytes],
    buffers: Iterable[Iterable[memoryview]],
    layout: ObjectLayout,
    *,
    writable: bool,
    throttle: Throttle,
) -> dict[int, Payload]:
    """By their indexes, the payloads of what can be moved; that there are others is logged.

    Each is walked through here and never again: what has been checked is what will be moved.
    """
    given = _tuple(buffers)
    chosen: dict[int, Payload] = {}
    if given is not None and len(hashes) == len(given):
        for i, (chunk_hash, parts) in enumerate(zip(hashes, given, strict=True)):
            payload = _tuple(parts)
            if nameable(chunk_hash) and payload is not None and _fits(payload, layout, writable=writable):
                chosen[i] = payload
    if len(chosen) < len(hashes):
        throttle.warning(
            "unsound",
            f"{len(hashes) - len(chosen)} of {len(hashes)} objects with {len(given or ())} lists of buffers are "
            f"refused: give hashes of 16 to 64 bytes, and for each one list of contiguous {'writable ' * writable}"
            f"memoryviews of unsigned bytes, {layout.nbytes} in all",
        )
    return chosen


def _tuple(values: Iterable[T]) -> tuple[T, ...] | None:
    try:
        return tuple(values)
    except Exception:  # not iterable, or an iterator of the caller's that fails: its objects are refused
        return None


def _fits(payload: Payload, layout: ObjectLayout, *, writable: bool) -> bool:
    """Whether these ranges of memory can hold an object's payload."""
    nbytes = 0
    try:
        for part in payload:
            if part.format != "B" or part.ndim != 1 or not part.contiguous or (writable and part.readonly):
                return False
            nbytes += len(part)
    except (AttributeError, TypeError, ValueError):  # no memoryviews, or released ones
        return False
    return nbytes == layout.nbytes


def rounds(hashes: Sequence[bytes], indexes: Iterable[int]) -> Iterator[list[int]]:
    """The same indexes in rounds that hold no hash twice: no batch of a storage may."""
    left = list(indexes)
    while left:
        chosen = {hashes[i]: i for i in reversed(left)}
        if len(chosen) == len(left):
            yield left
            return
        now = sorted(chosen.values())
        yield now
        taken = set(now)
        left = [i for i in left if i not in taken]
