"""The ages of objects: who has been resident for longer than it may."""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from kvcore.l1.spaces import L1Object


class Aging:
    """Objects by the time at which they came, all with the same time to live. Under the table's lock."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._ends: OrderedDict[L1Object, float] = OrderedDict()  # the first to end comes first

    def came(self, objects: Iterable[L1Object], now: float) -> None:
        """They became resident."""
        end = now + self._ttl_s
        for obj in objects:
            self._ends.setdefault(obj, end)  # what was being given up and stays after all grows no younger

    def left(self, objects: Collection[L1Object]) -> None:
        """They are gone for another reason."""
        for obj in objects:
            self._ends.pop(obj, None)

    def due(self, now: float) -> list[L1Object]:
        """Those whose time is over; they are forgotten."""
        over: list[L1Object] = []
        while self._ends:
            obj, end = next(iter(self._ends.items()))
            if end > now:
                break
            del self._ends[obj]
            over.append(obj)
        return over
