"""Leases: the time-limited right to read or write slots, which only its holder has."""

from kvcore.l1.spaces import L1Object


class ReadLease:
    """The right to read some resident objects until `deadline`. `objects` is empty once it has ended."""

    __slots__ = ("deadline", "ended", "objects")

    def __init__(self, objects: list[L1Object], deadline: float) -> None:
        self.objects = objects
        self.deadline = deadline
        self.ended = False


class WriteLease:
    """The right to fill some staging slots until `deadline`. An expired one's slots wait for its holder's answer."""

    __slots__ = ("deadline", "ended", "expired", "objects")

    def __init__(self, objects: list[L1Object], deadline: float) -> None:
        self.objects = objects
        self.deadline = deadline
        self.ended = False
        self.expired = False
