"""Numbers of a plugin's own, on `/metrics` beside kvcore's."""

import re
from collections.abc import Callable
from typing import Any

from kvcore.api.errors import PluginError

MAX_SERIES = 100
"""Of one metric: combinations of its labels' values beyond that are counted together, as `other`."""
_NAME = re.compile(r"(?!.*_(total|sum|count|bucket|created)$)[a-z][a-z0-9_]*")
_UNFIT = re.compile(r'[^ -~]|["\\]')


class PluginMetrics:
    """What a component counts, as `context.metrics`. A metric `retries` of the plugin `my-store` is
    `kvcore_plugin_my_store_retries`, with the labels that it is made with and `place`, where the component stands in
    the configuration. Make them in the constructor.

    What is returned is called with a number and with the labels' values, from any thread. Outside a cache, as in tests
    and under `kvcore store`, nothing is kept. Raises `PluginError` for a name that no metric or label can have.
    """

    def __init__(self, plugin: str = "", place: str = "", registry: Any = None) -> None:
        self._prefix, self._place, self._registry = f"kvcore_plugin_{plugin.replace('-', '_')}_", place, registry

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
        if unfit := [word for word in (name, *labels) if not _NAME.fullmatch(word) or word in ("place", "le")]:
            rule = (
                "lowercase letters, digits and _, a letter first; no _total, _sum, _count, _bucket or _created behind"
            )
            raise PluginError(f"{', '.join(map(repr, unfit))} cannot be the name of a metric or of its label: {rule}")
        if self._registry is None:
            return lambda number, *values: None
        import prometheus_client

        full, kept = self._prefix + name, self._registry.plugins
        if full not in kept:
            family = getattr(prometheus_client, kind)(full, text, ("place", *labels), registry=self._registry)
            kept[full] = family, {}
        family, series = kept[full]

        def note(number: float, *values: object) -> None:
            key = (self._place, *(_UNFIT.sub("_", str(value))[:64] for value in values))
            if key not in series and len(series) >= MAX_SERIES:
                key = (self._place, *("other" for _ in values))
            child = series.get(key) or series.setdefault(key, family.labels(*key))
            getattr(child, call)(number)

        return note
