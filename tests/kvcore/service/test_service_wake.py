"""Waking a sleeper, also one that has just left."""

import os
import select
import threading

from kvcore.service.wake import Wake


def test_it_wakes_once_until_it_is_cleared() -> None:
    wake = Wake()
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    assert poll.poll(0) == []
    wake.set()
    wake.set()
    assert poll.poll(0)
    wake.clear()
    wake.clear()
    assert poll.poll(0) == []
    wake.close()
    wake.close()
    assert wake.fileno() == -1


def test_a_late_one_is_not_written_into_another_file() -> None:
    """Its number may be an arena's by then, which would begin with a 1 instead of what is there."""
    wakes = [Wake() for _ in range(200)]
    files: list[int] = []

    def sleepers_leave() -> None:
        for wake in wakes:
            wake.close()
            files.append(os.memfd_create("next"))

    leaving = threading.Thread(target=sleepers_leave)
    leaving.start()
    for wake in wakes:
        wake.set()
    leaving.join()
    for wake in wakes:
        wake.set()
    assert [os.fstat(fd).st_size for fd in files] == [0] * len(wakes)
    for fd in files:
        os.close(fd)
