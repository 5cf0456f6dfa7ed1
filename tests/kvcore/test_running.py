"""Commands that are interrupted: at whatever instant, no coroutine is left that nobody awaits."""

import asyncio
import signal
import warnings
from collections.abc import Iterator

import pytest

from kvcore.cli.kit.running import Runs

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def _nothing_unawaited() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


async def one() -> int:
    await asyncio.sleep(0)
    return 1


@pytest.mark.parametrize("number", SIGNALS)
def test_between_two_coroutines(number: signal.Signals) -> None:
    with Runs() as runs:
        assert runs.run(one()) == 1
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            runs.run(one())
        assert runs.run(one()) == 1, "what tidies up afterwards runs"


@pytest.mark.parametrize("number", SIGNALS)
def test_in_a_coroutine(number: signal.Signals) -> None:
    seen = []

    async def long() -> None:
        asyncio.get_running_loop().call_later(0.01, signal.raise_signal, number)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            seen.append("tidied")

    with Runs() as runs:
        with pytest.raises(KeyboardInterrupt):
            runs.run(long())
        assert seen == ["tidied"]
        assert runs.run(one()) == 1


@pytest.mark.parametrize("number", SIGNALS)
def test_after_the_last(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Runs() as runs:
        runs.run(one())
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_cancellation_of_its_own_is_none_of_ours() -> None:
    async def gives_up() -> None:
        raise asyncio.CancelledError

    with Runs() as runs, pytest.raises(asyncio.CancelledError):
        runs.run(gives_up())


def test_an_error_in_between_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="of its own"), Runs():
        raise ValueError("of its own")
