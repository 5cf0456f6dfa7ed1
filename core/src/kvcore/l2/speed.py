"""How long a tier takes to deliver: latency and bandwidth, estimated from real loads."""

from collections import deque
from statistics import median

WINDOW = 24
"""So many loads are looked at: few enough to follow the tier, and to fit a line to in tens of microseconds."""
ENOUGH = 5
"""Loads before which nothing is said."""
REACH = 4.0
"""How far beyond the sizes that were seen the line is believed."""
_SPREAD = 2.0
"""Sizes that differ by less say nothing about which part of the time is latency."""


class LoadSpeed:
    """The last loads of one tier, each all that one lookup had from it, with the wait for other lookups' loads in it.

    A line through them by Theil and Sen: the median of the slopes between pairs, then of what that leaves. A quarter
    of the loads may be outliers. Where the loads leave a question open, the answer is the shorter time. Used from one
    thread.

    Attributes:
        latency_s: seconds of a load before its bytes.
        seconds_per_byte: the inverse of the bandwidth.
    """

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.seconds_per_byte = 0.0
        self._loads: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._reach = (0.0, 0.0)

    @property
    def known(self) -> bool:
        """Enough was loaded to say something."""
        return len(self._loads) >= ENOUGH

    def seconds(self, nbytes: int) -> float:
        """How long a load of `nbytes` takes; 0 while nothing is known."""
        if not self.known or nbytes <= 0:
            return 0.0
        least, most = self._reach
        inside = min(max(nbytes, least), most)
        return (self.latency_s + inside * self.seconds_per_byte) * min(1.0, nbytes / inside)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """A load took so long."""
        if nbytes > 0:
            self._loads.append((nbytes, seconds))
            self._fit()

    def probed(self, nbytes: int, seconds: float) -> None:
        """A load that was made to see whether the estimate still holds: one that took less than half of it is of
        another time than the loads before it, which are forgotten."""
        if seconds < self.seconds(nbytes) / 2:
            self._loads.clear()
        self.loaded(nbytes, seconds)

    def _fit(self) -> None:
        loads = list(self._loads)
        sizes = [n for n, _ in loads]
        least, most = min(sizes), max(sizes)
        if most < least * _SPREAD:  # as if of one size: half of it takes half as long, and twice of it no longer
            middle = float(median(sizes))
            self.latency_s, self.seconds_per_byte = 0.0, median(s for _, s in loads) / middle
            self._reach = (middle, middle)
            return
        self._reach = (least / REACH, most * REACH)
        apart = most / 8  # nearer pairs are noise
        slopes = [
            (b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(loads) for b in loads[:i] if abs(b[0] - a[0]) >= apart
        ]
        slope = max(0.0, median(slopes))
        latency = median(s - n * slope for n, s in loads)
        if latency < 0:
            latency, slope = 0.0, median(s / n for n, s in loads)
        self.latency_s, self.seconds_per_byte = latency, slope
