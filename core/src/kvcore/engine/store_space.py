"""A model's space in an object store, and what its caller hands over, checked."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvcore.api import ConfigError, ObjectLayout
from kvcore.api.keys import MAX_HASH_BYTES, MIN_HASH_BYTES
from kvcore.engine import space as spaces
from kvcore.engine.space import ModelSpec
from kvcore.observe import Throttle

_SCHEME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:/-]{0,199}")


class StoreSpace:
    """One registered model of one tenant. Made by `ObjectStore.register`.

    Attributes:
        spec: the model. keys: the key scheme. tenant: its name, or "".
        layouts: of each group's objects, which are one engine block each.
    """

    def __init__(self, spec: ModelSpec, keys: str, tenant: str) -> None:
        spaces.check(spec)
        if not _SCHEME.fullmatch(keys):
            raise ConfigError(
                f"the key scheme is {keys!r}: give a name of 1 to 200 letters, digits and ._+:/-, with a version, such "
                "as acme-page/1"
            )
        self.spec = spec
        self.keys = keys
        self.tenant = tenant
        self.layouts = tuple(spaces.object_layout(spec, group, 1) for group in spec.groups)

    def groups(self) -> Iterator[ModelSpec]:
        """The model cut into one of a single KV group for each of its groups.

        Each group's objects are looked for, loaded and kept by themselves, so each has a namespace of its own.
        """
        count = len(self.spec.groups)
        for g, group in enumerate(self.spec.groups):
            extra = dict(self.spec.extra)
            if count > 1:
                extra["store_group"] = f"{g}/{count}"
            if group.window_tokens is not None:  # which of them to ask for is the caller's to know
                extra["store_window"] = str(group.window_tokens)
            yield replace(self.spec, groups=(replace(group, window_tokens=None),), extra=extra)


def nameable(chunk_hash: bytes) -> bool:
    """Whether this can name an object."""
    return isinstance(chunk_hash, bytes) and MIN_HASH_BYTES <= len(chunk_hash) <= MAX_HASH_BYTES


def fits(payload: Sequence[memoryview], layout: ObjectLayout, *, writable: bool) -> bool:
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


def sound(
    hashes: Sequence[bytes],
    buffers: Sequence[Sequence[memoryview]],
    layout: ObjectLayout,
    *,
    writable: bool,
    throttle: Throttle,
) -> list[int]:
    """The indexes of what can be moved; that there are others is logged."""
    chosen = []
    if len(hashes) == len(buffers):
        for i, (chunk_hash, payload) in enumerate(zip(hashes, buffers, strict=True)):
            if nameable(chunk_hash) and fits(payload, layout, writable=writable):
                chosen.append(i)
    if len(chosen) < len(hashes):
        throttle.warning(
            "unsound",
            f"{len(hashes) - len(chosen)} of {len(hashes)} objects with {len(buffers)} lists of buffers are refused: "
            f"give hashes of 16 to 64 bytes, and for each one list of contiguous {'writable ' * writable}memoryviews "
            f"of unsigned bytes, {layout.nbytes} in all",
        )
    return chosen


def rounds(hashes: Sequence[bytes], indexes: Sequence[int]) -> Iterator[list[int]]:
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
