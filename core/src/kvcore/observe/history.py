"""Numbers of a cache since it was opened, in bounded memory: the longer that is ago, the further apart they are."""

import math
import threading
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

from kvcore.observe.metrics import Metrics

EVERY_S = 10.0
"""Between two points at the beginning."""
MAX_POINTS = 1024
"""When there are more, each second one is dropped, and from then on twice as much time is left between them."""
SERIES = (
    "lookups", "lookup_seconds", "lookup_chunks", "hit_chunks", "miss_chunks", "hit_tokens", "saved_prefill_seconds",
    "stored_chunks", "store_skipped_chunks", "evicted_objects", "l1_bytes", "l1_objects", "leases", "sessions",
    "tenant_bytes", "tier_bytes", "tier_seconds", "tier_operations", "tier_dropped", "tier_queue_bytes",
    "tier_used_bytes", "tier_open", "tier_opened",
)  # fmt: skip
"""The metrics of a point."""


class Points(NamedTuple):
    """A part of a history. `times` are seconds since 1970; of `series` see `Metrics.numbers`, None where there was no
    such number yet. `every_s`: between two points."""

    every_s: float
    times: list[float]
    series: dict[str, list[float | None]]


class History:
    """Takes down the metrics now and then, whenever somebody who is awake calls `tick`. Thread-safe.

    Args:
        refresh: brings gauges up to date that nobody keeps so.
    """

    def __init__(
        self, metrics: Metrics, refresh: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.every_s = EVERY_S
        self._metrics = metrics
        self._refresh = refresh
        self._clock = clock
        self._times = array("d")
        self._columns: dict[str, array[float]] = {}
        self._due = clock()
        self._lock = threading.Lock()

    def tick(self) -> None:
        """Take down a point when it is time for one."""
        now = self._clock()
        if now < self._due:
            return
        numbers = self._numbers()
        with self._lock:
            for name in numbers.keys() - self._columns.keys():
                self._columns[name] = array("d", [math.nan]) * len(self._times)
            self._times.append(now)
            for name, column in self._columns.items():
                column.append(numbers.get(name, math.nan))
            if len(self._times) > MAX_POINTS:
                self._times = self._times[::2]
                self._columns = {name: column[::2] for name, column in self._columns.items()}
                self.every_s *= 2
            self._due = now + self.every_s

    def since(self, at: float = 0.0) -> Points:
        """The points later than `at` (seconds since 1970), and one of now behind them."""
        now, numbers = self._clock(), self._numbers()
        ahead = time.time() - now  # of the calendar's clock, which may be set meanwhile
        with self._lock:
            begin = next((i for i, time_s in enumerate(self._times) if time_s + ahead > at), len(self._times))
            times = self._times[begin:].tolist()
            columns = {name: column[begin:].tolist() for name, column in self._columns.items()}
        series = {}
        for name in columns | numbers:
            past = columns.get(name) or [math.nan] * len(times)
            series[name] = [None if math.isnan(v) else v for v in (*past, numbers.get(name, math.nan))]
        return Points(self.every_s, [time_s + ahead for time_s in (*times, now)], series)

    def _numbers(self) -> dict[str, float]:
        self._refresh()
        return self._metrics.numbers(SERIES)
