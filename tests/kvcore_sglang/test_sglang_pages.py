"""With a pool of plain memory. SGLang's own pools: tests/sglang."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.api import LayoutError
from kvcore_sglang import _compat
from kvcore_sglang.pages import InPlace, memory, pages_of

PAGE, SIZE = 4, 32


class Indices(list[int]):
    def tolist(self) -> list[int]:
        return list(self)


class Pool:
    """Two tensors, K and V, of `SIZE` bytes for each page."""

    layout, page_size = "page_first", PAGE

    def __init__(self) -> None:
        self.memory = [ctypes.create_string_buffer(8 * SIZE) for _ in range(2)]
        self.ranges = 2

    def get_page_buffer_meta(self, indices: Indices) -> tuple[list[int], list[int]]:
        starts = indices[:: self.page_size]
        addresses = [ctypes.addressof(m) + start // PAGE * SIZE for start in starts for m in self.memory[: self.ranges]]
        return addresses, [SIZE] * len(addresses)


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "one_page", lambda pool: Indices(range(pool.page_size)))


def test_pages_are_views_of_the_pools_memory() -> None:
    pool = Pool()
    pages = InPlace(pool)
    assert pages.sizes == (SIZE, SIZE)
    lent = pages.empty(Indices([*range(8, 12), *range(4)]), 2)
    for i, page in enumerate(lent.buffers):
        for j, part in enumerate(page):
            part[:] = bytes([10 * i + j]) * SIZE
    assert [pool.memory[0].raw[at] for at in (2 * SIZE, 0)] == [0, 10]
    assert [pool.memory[1].raw[at] for at in (2 * SIZE, 0)] == [1, 11]


def test_a_pool_that_changes_how_it_cuts_pages_is_refused() -> None:
    pool = Pool()
    pages = InPlace(pool)
    pool.ranges = 1
    with pytest.raises(LayoutError, match="cuts 1 pages into 1 ranges of memory, and cut one into 2"):
        pages.full(Indices(range(4)), 1)


def test_a_pool_that_can_do_neither_says_why() -> None:
    def refuse(*args: Any) -> Any:
        raise ValueError("not in this layout")

    pool = SimpleNamespace(layout="odd", page_size=PAGE, get_page_buffer_meta=refuse, get_dummy_flat_data_page=refuse)
    with pytest.raises(LayoutError, match=r"layout odd.*in-place: not in this layout; flat: not in this layout"):
        pages_of(pool, in_place=True)


def test_memory_is_writable_bytes() -> None:
    owner = ctypes.create_string_buffer(b"abcd")
    view = memory(ctypes.addressof(owner), 4)
    assert (view.format, view.contiguous, view.readonly, bytes(view)) == ("B", True, False, b"abcd")
    view[1:3] = b"xy"
    assert owner.raw[:4] == b"axyd"
