"""The guard that engine plugins put around what an engine calls."""

import importlib
import logging
from typing import Any

import pytest

from kvcore.engine import Guarded, guarded


class Half(Guarded):
    logger = logging.getLogger("kvcore.acme")

    @guarded(lambda: (0, False))
    def work(self, error: BaseException | None) -> tuple[int, bool]:
        if error is not None:
            raise error
        return 5, True

    @guarded(lambda keys: [False] * len(keys), of_first=True)
    def ask(self, keys: list[str], more: Any = None) -> list[bool]:
        return [key[0] == "h" for key in keys]

    @guarded(lambda nothing: nothing, of_first=True)
    def clear(self) -> None:
        raise ValueError


def test_an_error_becomes_the_default_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    half = Half()
    with caplog.at_level(logging.ERROR, "kvcore"):
        for error in (ValueError("a"), ValueError("b"), KeyError("c")):
            assert half.work(error) == (0, False)
    assert half.faults == {"work:ValueError": 2, "work:KeyError": 1}
    assert [(r.name, r.levelname) for r in caplog.records] == [("kvcore.acme", "ERROR")] * 2
    assert caplog.records[0].getMessage() == "kvcore failed in work and goes on without (logged once): a"
    assert caplog.records[0].exc_info is not None


def test_the_default_may_be_one_of_the_first_argument() -> None:
    half = Half()
    assert half.ask(["here", "there"]) == [True, False]
    assert half.ask(["", "x"], 7) == [False, False]
    assert half.ask(keys=[""], more=7) == [False]
    assert half.clear() is None
    assert half.faults == {"ask:IndexError": 2, "clear:ValueError": 1}


def test_time_is_counted() -> None:
    half = Half()
    assert half.work(None) == (5, True)
    assert half.seconds > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupt_is_not_swallowed(error: BaseException) -> None:
    half = Half()
    with pytest.raises(type(error)):
        half.work(error)
    assert half.faults == {}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_the_plugins_say_whose_fault_it_was(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    plugin = importlib.import_module(f"kvcore_{engine}.faults")
    with caplog.at_level(logging.ERROR, "kvcore"):
        plugin.Guarded().fault("ask", ValueError("x"))
    assert [r.name for r in caplog.records] == [f"kvcore.{engine}"]
