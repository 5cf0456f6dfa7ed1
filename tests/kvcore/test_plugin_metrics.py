"""A plugin's own numbers: on `/metrics` beside kvcore's, by names of its own, and never too many of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcore.api import Context, PluginError, PluginMetrics
from kvcore.api.metrics import MAX_SERIES
from kvcore.engine import CacheEngine
from kvcore.observe import Metrics
from kvcore.plugins import Registry
from kvcore.testing import context, dist
from kvcore.testing.chunks import hashes, put, spec

STORAGE = """
from kvcore.api import ApiVersion, BlockingStorage, Component, MISSING, STORED, hookimpl

class Counting(BlockingStorage):
    def __init__(self, config, context):
        self._keys = set()
        self._wrote = context.metrics.counter("objects", "Objects written", "size")
        self._held = context.metrics.gauge("held", "Objects held")
        self._took = context.metrics.histogram("seconds", "Time of a write")
    def exists(self, keys):
        return [k in self._keys for k in keys]
    def load(self, items):
        return [MISSING] * len(items)
    def store(self, items):
        for item in items:
            self._keys.add(item.key)
            self._wrote(1, "large" if item.nbytes > 4096 else "small")
        self._held(len(self._keys))
        self._took(0.5)
        return [STORED] * len(items)
    def delete(self, keys):
        pass

@hookimpl
def kvcore_storage():
    return Component(api=ApiVersion(1, 0), factory=Counting)
"""


@pytest.fixture
def opened(site: Path, tmp_path: Path) -> Iterator[Callable[[str], CacheEngine]]:
    """Opens a cache with these tiers."""
    dist(site, "acme", {"kvcore.storage": {"my-store": "fake_counting"}}, {"fake_counting": STORAGE})
    engines: list[CacheEngine] = []

    def make(tiers: str) -> CacheEngine:
        path = tmp_path / "kvcore.yaml"
        path.write_text(f"l1: {{size: 8MiB}}\nmin_object_size: 128KiB\nl2: {tiers}\n")
        engines.append(CacheEngine.open(str(path)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_they_stand_beside_kvcores_own_told_apart_by_place(opened: Callable[[str], CacheEngine]) -> None:
    engine = opened("[{name: a, storage: my-store}, {name: b, storage: my-store}]")
    put(engine, engine.register(spec()), hashes(3))
    found = engine.stats()
    for i in range(2):
        where = f'place="l2[{i}].storage"'
        assert found[f'kvcore_plugin_my_store_objects_total{{{where},size="large"}}'] == 3
        assert found[f"kvcore_plugin_my_store_held{{{where}}}"] == 3
        assert found[f"kvcore_plugin_my_store_seconds_sum{{{where}}}"] >= 0.5
    text = engine.metrics_text()
    assert "# HELP kvcore_plugin_my_store_objects_total Objects written" in text
    assert "kvcore_stored_chunks_total 3" in text


def test_another_cache_counts_for_itself(opened: Callable[[str], CacheEngine]) -> None:
    first, second = opened("[{storage: my-store}]"), opened("[{storage: my-store}]")
    put(first, first.register(spec()), hashes(3))
    put(second, second.register(spec()), hashes(1))
    name = 'kvcore_plugin_my_store_held{place="l2[0].storage"}'
    assert (first.stats()[name], second.stats()[name]) == (3, 1)


def of_plugin(plugin: str = "p") -> tuple[Metrics, PluginMetrics]:
    metrics = Metrics()
    return metrics, PluginMetrics(plugin, "here", metrics.registry)


def test_the_number_of_series_is_bounded() -> None:
    metrics, own = of_plugin()
    count = own.counter("asked", "Questions", "who", "how")
    for i in range(3 * MAX_SERIES):
        count(1, f"user {i}", i % 2)
    count(5, "user 0", 0)  # one of the first is still itself
    found = {k: v for k, v in metrics.values().items() if k.startswith("kvcore_plugin_p_asked")}
    assert len(found) == MAX_SERIES + 1
    assert found['kvcore_plugin_p_asked_total{place="here",who="other",how="other"}'] == 2 * MAX_SERIES
    assert found['kvcore_plugin_p_asked_total{place="here",who="user 0",how="0"}'] == 6
    assert sum(found.values()) == 3 * MAX_SERIES + 5


def test_values_of_labels_are_fit_to_be_shown() -> None:
    metrics, own = of_plugin()
    own.gauge("state", "State", "what")(1, 'a"b\\c\nd\u00fc' + "x" * 100)
    (name,) = [k for k in metrics.values() if k.startswith("kvcore_plugin")]
    assert name == f'kvcore_plugin_p_state{{place="here",what="a_b_c_d_{"x" * 56}"}}'


@pytest.mark.parametrize(
    "words", [("Big",), ("",), ("1st",), ("a-b",), ("asked_total",), ("x_count",), ("ok", "place"), ("ok", "le")]
)
def test_names_are_checked_also_where_nothing_is_kept(words: tuple[str, ...]) -> None:
    for own in (of_plugin()[1], context().metrics):
        with pytest.raises(PluginError, match="cannot be the name of a metric or of its label"):
            own.counter(words[0], "Help", *words[1:])


def test_the_wrong_number_of_labels_is_the_plugins_error() -> None:
    count = of_plugin()[1].counter("asked", "Questions", "who")
    with pytest.raises(ValueError, match="label"):
        count(1)


def test_outside_a_cache_nothing_is_kept() -> None:
    for some in (Context(), context(), Registry().context("l2[0].storage")):
        some.metrics.counter("a", "Help", "who")(1, "me")
        some.metrics.gauge("b", "Help")(2)
        some.metrics.histogram("c", "Help")(0.1)
