"""What is known of a cache at one time, and the figures that two such times make."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore.api.errors import KVCoreError

if TYPE_CHECKING:
    from kvcore.service.inspect import Cache

WINDOW_S = 10.0
"""Rates are those of so long a time before now."""
NOW = 1e15
"""Later than any time: only the state of now is asked for."""
Numbers = Mapping[str, float]


class Sample(NamedTuple):
    """One cache at one time. `fault`: why it could not be asked, or not for all of it."""

    label: str
    status: dict[str, Any] | None
    figures: "Figures | None"
    hot: dict[str, Any] | None
    fault: str = ""


@dataclass(frozen=True)
class Figures:
    """What happened in a time, in all or per second. Objects are chunks of one KV group.

    Args:
        seconds: the time. 0 when only the sums since the cache was opened are known.
        asked: objects that were asked for.
        hits: where those that were found lay -> how many of them.
        misses: why others were not found -> how many of them.
        tiers: tier -> what went through it.
    """

    seconds: float
    lookups: float = 0.0
    lookup_seconds: float = 0.0
    asked: float = 0.0
    hits: dict[str, float] = field(default_factory=dict)
    misses: dict[str, float] = field(default_factory=dict)
    saved_tokens: float = 0.0
    saved_seconds: float = 0.0
    stored: float = 0.0
    evicted: float = 0.0
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Of what was asked for, the share that was found."""
        return sum(self.hits.values()) / self.asked if self.asked else None

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**self.__dict__, "hit_rate": self.hit_rate}


def figures(now: Numbers, before: Numbers, seconds: float) -> Figures:
    """From the sums at two times."""
    grown = {name: value - before.get(name, 0.0) for name, value in now.items()}
    tiers: dict[str, dict[str, float]] = {}
    for name, value in grown.items():
        metric, *labels = name.split("/")
        if metric in ("tier_bytes", "tier_seconds"):
            tiers.setdefault(labels[0], {})[f"{labels[1]}_{metric[5:]}"] = value
        elif metric == "tier_operations" and labels[2] not in ("ok", "missing"):
            faults = tiers.setdefault(labels[0], {})
            faults["faults"] = faults.get("faults", 0.0) + value
        elif metric == "tier_dropped":
            dropped = tiers.setdefault(labels[0], {})
            dropped["dropped"] = dropped.get("dropped", 0.0) + value
    return Figures(
        seconds=seconds,
        lookups=grown.get("lookups", 0.0),
        lookup_seconds=grown.get("lookup_seconds", 0.0),
        asked=grown.get("lookup_chunks", 0.0),
        hits=_of("hit_chunks", grown),
        misses=_of("miss_chunks", grown),
        saved_tokens=grown.get("hit_tokens", 0.0),
        saved_seconds=sum(_of("saved_prefill_seconds", grown).values()),
        stored=grown.get("stored_chunks", 0.0),
        evicted=grown.get("evicted_objects", 0.0),
        tiers=tiers,
    )


def _of(metric: str, numbers: Numbers) -> dict[str, float]:
    """Label -> value, of those that are not 0."""
    begin = f"{metric}/"
    return {name[len(begin) :]: value for name, value in numbers.items() if name.startswith(begin) and value}


class Watch:
    """Asks one cache again and again.

    Attributes:
        total: the figures since the cache was opened, as last asked.
        tenant_bytes: tenant and place -> bytes.
    """

    def __init__(self, cache: "Cache") -> None:
        self.cache = cache
        self.total = Figures(0.0)
        self.tenant_bytes: dict[str, float] = {}
        self._points: deque[tuple[float, Numbers]] = deque()

    def sample(self) -> Sample:
        """Ask. Never raises for a cache that is gone or refuses."""
        from kvcore.service.inspect import Refusal, ask

        label = self.cache.label
        try:
            status = ask(self.cache, "/status")
            self._take(ask(self.cache, f"/history?since={NOW if self._points else 0.0}"))
        except KVCoreError as error:
            return Sample(label, None, None, None, str(error))
        except (KeyError, TypeError, ValueError) as error:
            return Sample(label, None, None, None, f"its answer is not understood: {type(error).__name__}: {error}")
        hot, fault = None, ""
        try:
            hot = ask(self.cache, "/hot?limit=10")
        except Refusal as error:  # such as a server's that wants its token for that
            fault = str(error)
        except KVCoreError as error:
            return Sample(label, None, None, None, str(error))
        return Sample(label, status, self._window(), hot, fault)

    def _take(self, history: Mapping[str, Any]) -> None:
        series = history["series"]
        for i, at in enumerate(history["times"]):
            self._points.append((at, {name: values[i] for name, values in series.items() if values[i] is not None}))
        now = self._points[-1]
        while len(self._points) > 2 and self._points[1][0] <= now[0] - WINDOW_S:
            self._points.popleft()
        self.total = figures(now[1], {}, 0.0)
        self.tenant_bytes = _of("tenant_bytes", now[1])

    def _window(self) -> Figures:
        (before, numbers), (at, now) = self._points[0], self._points[-1]
        return figures(now, numbers, at - before) if at > before else Figures(0.0)
