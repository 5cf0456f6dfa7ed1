"""What goes in place and what is copied: every byte once, nothing unaligned, nothing outside."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.testing.memory import aligned, content, split
from kvcore_nixl.memory import PAGE, Buffers, Span, spans


def everywhere(start: int, nbytes: int) -> bool:
    return True


def nowhere(start: int, nbytes: int) -> bool:
    return False


def test_a_frame_needs_no_copy() -> None:
    """A header page and an aligned payload, as the core gives them."""
    assert spans([(8192, PAGE), (1 << 30, 1 << 20)], PAGE + (1 << 20), PAGE, everywhere) == [
        Span(0, PAGE, 8192),
        Span(PAGE, PAGE + (1 << 20), 1 << 30),
    ]


def test_only_the_end_of_an_odd_frame_is_copied() -> None:
    assert spans([(8192, PAGE), (1 << 30, 10_000)], PAGE + 10_000, PAGE, everywhere) == [
        Span(0, PAGE, 8192),
        Span(PAGE, 3 * PAGE, 1 << 30),
        Span(3 * PAGE, 4 * PAGE, None),
    ]


def test_what_is_not_registered_is_copied() -> None:
    """The header lies outside the arena."""
    arena = range(1 << 30, 2 << 30)
    found = spans([(8192, PAGE), (1 << 30, 8192)], PAGE + 8192, PAGE, lambda a, n: a in arena and a + n - 1 in arena)
    assert found == [Span(0, PAGE, None), Span(PAGE, 3 * PAGE, 1 << 30)]
    assert spans([(8192, PAGE)], PAGE, PAGE, nowhere) == [Span(0, PAGE, None)]


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 512, 4095]), st.integers(0, 3 * PAGE)), max_size=8
    ),
    less=st.integers(0, 2 * PAGE),
    page=st.sampled_from([1, PAGE]),
    registered=st.integers(0, 255),
)
def test_spans_cover_an_object_once(pieces: list[tuple[int, int, int]], less: int, page: int, registered: int) -> None:
    places = [((i + 1) * (1 << 20) + pages * PAGE + odd, nbytes) for i, (pages, odd, nbytes) in enumerate(pieces)]
    room = sum(nbytes for _, nbytes in places)
    nbytes = max(0, room - less)
    found = spans(places, nbytes, page, lambda start, n: bool(registered >> (start >> 20) & 1))
    assert [s.start for s in found] == [0, *(s.end for s in found)][: len(found)]
    assert (found[-1].end if found else 0) == -(-nbytes // page) * page
    at = 0
    begins = {}
    for address, length in places:
        begins[address >> 20] = (at, address, length)
        at += length
    for span in found:
        assert span.start < span.end
        assert span.start % page == span.end % page == 0
        if span.address is not None:
            assert span.address % page == 0
            assert span.end <= nbytes
            assert registered >> (span.address >> 20) & 1
            begin, address, length = begins[span.address >> 20]
            assert span.address - address == span.start - begin >= 0
            assert span.end - begin <= length


@given(cuts=st.lists(st.integers(0, 3000), max_size=5), start=st.integers(0, 3000), nbytes=st.integers(0, 3000))
def test_copies_take_the_right_bytes(cuts: list[int], start: int, nbytes: int) -> None:
    data = content("copies", 3000)
    source = Buffers(split(memoryview(data), cuts))
    end = min(3000, start + nbytes)
    target = np.zeros(end - start, np.uint8)
    source.copy_to(target, start)
    assert bytes(target) == data[start:end]
    memory = aligned(3000)
    Buffers(split(memory, cuts)).copy_from(target, start)
    assert bytes(memory) == bytes(start) + data[start:end] + bytes(3000 - end)


def test_memory_that_is_gone_is_an_error() -> None:
    view = memoryview(b"gone")
    view.release()
    with pytest.raises(ValueError, match="released"):
        Buffers([view])
