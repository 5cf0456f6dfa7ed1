"""A model's space in an object store, and what its caller hands over, checked."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from kvcore.api import ConfigError, ObjectLayout
from kvcore.api.keys import MAX_HASH_BYTES, MIN_HASH_BYTES
from kvcore.config.tenants import MAX_NAME
from kvcore.engine import space as spaces
from kvcore.engine.space import ModelSpec
from kvcore.observe import Throttle, logger

Payload = tuple[memoryview, ...]
"""The ranges of memory that hold an object, in order."""
S = TypeVar("S", bound="StoreSpace")
T = TypeVar("T")
_SCHEME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:/-]{0,199}")


class Home:
    """The process that opened a store: the child of a fork has the object, but none of the threads behind it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._told = False

    def left(self) -> bool:
        """Is this another process? The first time that is logged; by no lock that the parent may have held."""
        if os.getpid() == self._pid:
            return False
        if not self._told:
            self._told = True
            logger.warning("an object store does not work in the child of a fork, where all is a miss: open another")
        return True


class StoreSpace:
    """One registered model of one tenant. Made by `ObjectStore.register`.

    Attributes:
        spec: the model. keys: the key scheme. tenant: its name, or "".
        layouts: of each group's objects, which are one engine block each.
        owner: the store that made it, and the only one that it is good for.
    """

    def __init__(self, spec: ModelSpec, keys: str, tenant: str, owner: object = None) -> None:
        spaces.check(spec)
        if not (isinstance(tenant, str) and len(tenant) <= MAX_NAME and tenant.isprintable()):
            shown = repr(tenant) if len(repr(tenant)) <= MAX_NAME else f"{type(tenant).__name__} {tenant!r:.40}..."
            raise ConfigError(
                f"the tenant is {shown}: give a name of at most {MAX_NAME} printable characters; the empty text is no "
                "tenant"
            )
        if not isinstance(keys, str) or not _SCHEME.fullmatch(keys):
            raise ConfigError(
                f"the key scheme is {keys!r}: give a name of 1 to 200 letters, digits and ._+:/-, with a version, such "
                "as acme-page/1"
            )
        self.spec = spec
        self.keys = keys
        self.tenant = tenant
        self.owner = owner
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


def of_store(space: object, kind: type[S], owner: object, group: object, throttle: Throttle) -> S | None:
    """The space, if this store has made it, and for a model that has such a group. What is not so is logged."""
    if not isinstance(space, kind) or space.owner is not owner:
        throttle.warning(
            "space", f"a {type(space).__name__} that this store did not make: give what `register` returned"
        )
    elif not isinstance(group, int) or not 0 <= group < len(space.layouts):
        throttle.warning("group", f"group {group!r:.40} of a model whose groups are 0 to {len(space.layouts) - 1}")
    else:
        return space
    return None


def sound(
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
    chosen = {}
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
