"""Numbers of a plugin's own, on `/metrics` beside kvcore's."""

import re
from collections.abc import Callable
from math import inf
from traceback import format_exception_only
from typing import Any

from kvcore.api.errors import PluginError
from kvcore.api.units import brief

MAX_SERIES = 100
"""Of one metric: combinations of its labels' values beyond that are counted together, as `other`."""
_NAME = re.compile(r"(?!.*_(total|sum|count|bucket|created)$)[a-z][a-z0-9]*(_[a-z0-9]+)*")
_UNFIT = re.compile(r'[^ -~]|["\\]')


class PluginMetrics:
    """What a component counts, as `context.metrics`. A metric `retries` of the plugin `my-store` is
    `kvcore_plugin_my_store__retries`, with the labels that it is made with and `place`, where the component stands in
    the configuration: two of one plugin share the metric, told apart by their place. Make them in the constructor.

    What is returned is called with a number and with the labels' values, from any thread. It never raises: a call with
    a number that cannot be counted, or with too many or too few values, is left out, and logged at most once a minute.
    Outside a cache, as in tests and under `kvcore store`, nothing is kept.

    Raises `PluginError` for a name that no metric or label can have, a label given twice, a help text that is none, and
    a name that is taken by a metric of another kind, or with other labels.
    """

    def __init__(self, plugin: str = "", place: str = "", registry: Any = None) -> None:
        self._plugin, self._place, self._registry = plugin, place, registry
        # A metric's name has no two _ in a row, so `x` of the plugin `a-b` is never `b_x` of the plugin `a`.
        self._prefix = f"kvcore_plugin_{re.sub('[^a-zA-Z0-9]', '_', plugin)}__"
        self._kept: dict[str, Any] = {} if registry is None else registry.plugins

    def counter(self, name: str, text: str, *labels: str) -> Callable[..., None]:
        """`count(1, *values)` adds to what only grows. Its name gets a `_total`."""
        return self._metric("Counter", "inc", name, text, labels)

    def gauge(self, name: str, text: str, *labels: str) -> Callable[..., None]:
        """`say(number, *values)` sets it."""
        return self._metric("Gauge", "set", name, text, labels)

    def histogram(self, name: str, text: str, *labels: str) -> Callable[..., None]:
        """`took(seconds, *values)` adds an observation."""
        return self._metric("Histogram", "observe", name, text, labels)

    def _metric(self, kind: str, call: str, name: str, text: str, labels: tuple[str, ...]) -> Callable[..., None]:
        _check(name, text, labels)
        full, made = self._prefix + name, (kind, self._plugin, labels)
        if full not in self._kept:
            self._kept[full] = made, self._family(kind, full, text, labels), {}
        other, family, series = self._kept[full]
        if other != made:
            raise PluginError(f"{full} cannot be {_said(*made)}, for it is {_said(*other)}: one needs another name")
        if family is None:
            return lambda number, *values: None

        def note(number: float, *values: object) -> None:
            try:
                number = float(number + 0)  # which text has not
                if kind != "Gauge" and not 0 <= number < inf:  # a sum would never be right again
                    raise ValueError(f"{number} cannot be added to it")
                if len(values) != len(labels):
                    raise ValueError(f"{len(values)} values for the labels {list(labels)}")
                key = (self._place, *(_UNFIT.sub("_", str(value))[:64] for value in values))
                if key not in series and len(series) >= MAX_SERIES:
                    key = (self._place, *("other" for _ in values))
                child = series.get(key) or series.setdefault(key, family.labels(*key))
                getattr(child, call)(number)
            except Exception as error:  # the plugin's work must not fail for a number, nor flood the log
                why = "".join(format_exception_only(error)).strip()  # also of an error that cannot be printed
                self._registry.log.warning(full, f"{full}: a call from {self._place} is left out: {why}")

        return note

    def _family(self, kind: str, full: str, text: str, labels: tuple[str, ...]) -> Any:
        if self._registry is None:
            return None
        import prometheus_client

        return getattr(prometheus_client, kind)(full, text, ("place", *labels), registry=self._registry)


def _check(name: object, text: object, labels: tuple[object, ...]) -> None:
    """Raises `PluginError` for what would end in an exposition that cannot be made or read."""
    for word in (name, *labels):
        if not isinstance(word, str) or not _NAME.fullmatch(word) or word in ("place", "le"):
            raise PluginError(
                f"{brief(word)} cannot be the name of a metric or of its label: lowercase letters, digits and single _ "
                "between them, a letter first; no _total, _sum, _count, _bucket or _created behind; not place, not le"
            )
    if len(set(labels)) < len(labels):
        raise PluginError(f"the metric {name!r} has a label twice: {', '.join(map(repr, labels))}")
    try:
        if not isinstance(text, str):
            raise TypeError(f"it is a {type(text).__name__}")
        text.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise PluginError(f"the metric {name!r} needs a help text, not {brief(text)}: {error}") from None


def _said(kind: str, plugin: str, labels: tuple[str, ...]) -> str:
    return f"a {kind.lower()} of the plugin {plugin!r} with the labels {list(labels)}"
