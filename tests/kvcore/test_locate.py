"""Which tiers have what, and which of them have said nothing: of each lookup for itself."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from toys import AsyncStorage, key

from kvcore.api import StorageError
from kvcore.control import locate
from kvcore.control.loop import LoopThread
from kvcore.l2 import Codec, Threads, Tier
from kvcore.observe import Metrics

PATIENCE_S = 60.0


@pytest.fixture
def make() -> Iterator[Callable[..., Tier]]:
    """Makes a tier over a storage."""
    threads = Threads("codec", 1)
    metrics = Metrics()
    yield lambda name, storage: Tier(
        name, storage, Codec([], {}.get), threads=threads, timeout_s=PATIENCE_S, metrics=metrics
    )
    threads.close()


def test_who_has_said_nothing_to_one_lookup_is_not_excused_by_its_answer_to_another(make: Callable[..., Tier]) -> None:
    loop = LoopThread("test")
    asked = 0

    async def lookups() -> None:
        let_go = asyncio.Event()

        def fails_once(method: str) -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise StorageError("not now")

        async def waits(method: str) -> None:
            await let_go.wait()

        slow, flaky = make("slow", AsyncStorage(waits)), make("flaky", AsyncStorage(fails_once))
        silent: list[Tier] = []
        first = asyncio.ensure_future(locate(loop, [slow, flaky], [key(1)], patience_s=PATIENCE_S, silent=silent))
        while asked < 1:
            await asyncio.sleep(0)
        others: list[Tier] = []
        assert await locate(loop, [flaky], [key(2)], patience_s=PATIENCE_S, silent=others) == [None]
        assert others == []
        let_go.set()
        assert await first == [None]
        assert [tier.name for tier in silent] == ["flaky"]

    try:
        loop.submit(lookups()).result(PATIENCE_S)
    finally:
        loop.close()


def test_a_tier_that_does_not_answer_says_so_and_not_that_it_has_nothing(make: Callable[..., Tier]) -> None:
    answers: list[Any] = [None, StorageError("gone"), [True]]

    def says(method: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> None:
        tier = make("t", AsyncStorage(says))
        assert await tier.ask([key(1)]) == [False]
        assert await tier.ask([key(1)]) is None
        assert await tier.ask([key(1)]) == [True]
        assert await tier.ask([]) == []
        tier.breaker.open("for the test")
        assert await tier.ask([]) is None
        assert await tier.ask([key(1)]) is None
        assert await tier.exists([key(1)]) == [False]
        await tier.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
