import logging

import pytest

from kvcore_vllm.faults import Guarded, guarded


class Half(Guarded):
    @guarded(lambda: (0, False))
    def work(self, error: Exception | None) -> tuple[int, bool]:
        if error is not None:
            raise error
        return 5, True


def test_an_error_becomes_the_default_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    half = Half()
    with caplog.at_level(logging.ERROR, "kvcore"):
        for error in (ValueError("a"), ValueError("b"), KeyError("c")):
            assert half.work(error) == (0, False)
    assert half.faults == {"work:ValueError": 2, "work:KeyError": 1}
    assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR"]


def test_time_is_counted() -> None:
    half = Half()
    assert half.work(None) == (5, True)
    assert half.seconds > 0


def test_an_interrupt_is_not_swallowed() -> None:
    half = Half()
    with pytest.raises(KeyboardInterrupt):
        half.work(KeyboardInterrupt())  # type: ignore[arg-type]
