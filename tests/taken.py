"""What a process takes of its machine, from /proc: for tests that look whether that grows."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class Taken(NamedTuple):
    """What a process takes: memory beside shared memory and mapped files in KiB, open files, threads, and the seconds
    of processor time that it has used so far."""

    anon_kib: int
    files: int
    threads: int
    cpu_s: float


def taken(pid: int) -> Taken:
    """By this process now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Taken(int(status["RssAnon"].split()[0]), files, int(status["Threads"]), sum(map(int, times)) / _TICKS)


def open_files(pid: int, which: Callable[[str], bool]) -> list[str]:
    """The names of the files that this process has open, of those that are wanted."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed by now
            name = os.readlink(link)
            if which(name):
                found.append(name)
    return sorted(found)
