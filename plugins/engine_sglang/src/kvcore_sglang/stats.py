"""What SGLang is told of transfers, and kvcore's numbers in its `/metrics`."""

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvcore_sglang import _compat

_COUNTERS = ("_total", "_sum", "_count")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_GIB = 1 << 30
PERIOD_S = 1.0
"""How often numbers are handed over, at most."""
_metrics: dict[str, Any] = {}
"""Of this process, by name: a backend that is attached anew goes on with those of the one before."""
_making = threading.Lock()


class Transfers:
    """Pages moved since SGLang last asked. It asks in every step of its scheduler: that must cost nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: list[tuple[bool, int, float]] = []

    def add(self, loaded: bool, pages: int, nbytes: int, seconds: float) -> None:
        """Some pages came from the store, or went there."""
        with self._lock:
            self._moved.append((loaded, pages, nbytes / _GIB / max(seconds, 1e-9)))

    def take(self) -> Any:
        """SGLang's record of them; None when there are none."""
        if not self._moved:
            return None
        with self._lock:
            moved, self._moved = self._moved, []
        pages: tuple[list[int], list[int]] = ([], [])
        speeds: tuple[list[float], list[float]] = ([], [])
        for loaded, count, speed in moved:
            pages[not loaded].append(count)
            speeds[not loaded].append(speed)
        return _compat.storage_metrics(*pages, *speeds)


class Exporter:
    """Every number as `sglang:` plus its name, in the registry of this process, which SGLang's `/metrics` gathers.

    Each rank has numbers of its own, told apart by the labels `tp_rank` and `pp_rank`.

    Args:
        failed: is told of an error, which is no fault of whoever has moved pages.
    """

    def __init__(
        self,
        numbers: Callable[[], Mapping[str, float]],
        labels: Mapping[str, str],
        failed: Callable[[Exception], None],
    ) -> None:
        self._numbers = numbers
        self._labels = dict(labels)
        self._failed = failed
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()
        self._due = 0.0
        self._timing = threading.Lock()
        self._timer: threading.Timer | None = None

    def update(self) -> None:
        """Hand over what has changed, now or when that is due. Cheap, and called by whoever has moved pages."""
        early_s = self._due - time.monotonic()
        if early_s > 0 or not self._lock.acquire(blocking=False):
            self._later(max(early_s, 0.0))
            return
        try:
            self._due = time.monotonic() + PERIOD_S
            for sample, value in self._numbers().items():
                self._hand_over(sample, value)
        except Exception as error:
            self._failed(error)
        finally:
            self._lock.release()

    def _later(self, seconds: float) -> None:
        with self._timing:
            if self._timer is None:
                self._timer = threading.Timer(seconds, self._due_now)
                self._timer.daemon = True
                self._timer.start()

    def _due_now(self) -> None:
        with self._timing:
            self._timer = None
        self.update()

    def _hand_over(self, sample: str, value: float) -> None:
        change = value - self._last.get(sample, 0.0)
        if not change:
            return
        self._last[sample] = value
        name, labels = split_sample(sample)
        counts = name.endswith(_COUNTERS)
        with _making:
            metric = _metrics.get(name)
            if metric is None:
                metric = _metrics[name] = self._make(name, counts, (*self._labels, *labels))
        child = metric.labels(*self._labels.values(), *labels.values())
        if counts:
            child.inc(change)
        else:
            child.set(value)

    def _make(self, name: str, counts: bool, labels: tuple[str, ...]) -> Any:
        from prometheus_client import Counter, Gauge

        shown, text = f"sglang:{name.removesuffix('_total')}", "kvcore: see its documentation."
        if counts:
            return Counter(shown, text, labels)
        return Gauge(shown, text, labels, multiprocess_mode="mostrecent")


def split_sample(sample: str) -> tuple[str, dict[str, str]]:
    """Name and labels of `name{label="value"}`."""
    name, _, labels = sample.partition("{")
    return name, dict(_LABEL.findall(labels))
