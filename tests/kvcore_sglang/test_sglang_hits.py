from hypothesis import given
from hypothesis import strategies as st

from kvcore_sglang.hits import Held, restorable


def test_kv_alone() -> None:
    assert restorable(3, []) == ([1, 2, 3], {})
    assert restorable(0, []) == ([], {})


def test_a_pool_that_needs_all_pages() -> None:
    assert restorable(3, [Held("indexer", [True, True, False], None)]) == ([1, 2], {"indexer": 2})


def test_a_state_that_stands_at_some_pages_only() -> None:
    """As a state-space layer's: a prefix can end where one is kept, and nowhere else."""
    assert restorable(4, [Held("mamba", [False, True, False, True], 1)]) == ([2, 4], {"mamba": 4})


def test_pools_that_agree_on_no_length() -> None:
    pools = [Held("mamba", [True, False], 1), Held("swa", [False, True], 1)]
    assert restorable(2, pools) == ([], {"mamba": 1, "swa": 2})


POOLS = st.integers(0, 12).flatmap(
    lambda pages: st.tuples(
        st.just(pages),
        st.lists(
            st.tuples(st.lists(st.booleans(), min_size=pages, max_size=pages), st.none() | st.integers(1, pages + 2)),
            max_size=3,
        ),
    )
)


@given(POOLS)
def test_a_length_is_restorable_when_each_pool_has_its_last_pages(
    case: tuple[int, list[tuple[list[bool], int]]],
) -> None:
    pages, pools = case
    held = [Held(str(i), there, trailing) for i, (there, trailing) in enumerate(pools)]
    expected = [
        length
        for length in range(1, pages + 1)
        if all(all(there[max(0, length - (n or length)) : length]) for there, n in pools)
    ]
    assert restorable(pages, held).lengths == expected
