"""Ranks: each is a thread of its own when it makes its worker."""

import threading

_here = threading.local()


def mpi_rank() -> int:
    return int(getattr(_here, "rank", 0))


def set_rank(rank: int) -> None:
    """For the stand-in: which rank this thread is."""
    _here.rank = rank
