"""The pages of SGLang's host pools, as memory that a store reads from and writes into."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvcore.api import LayoutError
from kvcore_sglang import _compat


class Lent(NamedTuple):
    """Memory of pages.

    Attributes:
        buffers: per page, the ranges of memory that hold it, in order.
        kept: what keeps that memory alive.
    """

    buffers: list[list[memoryview]]
    kept: Any


class Pages(Protocol):
    """Pages of one pool.

    Attributes:
        path: `in-place` or `flat`: which bytes a page is, and in which order. In layouts that are not page-first the
            two differ.
        sizes: bytes of each range of memory of one page.
    """

    path: str
    sizes: tuple[int, ...]

    def full(self, indices: Any, count: int) -> Lent:
        """So many pages to read from, which begin at every `page_size`-th of these indices."""

    def empty(self, indices: Any, count: int) -> Lent:
        """The same to write into."""

    def landed(self, indices: Any, lent: Lent, arrived: Sequence[bool]) -> None:
        """Bring those that have arrived into the pool, if they do not lie there already."""


class InPlace:
    """Pages where they lie in the pool, in as many ranges of memory as its layout cuts them into."""

    path = "in-place"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.sizes = tuple(self._ranges(_compat.one_page(pool))[1])

    def full(self, indices: Any, count: int) -> Lent:
        """See `Pages`."""
        addresses, sizes = self._ranges(indices)
        each = len(self.sizes)
        if tuple(sizes) != self.sizes * count or len(addresses) != len(sizes):
            raise LayoutError(
                f"{type(self._pool).__name__} of SGLang cuts {count} pages into {len(addresses)} ranges of memory, and "
                f"cut one into {each}"
            )
        views = [memory(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return Lent([views[at : at + each] for at in range(0, len(views), each)], self._pool)

    def empty(self, indices: Any, count: int) -> Lent:
        """See `Pages`."""
        return self.full(indices, count)

    def landed(self, indices: Any, lent: Lent, arrived: Sequence[bool]) -> None:
        """Nothing to do: they were written where they belong."""

    def _ranges(self, indices: Any) -> tuple[list[int], list[int]]:
        found = self._pool.get_page_buffer_meta(indices)
        if not found or not found[0]:
            raise LayoutError(f"{type(self._pool).__name__} of SGLang does not say where its pages lie")
        return found[0], found[1]


class Flat:
    """Pages as SGLang copies them out of a pool and into it: what its interface is without `interface_v1`, and for
    pools that cannot say where their pages lie."""

    path = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.sizes: tuple[int, ...] = (len(tensor_memory(pool.get_dummy_flat_data_page())),)

    def full(self, indices: Any, count: int) -> Lent:
        """See `Pages`."""
        pages = [self._pool.get_data_page(start).contiguous() for start in self._starts(indices, count)]
        return Lent([[tensor_memory(page)] for page in pages], pages)

    def empty(self, indices: Any, count: int) -> Lent:
        """See `Pages`."""
        pages = [self._pool.get_dummy_flat_data_page() for _ in range(count)]
        return Lent([[tensor_memory(page)] for page in pages], pages)

    def landed(self, indices: Any, lent: Lent, arrived: Sequence[bool]) -> None:
        """See `Pages`."""
        for start, page, ok in zip(self._starts(indices, len(arrived)), lent.kept, arrived, strict=True):
            if ok:
                self._pool.set_from_flat_data_page(start, page)

    def _starts(self, indices: Any, count: int) -> list[int]:
        starts: list[int] = indices[:: self._pool.page_size].tolist()
        return starts[:count]


def pages_of(pool: Any, *, in_place: bool) -> Pages:
    """A pool's pages: in place where that is wanted and the pool can say where they lie. Raises `LayoutError` when it
    can do neither."""
    reasons = []
    for kind in (InPlace, Flat) if in_place else (Flat,):
        try:
            return kind(pool)
        except Exception as error:
            reasons.append(f"{kind.path}: {error}")
    raise LayoutError(
        f"the pages of SGLang's {type(pool).__name__} (layout {pool.layout}) cannot be stored ({'; '.join(reasons)})"
    )


def tensor_memory(tensor: Any) -> memoryview:
    """The memory of a contiguous tensor, which must outlive it."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise LayoutError(f"a page is a tensor on {tensor.device}, contiguous: {tensor.is_contiguous()}")
    return memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def memory(address: int, size: int) -> memoryview:
    """Bytes of this process, writable."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
