"""The allocator against a plain model: a byte map of pages."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvcore.l1.allocator import ALIGN, Allocator, round_up

PAGES = 48


class AllocatorMachine(RuleBasedStateMachine):
    """Mixed sizes, batches, frees in any order."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(PAGES * ALIGN + 100)  # the odd end is not used
        self.used = [False] * PAGES

    def holes(self) -> list[int]:
        """Lengths in pages of the maximal free runs."""
        runs, run = [], 0
        for used in [*self.used, True]:
            if used:
                runs.append(run)
                run = 0
            else:
                run += 1
        return [r for r in runs if r]

    def mark(self, nbytes: int, offset: int, used: bool) -> None:
        assert offset % ALIGN == 0
        assert offset >= 0
        assert offset + round_up(nbytes) <= PAGES * ALIGN
        for page in range(offset // ALIGN, (offset + round_up(nbytes)) // ALIGN):
            assert self.used[page] is not used, "overlap" if used else "freed twice"
            self.used[page] = used

    @rule(target=slots, nbytes=st.integers(1, 12 * ALIGN), count=st.integers(0, 10))
    def alloc(self, nbytes: int, count: int) -> Any:
        fits_one = max(self.holes(), default=0) >= round_up(nbytes) // ALIGN
        got = self.allocator.alloc(nbytes, count)
        assert len(got) <= count
        for offset in got:
            self.mark(nbytes, offset, True)
        if count and fits_one:
            assert got, "a hole fits, and nothing was allocated"
        if len(got) < count:
            assert max(self.holes(), default=0) < round_up(nbytes) // ALIGN, "a fitting hole was left"
        return multiple(*((nbytes, offset) for offset in got))

    @rule(target=slots, pages=st.integers(1, 3), count=st.integers(1, 4))
    def alloc_common(self, pages: int, count: int) -> Any:
        return self.alloc(pages * ALIGN, count)

    @rule(slot=consumes(slots))
    def free(self, slot: tuple[int, int]) -> None:
        nbytes, offset = slot
        self.mark(nbytes, offset, False)
        self.allocator.free(nbytes, [offset])

    @rule(slot=consumes(slots), other=consumes(slots))
    def free_two(self, slot: tuple[int, int], other: tuple[int, int]) -> None:
        for nbytes, offset in (slot, other):
            self.mark(nbytes, offset, False)
        if round_up(slot[0]) == round_up(other[0]):
            self.allocator.free(slot[0], [slot[1], other[1]])
        else:
            self.allocator.free(*_batch(slot))
            self.allocator.free(*_batch(other))

    @rule()
    def largest(self) -> None:
        nbytes = max(self.holes(), default=0) * ALIGN
        assert self.allocator.alloc(nbytes + 1) == []
        if nbytes:
            (slot,) = self.allocator.alloc(nbytes)
            self.allocator.free(nbytes, [slot])

    @invariant()
    def free_bytes_are_exact(self) -> None:
        assert self.allocator.free_bytes == self.used.count(False) * ALIGN


def _batch(slot: tuple[int, int]) -> tuple[int, list[int]]:
    return slot[0], [slot[1]]


AllocatorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestAllocatorMachine = AllocatorMachine.TestCase


def test_everything_is_one_hole_again() -> None:
    allocator = Allocator(64 * ALIGN)
    small = allocator.alloc(ALIGN, 64)
    assert sorted(small) == [i * ALIGN for i in range(64)]
    assert allocator.alloc(ALIGN) == []
    allocator.free(ALIGN, small[::2])
    assert allocator.alloc(2 * ALIGN) == []  # only single pages are free
    allocator.free(ALIGN, small[1::2])
    assert allocator.alloc(64 * ALIGN) == [0]


def test_asking_for_none_takes_none() -> None:
    allocator = Allocator(8 * ALIGN)
    allocator.free(ALIGN, allocator.alloc(ALIGN, 4))
    assert allocator.alloc(ALIGN, 0) == []
    assert allocator.free_bytes == 8 * ALIGN
    assert len(allocator.alloc(ALIGN, 8)) == 8


@pytest.mark.parametrize("nbytes", [0, -1, -ALIGN])
def test_no_slot_of_nothing(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Allocator(ALIGN).alloc(nbytes)


@pytest.mark.parametrize("size", [0, 1, ALIGN - 1])
def test_less_than_a_page_holds_nothing(size: int) -> None:
    allocator = Allocator(size)
    assert allocator.free_bytes == 0
    assert allocator.alloc(1) == []
