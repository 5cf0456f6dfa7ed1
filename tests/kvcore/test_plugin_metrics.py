"""A plugin's own numbers: on `/metrics` beside kvcore's, by names of its own, and never too many of them."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
        assert found[f'kvcore_plugin_my_store__objects_total{{{where},size="large"}}'] == 3
        assert found[f"kvcore_plugin_my_store__held{{{where}}}"] == 3
        assert found[f"kvcore_plugin_my_store__seconds_sum{{{where}}}"] >= 0.5
    text = engine.metrics_text()
    assert "# HELP kvcore_plugin_my_store__objects_total Objects written" in text
    assert "kvcore_stored_chunks_total 3" in text


def test_another_cache_counts_for_itself(opened: Callable[[str], CacheEngine]) -> None:
    first, second = opened("[{storage: my-store}]"), opened("[{storage: my-store}]")
    put(first, first.register(spec()), hashes(3))
    put(second, second.register(spec()), hashes(1))
    name = 'kvcore_plugin_my_store__held{place="l2[0].storage"}'
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
    found = {k: v for k, v in metrics.values().items() if k.startswith("kvcore_plugin_p__asked")}
    assert len(found) == MAX_SERIES + 1
    assert found['kvcore_plugin_p__asked_total{place="here",who="other",how="other"}'] == 2 * MAX_SERIES
    assert found['kvcore_plugin_p__asked_total{place="here",who="user 0",how="0"}'] == 6
    assert sum(found.values()) == 3 * MAX_SERIES + 5


def test_values_of_labels_are_fit_to_be_shown() -> None:
    metrics, own = of_plugin()
    own.gauge("state", "State", "what")(1, 'a"b\\c\nd\u00fc' + "x" * 100)
    (name,) = [k for k in metrics.values() if k.startswith("kvcore_plugin")]
    assert name == f'kvcore_plugin_p__state{{place="here",what="a_b_c_d_{"x" * 56}"}}'


@pytest.mark.parametrize(
    "words",
    [
        ("Big",),
        ("",),
        ("1st",),
        ("a-b",),
        ("a__b",),
        ("a_",),
        ("asked_total",),
        ("x_count",),
        (None,),
        ("ok", "place"),
        ("ok", "le"),
        ("ok", ["a", "b"]),
    ],
    ids=str,
)
def test_names_are_checked_also_where_nothing_is_kept(words: tuple[Any, ...]) -> None:
    for own in (of_plugin()[1], context().metrics):
        with pytest.raises(PluginError, match="cannot be the name of a metric or of its label"):
            own.counter(words[0], "Help", *words[1:])


@pytest.mark.parametrize("text", [None, b"Help", "bad \ud800 text"], ids=["none", "bytes", "surrogate"])
def test_a_help_text_is_text(text: Any) -> None:
    metrics, own = of_plugin()
    for some in (own, context().metrics):
        with pytest.raises(PluginError, match=r"the metric 'n' needs a help text, not .*(None|Help|ud800)"):
            some.counter("n", text)
    own.counter("n", "H\u00f6he \\ two\nlines")(1)
    assert "kvcore_plugin_p__n_total Höhe \\\\ two\\nlines" in metrics.text()


def test_a_label_given_twice_is_refused() -> None:
    for some in (of_plugin()[1], context().metrics):
        with pytest.raises(PluginError, match="the metric 'd' has a label twice: 'x', 'y', 'x'"):
            some.counter("d", "Help", "x", "y", "x")


def test_the_names_of_two_plugins_never_meet() -> None:
    metrics = Metrics()
    PluginMetrics("a", "hooks[0]", metrics.registry).counter("b_x", "Of a", "tier")(1, "l1")
    PluginMetrics("a-b", "hooks[1]", metrics.registry).gauge("x", "Of a-b")(2)
    found = {k: v for k, v in metrics.values().items() if "plugin" in k}
    assert found == {
        'kvcore_plugin_a__b_x_total{place="hooks[0]",tier="l1"}': 1,
        'kvcore_plugin_a_b__x{place="hooks[1]"}': 2,
    }


@pytest.mark.parametrize(("kind", "labels"), [("gauge", ("who",)), ("counter", ()), ("counter", ("how",))], ids=str)
def test_one_name_is_one_kind_with_the_same_labels(kind: str, labels: tuple[str, ...]) -> None:
    metrics, own = of_plugin()
    for first, second in ((own, PluginMetrics("p", "there", metrics.registry)), (context().metrics,) * 2):
        first.counter("k", "Help", "who")
        with pytest.raises(PluginError, match=r"p?__k cannot be a .* is a counter of .* with the labels \['who'\]"):
            getattr(second, kind)("k", "Help", *labels)
        second.counter("k", "Help", "who")(1, "me")
    assert metrics.values()['kvcore_plugin_p__k_total{place="there",who="me"}'] == 1


def test_plugins_whose_names_are_written_alike_do_not_share_a_metric() -> None:
    metrics = Metrics()
    PluginMetrics("a.b", "hooks[0]", metrics.registry).counter("x", "Help")
    with pytest.raises(PluginError, match=r"cannot be a counter of the plugin 'a-b' .* of the plugin 'a.b'"):
        PluginMetrics("a-b", "hooks[1]", metrics.registry).counter("x", "Help")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise self


class Evil:
    def __str__(self) -> str:
        raise Unprintable


@pytest.mark.parametrize(
    ("kind", "given", "why"),
    [
        ("counter", (-1, "me"), "-1.0 cannot be added"),
        ("counter", (float("nan"), "me"), "nan cannot be added"),
        ("histogram", (float("inf"), "me"), "inf cannot be added"),
        ("counter", ("5", "me"), "TypeError"),
        ("gauge", ("5", "me"), "TypeError"),
        ("histogram", (None, "me"), "TypeError"),
        ("gauge", (10**400, "me"), "OverflowError"),
        ("counter", (1,), r"0 values for the labels \['who'\]"),
        ("counter", (1, "me", "you"), r"2 values for the labels \['who'\]"),
        ("counter", (1, Evil()), "Unprintable"),
    ],
    ids=["negative", "nan", "inf", "text", "text-gauge", "none", "huge", "few", "many", "evil"],
)
def test_a_wrong_call_is_left_out_and_logged_once(
    kind: str, given: tuple[Any, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, own = of_plugin()
    call = getattr(own, kind)("asked", "Questions", "who")
    call(1, "me")
    before = metrics.values()
    for _ in range(3):
        call(*given)
    assert metrics.values() == before
    (line,) = caplog.messages
    assert re.search(f"^kvcore_plugin_p__asked: a call from here is left out: .*{why}", line)
    call(2, "me")
    assert metrics.values() != before


def test_outside_a_cache_nothing_is_kept() -> None:
    for some in (Context(), context(), Registry().context("l2[0].storage")):
        some.metrics.counter("a", "Help", "who")(1, "me")
        some.metrics.gauge("b", "Help")(2)
        some.metrics.histogram("c", "Help")(0.1)
