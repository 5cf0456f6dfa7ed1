"""Every layout of SGLang's host pools, in place and by copies, through its real controller and factory."""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUTS = [
    ("layer_first", "direct"),
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_head", "kernel"),
]
CASES = [
    {"layout": layout, "io": io, "in_place": in_place, "mla": mla}
    for mla in (False, True)
    for in_place in (True, False)
    for layout, io in LAYOUTS
    if not (mla and layout == "page_head")  # SGLang has none
]
TRIPS = f"round_trips:{json.dumps({'cases': CASES})}"


@pytest.fixture(scope="module")
def results(run_child: Any) -> Any:
    return run_child(TRIPS, "side_pools", "spaces", "faults", "late")


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(map(str, case.values())) for case in CASES])
def test_what_comes_back_is_what_was_stored(results: Any, index: int) -> None:
    case, trip = CASES[index], results[TRIPS][index]
    layers = 3
    assert trip["same"]
    assert trip["buffers"] == (layers if case["mla"] else 2 * layers)
    way = ("_page_get_zero_copy", "in-place") if case["in_place"] else ("_generic_page_get", "flat")
    assert tuple(trip["kind"]) == way
    cut_by_layer = case["in_place"] and case["layout"] == "layer_first"
    tensors = 1 if case["mla"] or not case["in_place"] else 2
    assert trip["ranges"] == tensors * (layers if cut_by_layer else 1)  # several ranges are still one object
    assert (trip["stored"], trip["loaded"]) == (7, 7)
    assert trip["faults"] == {}


def test_side_pools(results: Any) -> None:
    """A pool beside KV of which a prefix needs the last pages only, or all."""
    found = results["side_pools"]
    assert found["stored"] == [[True] * 6, [True] * 3]
    assert found["trailing"] == [5, [4, 5], {"kv": 6, "swa": 5}]  # of pages 2 to 4 two are needed
    assert found["all"] == [0, [], {"kv": 6}]
    assert found["loaded"] == [True, True, True, False]
    assert found["same"]
    assert found["wrong_length"] == [False] * 3
    assert found["unknown"] == [False] * 3
    assert found["faults"] == {"batch_get_v2:LayoutError": 1}


def test_what_must_not_be_mixed_has_another_namespace(results: Any) -> None:
    spaces = results["spaces"]
    assert spaces["again"] == spaces["last"] == spaces["page_first"]
    assert spaces["attached anew"] == spaces["cleared"], "what was cleared stays so"
    different = {name: value for name, value in spaces.items() if name not in ("again", "last", "attached anew")}
    assert len(set(different.values())) == len(different) >= 9, different


def test_no_fault_of_kvcore_reaches_sglang(results: Any) -> None:
    found = results["faults"]
    assert found["answers"] == {
        "batch_exists": 0,
        "batch_get_v1": [False, False],
        "batch_set_v1": [False, False],
        "batch_get": [None, None],
        "batch_set": False,
        "exists": False,
        "get": None,
        "set": False,
        "batch_exists_v2": 0,
        "batch_get_v2": {"kv": [False, False]},
        "batch_set_v2": {"kv": [False, False]},
    }
    assert set(found["counted"]) == {f"{name}:RuntimeError" for name in found["answers"] if name not in ("get", "set")}


def test_nothing_is_written_into_the_pool_after_a_load_has_returned(results: Any) -> None:
    """The storage takes longer than its time-out; SGLang has given the pages to somebody else by then."""
    found = results["late"]
    assert found["arrived"] == [False] * 4
    assert found["untouched"]
