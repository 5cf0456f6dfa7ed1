"""The thread pool: work runs side by side, hung threads are replaced, and none keeps the process alive."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from kvcore.l2.threads import MAX_STUCK, DeadlineExceeded, Threads


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_results_and_errors() -> None:
    async def main() -> None:
        threads = Threads("t", 2)
        assert await threads.run(lambda a, b: a + b, 1, 2) == 3
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        threads.close()

    run(main())


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_errors_that_a_loop_cannot_bear(error: BaseException) -> None:
    """A plugin's stray `next()` or `sys.exit()` is that call's error: it neither hangs it nor ends the loop."""

    def bad() -> None:
        raise error

    async def main() -> None:
        threads = Threads("t", 1)
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await asyncio.wait_for(threads.run(bad), 5)
        assert await threads.run(lambda: 1) == 1
        threads.close()

    run(main())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_as_many_calls_at_once_as_threads(size: int) -> None:
    async def main() -> None:
        threads = Threads("t", size)
        for _ in range(3):  # a fresh pool, then one with idle threads
            together = threading.Barrier(size)
            await asyncio.gather(*(threads.run(together.wait, 5) for _ in range(size)))
        assert threads._threads == size
        running, most, lock = [0], [0], threading.Lock()

        def work() -> None:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            time.sleep(0.002)
            with lock:
                running[0] -= 1

        await asyncio.gather(*(threads.run(work) for _ in range(20)))
        assert most[0] <= size
        threads.close()

    run(main())


def test_an_idle_thread_does_not_stand_for_several() -> None:
    async def main() -> None:
        threads = Threads("t", 3)
        await threads.run(time.sleep, 0)
        await until(lambda: threads._idle == 1)
        together = threading.Barrier(3)
        await asyncio.gather(*(threads.run(together.wait, 5) for _ in range(3)))
        threads.close()

    run(main())


def test_threads_are_made_only_when_needed() -> None:
    async def main() -> None:
        threads = Threads("t", 8)
        for _ in range(20):
            await threads.run(time.sleep, 0)
            await until(lambda: threads._idle == threads._threads)
        assert threads._threads == 1
        threads.close()

    run(main())


def test_a_hung_thread_is_replaced_for_those_who_already_wait() -> None:
    async def main() -> None:
        threads = Threads("t", 1)
        gate = threading.Event()
        hung = threads.submit(gate.wait, 30)
        await until(lambda: hung.state == "running")
        waiting = threads.submit(lambda: "served")
        assert threads.abandon(hung)
        assert threads.abandon(hung)  # twice counts once
        assert await asyncio.wait_for(waiting.settled, 5) == "served"
        assert threads._stuck == 1
        gate.set()
        assert await asyncio.wait_for(hung.settled, 5) is True
        assert threads._stuck == 0
        assert not threads.abandon(hung)  # it has let go
        assert threads._stuck == 0
        await until(lambda: threads._threads == 1)  # the one too many has ended
        assert await threads.run(lambda: 1) == 1
        threads.close()

    run(main())


def test_an_abandoned_call_that_never_began_never_begins() -> None:
    async def main() -> None:
        threads = Threads("t", 1)
        gate, ran = threading.Event(), []
        first = threads.submit(gate.wait, 30)
        await until(lambda: first.state == "running")
        buffer = memoryview(bytearray(8))
        second = threads.submit(ran.append, buffer)
        assert not threads.abandon(second)
        assert second.args == ()  # its buffers are free at once
        gate.set()
        assert await threads.run(lambda: 1) == 1
        assert not ran
        threads.close()

    run(main())


def test_exhaustion_and_recovery() -> None:
    async def main() -> None:
        threads = Threads("pool", 2)
        gate = threading.Event()
        hung = []
        for _ in range(MAX_STUCK):
            call = threads.submit(gate.wait, 30)
            await until(lambda call=call: call.state == "running")
            assert threads.abandon(call)
            hung.append(call.settled)
        with pytest.raises(DeadlineExceeded, match=f"pool: {MAX_STUCK} calls hang"):
            threads.submit(time.sleep, 0)
        gate.set()
        await asyncio.wait(hung)
        assert await threads.run(lambda: 1) == 1
        await until(lambda: threads._threads <= 2)
        threads.close()

    run(main())


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_system_without_a_thread_to_give_costs_what_is_asked_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        threads = Threads("pool", 2)
        buffer = memoryview(bytearray(8))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            for _ in range(3):
                with pytest.raises(DeadlineExceeded, match="pool: no thread can be started") as caught:
                    await threads.run(len, buffer)
                assert caught.value.settled is None
        buffer.release()  # nobody has it
        together = threading.Barrier(2)
        await asyncio.wait_for(asyncio.gather(*(threads.run(together.wait, 5) for _ in range(2))), 5)
        threads.close()

    run(main())


def test_a_hung_thread_that_cannot_be_replaced_is_known_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has lent it memory must hear when it lets go of it."""

    async def main() -> None:
        threads = Threads("pool", 1)
        gate, began = threading.Event(), threading.Event()
        hung = asyncio.create_task(threads.run(lambda: (began.set(), gate.wait(30)), timeout_s=0.05))
        await until(began.is_set)
        waiting = threads.submit(lambda: "served")
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(DeadlineExceeded) as caught:
            await hung
        assert caught.value.settled is not None
        assert threads.stuck_since is not None
        gate.set()
        await asyncio.wait_for(asyncio.wait((caught.value.settled,)), 5)
        assert await asyncio.wait_for(waiting.settled, 5) == "served"
        threads.close()

    run(main())


def test_close_lets_running_calls_end_and_takes_no_more() -> None:
    async def main() -> None:
        threads = Threads("pool", 2)
        gate = threading.Event()
        running = threads.submit(gate.wait, 30)
        await until(lambda: running.state == "running")
        threads.close()
        with pytest.raises(DeadlineExceeded, match="pool: closed"):
            threads.submit(time.sleep, 0)
        gate.set()
        assert await running.settled is True
        await until(lambda: threads._threads == 0)

    run(main())


def test_many_loops_worth_of_traffic() -> None:
    """Abandoning at random instants loses no thread and no count."""

    async def main() -> None:
        threads = Threads("t", 3)
        for i in range(300):
            calls = [threads.submit(time.sleep, 0.0005 * (i % 3)) for _ in range(4)]
            await asyncio.sleep(0.0004)
            in_use = [c.settled for c in calls if threads.abandon(c)]
            if in_use:
                await asyncio.wait(in_use)
        await until(lambda: threads._idle == threads._threads)
        assert (threads._stuck, threads._waiting) == (0, 0)
        assert threads._threads <= 3
        assert await threads.run(lambda: 1) == 1
        threads.close()

    run(main())


SCRIPT = """
import asyncio, threading, time
from kvcore.l2 import Threads

async def main():
    threads = Threads("t", 1)
    call = threads.submit(threading.Event().wait)
    await asyncio.sleep(0.1)
    threads.abandon(call)
    threads.close()

asyncio.run(main())
print("end of main", flush=True)
"""


def test_a_hung_thread_does_not_keep_the_process_from_exiting() -> None:
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "end of main\n"
    assert ended.stderr == ""
    assert time.monotonic() - begun < 15
