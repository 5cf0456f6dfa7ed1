"""What TensorRT-LLM does under its KV cache manager V2: a promise is taken steps later, in part or not at all, and a
request may lose its blocks and begin again. By the stand-in for it, see `trtllm_runtime.py`."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from trtllm_runtime import BLOCK, Replace, Runtime, Start, expected, prompt, saved, warm

from kvcore.testing.servers.kvcore import KVCoreServer
from kvcore_trtllm.worker import WorkerHalf

LEASE_S = 4.0


def idle(engine: Runtime) -> None:
    """Nothing is leased, nothing is under way."""
    half = engine.scheduler.half
    engine.until(lambda: not half._states and not half._loading and not half._saving)
    engine.until(lambda: "kvcore_leases 0.0" in half.engine.metrics_text().splitlines())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("later", [1, 5])
def test_a_promise_is_taken_later(start: Start, ranks: int, later: int) -> None:
    engine = start(ranks)
    engine.run(prompt(70))
    saved(engine)
    assert engine.run(prompt(70), later=later).matched == 64
    idle(engine)


def test_a_promise_that_is_taken_after_its_lease(start: Start) -> None:
    engine = start(lease=f"{LEASE_S:g}s")
    engine.run(prompt(70))
    saved(engine)
    request = engine.submit(prompt(70), later=1 << 30)
    until = time.monotonic() + 1.75 * LEASE_S
    engine.until(lambda: time.monotonic() > until)
    assert 'kvcore_expired_leases_total{kind="read"}' not in engine.scheduler.half.engine.metrics_text()
    request.later = 0
    engine.until(lambda: request.state == "freed")
    assert request.matched == 64


@pytest.mark.parametrize("takes", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 2, 7 * BLOCK])
@pytest.mark.parametrize("held", [0, 2 * BLOCK])
def test_a_promise_that_is_taken_in_part(start: Start, takes: int, held: int) -> None:
    """The engine waits for the load in any case, also for one of which nothing is left."""
    engine = start(2)
    engine.run(prompt(70))
    saved(engine)
    request = engine.run(prompt(70), takes=takes, held=held)
    assert request.matched == min(takes, 64 - held)
    idle(engine)
    assert engine.run(prompt(70)).matched == 64


def test_a_request_that_is_cancelled_before_it_has_blocks(start: Start) -> None:
    engine = start()
    engine.run(prompt(70))
    saved(engine)
    request = engine.submit(prompt(70), later=1 << 30)
    engine.step()
    assert request.state == "asked"
    engine.cancel(request)
    assert request.state == "freed"
    idle(engine)


@pytest.mark.parametrize("when", ["asked", "context", "generating"])
def test_a_request_that_begins_again(start: Start, when: str) -> None:
    engine = start(2, context=24)
    engine.run(prompt(70))
    saved(engine)
    request = engine.submit(prompt(70) + prompt(60, seed=1), 4, later=2 if when == "asked" else 0)
    engine.until(lambda: request.state == when)
    engine.reset(request)
    engine.until(lambda: request.state == "freed")
    assert 64 <= request.matched <= 128, "what others have stored, and of its own what was whole by then"
    assert request.tokens[130:] == expected(request.prompt, 4, 2)
    saved(engine)
    engine.run(request.prompt)  # stores what was on its way when the blocks were lost
    saved(engine)
    assert engine.run(request.prompt).matched == 128
    idle(engine)


def test_what_was_being_saved_of_lost_blocks_is_not_kept(start: Start, replace: Replace) -> None:
    hold = threading.Event()

    def slow(half: WorkerHalf, job: Any, copy: Callable[[], bool]) -> bool:
        return hold.wait(60) and copy()

    replace("save", slow)
    engine = start(2)
    request = engine.submit(prompt(70), 6)
    engine.until(lambda: request.state == "generating")
    engine.reset(request)
    other = engine.submit(prompt(70, seed=5), 6)  # computed first, into the blocks that were lost
    request.later = 4
    engine.until(lambda: other.state in ("generating", "saving"))
    hold.set()
    engine.until(lambda: {request.state, other.state} == {"freed"})
    saved(engine)
    for tokens in (request.prompt, other.prompt):
        engine.run(tokens)
    saved(engine)
    assert engine.run(request.prompt).matched == 64


def test_a_server_that_is_restarted_between_promise_and_blocks(start: Start, server: KVCoreServer) -> None:
    engine = start(2, config=str(server.config))
    engine.run(prompt(70))
    saved(engine)
    request = engine.submit(prompt(70), later=1 << 30)
    engine.step()
    assert request.offer == (64, True)
    before = engine.scheduler.half._arena
    server.kill()
    server.start()
    engine.until(lambda: engine.scheduler.half._arena not in ("", before))
    warm(engine)
    assert all(len(worker.half._arenas) == 2 for worker in engine.workers)
    request.later = 0
    engine.until(lambda: request.state == "freed")
    assert request.matched == 64, "what was promised is still mapped"
    engine.run(prompt(20, seed=3))
    assert all(len(worker.half._arenas) == 1 for worker in engine.workers)
