"""What a producer promises and a consumer believes, and whose request it is."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore_vllm import awaited as patience
from kvcore_vllm import handover
from kvcore_vllm.awaited import Awaited
from kvcore_vllm.handover import Handover, Promise
from kvcore_vllm.requests import RequestState
from kvcore_vllm.spaces import MAX_TENANT, tenant_of

pytestmark = pytest.mark.vllm

SPACE: Any = SimpleNamespace(namespace=b"\1" * 16, chunk_tokens=256, windows=(None,))


def test_a_promise_comes_through_json() -> None:
    params = json.loads(json.dumps(handover.promise(SPACE, [b"one", b"two", b"three"], 2, "team")))
    assert handover.read(params) == Promise("01" * 16, 512, b"two".hex(), "team")
    assert handover.read({"do_remote_decode": True, **params}) is not None


@pytest.mark.parametrize(
    "params",
    [
        None,
        "kvcore",
        {},
        {"kvcore": 5},
        {"kvcore": {}},
        {"kvcore": {"space": "00", "tokens": 256}},
        {"kvcore": {"space": "00", "tokens": "256", "hash": "00"}},
        {"kvcore": {"space": "00", "tokens": True, "hash": "00"}},
        {"kvcore": {"space": "00", "tokens": -256, "hash": "00"}},
        {"kvcore": {"space": 0, "tokens": 256, "hash": "00"}},
        {"kvcore": {"space": "00", "tokens": 256, "hash": "00", "tenant": None}},
        {"kvcore": {"space": "00", "tokens": 256, "hash": "00", "more": 1}},
    ],
)
def test_what_is_no_promise_is_none(params: Any) -> None:
    assert handover.read(params) is None


def test_patience_lasts_as_long_as_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(handover.time, "monotonic", lambda: now)
    awaited = Awaited("00", 8, timeout_s=1.0)
    assert awaited.due_s <= 0
    assert awaited.again(0)
    assert 0 < awaited.due_s <= patience.FIRST_PAUSE_S
    pauses = []
    for _ in range(10):
        assert awaited.again(0)
        pauses.append(awaited.due_s)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(patience.LONGEST_PAUSE_S)
    now = 100.9
    assert awaited.again(3)
    assert awaited.due_s == pytest.approx(patience.FIRST_PAUSE_S)
    now = 101.8
    assert awaited.again(3)
    now = 102.0
    assert not awaited.again(3)
    assert not Awaited("00", 8, 1.0).again(8)


def test_what_a_producer_may_promise() -> None:
    state = RequestState(SimpleNamespace(), SPACE, "")
    state.begin_saving("a")
    state.planned(0, 4, {"known": 3})
    state.planned(4, 6, {})
    assert (state.saved, state.promisable()) == (6, 6)
    state.planned(6, 8, {"l1_full": 1})
    state.planned(8, 9, {})
    assert (state.saved, state.promisable()) == (9, 6)
    state.save_failed(4)
    assert (state.saved, state.promisable()) == (4, 4)
    state.begin_saving("b")
    assert (state.saved, state.promisable()) == (0, 0)


def test_a_window_of_which_blocks_are_gone_is_not_promised() -> None:
    space: Any = SimpleNamespace(windows=(None, 2))
    state = RequestState(SimpleNamespace(), space, "")
    state.begin_saving("a")
    state.planned(0, 4, {"no_block": 1})
    assert state.promisable() == 0
    state.planned(4, 5, {})
    assert state.promisable() == 0
    state.planned(5, 6, {})
    assert state.promisable() == 6


def asked(params: Any = None, salt: str | None = None) -> Any:
    return SimpleNamespace(kv_transfer_params=params, cache_salt=salt)


def test_whose_request_it_is() -> None:
    promised = handover.promise(SPACE, [b"one"], 1, "from the producer")
    assert tenant_of(asked()) == ""
    assert tenant_of(asked(salt="salt")) == "salt"
    assert tenant_of(asked({}, salt="salt")) == "salt"
    assert tenant_of(asked({"tenant": "team"}, salt="salt")) == "team"
    assert tenant_of(asked(promised, salt="salt")) == "from the producer"
    assert tenant_of(asked({**promised, "tenant": "team"})) == "team"
    assert tenant_of(asked(handover.promise(SPACE, [b"one"], 1, ""), salt="salt")) == "salt"


@pytest.mark.parametrize("name", [5, ["a"], "x" * (MAX_TENANT + 1), "a\nb", "\ud800"])
def test_what_is_no_name_is_nobodys(name: Any) -> None:
    assert tenant_of(asked({"tenant": name}, salt="salt")) is None


def test_any_salt_separates() -> None:
    salts = ["x" * 1000, "x" * 1001, "a\nb", "\ud800"]
    names = {tenant_of(asked(salt=salt)) for salt in salts}
    assert len(names) == len(salts)
    assert all(name and name.isprintable() and len(name) <= MAX_TENANT for name in names)


HASHES = [b"one", b"two", b"three", b"four"]


class Request:
    def __init__(self, params: Any = None) -> None:
        self.kv_transfer_params = params
        self.cache_salt = None
        self.num_tokens = 4 * 256


def state_of(params: Any = None, windows: tuple[int | None, ...] = (None,), kept: int = 0) -> RequestState:
    space: Any = SimpleNamespace(namespace=b"\1" * 16, chunk_tokens=256, windows=windows)
    state = RequestState(Request(params), space, "")
    state.hashes = HASHES
    state.begin_saving("a")
    if kept:
        state.planned(0, kept, {})
    return state


def made(there: bool = True, producing: bool = False) -> Handover:
    engine: Any = SimpleNamespace(descriptor=lambda: {"token": "a"} if there else None)
    return Handover(engine, 1.0, producing)


def outcomes(handover_: Handover) -> dict[str, float]:
    return {k.partition('"')[2].rstrip('"}'): v for k, v in handover_.counts.items() if "outcome" in k and v}


def test_a_consumer_waits_for_what_was_promised() -> None:
    consumer = made()
    state = state_of(handover.promise(SPACE, HASHES, 3, ""))
    consumer.begin(state, HASHES)
    assert consumer.wait(state, 0)
    assert consumer.wait(state, 2)
    assert not consumer.wait(state, 3)
    assert outcomes(consumer) == {"kept": 1}
    assert not consumer.wait(state, 0)  # once


def test_a_window_leaves_a_token_to_compute() -> None:
    consumer = made()
    state = state_of(handover.promise(SPACE, HASHES, 4, ""), (None, 2))
    consumer.begin(state, HASHES)
    assert not consumer.wait(state, 3)
    assert outcomes(consumer) == {"kept": 1}


@pytest.mark.parametrize("chunks", [1, 3])
def test_nobody_waits_for_another_prompt(chunks: int) -> None:
    consumer = made()
    state = state_of(handover.promise(SPACE, [b"other", *HASHES[1:2], b"third"], chunks, ""))
    consumer.begin(state, HASHES)
    assert not consumer.wait(state, 0)
    assert outcomes(consumer) == {"foreign": 1}


def test_nobody_waits_for_another_models_kv_or_without_a_server() -> None:
    elsewhere: Any = SimpleNamespace(namespace=b"\2" * 16, chunk_tokens=256)
    consumer = made()
    state = state_of(handover.promise(elsewhere, HASHES, 3, ""))
    consumer.begin(state, HASHES)
    assert not consumer.wait(state, 0)
    assert outcomes(consumer) == {"foreign": 1}
    alone = made(there=False)
    state = state_of(handover.promise(SPACE, HASHES, 3, ""))
    alone.begin(state, HASHES)
    assert not alone.wait(state, 0)
    assert outcomes(alone) == {"broken": 1}


def test_who_promises() -> None:
    asked = {"do_remote_decode": True}
    assert made().promise(state_of(kept=3)) is None
    assert made(producing=True).promise(state_of(kept=0)) is None
    assert made(there=False, producing=True).promise(state_of(kept=3)) is None
    answered = made(producing=True).promise(state_of(kept=3))
    assert handover.read(answered) == Promise("01" * 16, 768, b"three".hex(), "")
    assert made().promise(state_of(asked, kept=2)) is not None


def test_of_two_in_one_engine_one_promises() -> None:
    """vLLM's MultiConnector ends the engine over the same key from two."""
    state = state_of(kept=3)
    assert made(producing=True).promise(state) is not None
    assert made(producing=True).promise(state) is None
