"""Observers and wrappers."""

import logging

import pytest

from kvcore.api import ConfigError, EvictionPolicy, ObjectEvent, PluginError
from kvcore.config import load_config
from kvcore.plugins import Hooks, PluginSpec, Registry
from kvcore.testing import dist

EVENT = ObjectEvent("key", "l1", 10)


def hooks(site, source, names=("watch",), **modules):
    points = {"kvcore.hooks": {"watch": "fake_watch", **{name: f"fake_{name}" for name in modules}}}
    sources = {"fake_watch": source, **{f"fake_{name}": text for name, text in modules.items()}}
    dist(site, "kvcore-watch", points, sources)
    registry = Registry()
    return registry, registry.use_hooks(names)


OBSERVER = """
from kvcore.api import hookimpl
seen = []
@hookimpl
def kvcore_opened(name): seen.append(("opened", name))
@hookimpl
def kvcore_stored(events): seen.append(("stored", list(events)))
@hookimpl
def kvcore_failed(): seen.append(("failed",))
"""


def test_observers_get_batches(site):
    _, found = hooks(site, OBSERVER)
    import fake_watch

    found.opened("engine")
    found.stored([EVENT, EVENT])
    found.stored([])
    found.loaded([EVENT])
    found.failed([EVENT])
    found.closed("engine")
    assert fake_watch.seen == [("opened", "engine"), ("stored", [EVENT, EVENT]), ("failed",)]
    assert found.listens("stored")
    assert not found.listens("loaded")


def test_an_observer_that_raises_is_logged_once_and_hurts_nobody(site, caplog):
    bad = "from kvcore.api import hookimpl\n@hookimpl\ndef kvcore_stored(events):\n    raise RuntimeError('no')\n"
    _, found = hooks(site, OBSERVER, ("bad", "watch"), bad=bad)
    import fake_watch

    with caplog.at_level(logging.ERROR, "kvcore"):
        for _ in range(3):
            found.stored([EVENT])
    assert len(fake_watch.seen) == 3
    assert [r.getMessage() for r in caplog.records] == [
        "hooks plugin bad (kvcore-watch 1.0) raised in kvcore_stored; later ones are not logged"
    ]


def test_no_hooks_cost_nothing_and_do_nothing():
    found = Hooks()
    found.opened("x")
    found.stored([EVENT])
    assert found.wrap("storage", "memory", 3) == 3


WRAPPER = """
from kvcore.api import hookimpl, EvictionPolicy
class Named(EvictionPolicy):
    def __init__(self, inner): self.inner = inner
    def insert(self, keys, sizes): self.inner.insert(keys, sizes)
    def touch(self, keys): self.inner.touch(keys)
    def remove(self, keys): self.inner.remove(keys)
    def evict(self, nbytes, pinned): return self.inner.evict(nbytes, pinned)
    def __len__(self): return len(self.inner)
    tag = "{tag}"
@hookimpl
def kvcore_wrap(kind, name, component):
    return Named(component) if (kind, name) == ("eviction", "lru") else None
"""


def test_wrappers_decorate_in_the_order_of_the_list(site):
    registry, _ = hooks(
        site, WRAPPER.replace("{tag}", "inner"), ("watch", "outer"), outer=WRAPPER.replace("{tag}", "outer")
    )
    made = registry.create("eviction", PluginSpec("lru"))
    assert (made.tag, made.inner.tag) == ("outer", "inner")
    assert type(made.inner.inner) is type(Registry().create("eviction", PluginSpec("lru")))
    assert not hasattr(registry.create("eviction", PluginSpec("fifo")), "tag")
    assert isinstance(made, EvictionPolicy)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 3", "wrapped eviction 'lru' in a int: return a EvictionPolicy"),
        ("raise ValueError('no key')", "failed to wrap eviction 'lru': ValueError: no key"),
    ],
)
def test_a_wrapper_that_fails_is_an_error(site, body, says):
    source = f"from kvcore.api import hookimpl\n@hookimpl\ndef kvcore_wrap(kind, name, component):\n    {body}\n"
    registry, _ = hooks(site, source)
    with pytest.raises(PluginError, match=says):
        registry.create("eviction", PluginSpec("lru"))


def test_a_wrapper_keeps_the_declared_traits(site):
    source = """
    from kvcore.api import hookimpl
    @hookimpl
    def kvcore_wrap(kind, name, component):
        kind_of = type(component)
        return type("Other", (kind_of,), {"lossy": True})(None, None)
    """
    registry, _ = hooks(site, source)
    with pytest.raises(PluginError, match="changed its 'lossy' from False to True"):
        registry.create("serde", PluginSpec("raw"))


def test_wrong_lists_of_hooks(site):
    registry, _ = hooks(site, OBSERVER)
    with pytest.raises(PluginError, match=r"no hooks plugin is named 'wotch'\. Did you mean 'watch'"):
        registry.use_hooks(["wotch"])
    with pytest.raises(PluginError, match="listed twice"):
        registry.use_hooks(["watch", "watch"])
    with pytest.raises(PluginError, match="offers no component"):
        registry.component("hooks", "watch")


def test_a_misspelt_observer(site):
    with pytest.raises(PluginError, match="did you mean kvcore_stored"):
        hooks(site, OBSERVER.replace("def kvcore_stored", "def kvcore_storred"))


WITH_OPTIONS = """
from kvcore.api import ApiVersion, Component, PluginConfig, hookimpl
made = []
class Options(PluginConfig):
    word: str = "plain"
class Observer:
    def __init__(self, config, context): made.append(self); self.word, self.heard = config.word, []
    @hookimpl
    def kvcore_stored(self, events): self.heard += events
@hookimpl
def kvcore_observer(): return Component(api=ApiVersion(1, 0), factory=Observer, config=Options)
"""


def test_an_observer_may_have_options(site):
    registry, found = hooks(site, WITH_OPTIONS, [PluginSpec("watch", {"word": "chosen"})])
    import fake_watch

    found.stored([EVENT])
    assert [(o.word, o.heard) for o in fake_watch.made] == [("chosen", [EVENT])]
    registry.use_hooks(["watch"])  # another cache: another observer
    assert [(o.word, o.heard) for o in fake_watch.made[1:]] == [("plain", [])]
    with pytest.raises(ConfigError, match=r"hooks\[0\]: wrod: "):
        registry.use_hooks([PluginSpec("watch", {"wrod": "x"}, "hooks[0]")])


def test_options_in_a_file_are_checked_with_their_place(site, tmp_path):
    registry, _ = hooks(site, WITH_OPTIONS, [])
    file = tmp_path / "kvcore.yaml"
    file.write_text("hooks:\n  - {plugin: watch, word: here}\n")
    config = load_config(file, env={}, registry=registry)
    assert [(s.plugin, s.options.word) for s in config.hooks] == [("watch", "here")]
    assert [(r.path, r.value) for r in config.rows() if "hooks" in r.path] == [
        ("hooks[0]", "watch"),
        ("hooks[0].word", "here"),
    ]
    file.write_text("hooks:\n  - {plugin: watch, word: 3}\n  - watch\n  - {plugin: nobody}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file, env={}, registry=registry)
    assert [f.path for f in raised.value.faults] == ["hooks[0].word", "hooks[1]", "hooks[2]"]


def test_options_for_a_hook_that_has_none(site):
    with pytest.raises(ConfigError, match="has no options, given word"):
        hooks(site, OBSERVER, [PluginSpec("watch", {"word": "x"}, "hooks[0]")])


def test_an_observer_without_a_hook_is_an_error(site):
    with pytest.raises(PluginError, match="implements no hook"):
        hooks(site, WITH_OPTIONS.replace("    @hookimpl\n", ""))


def test_an_observer_of_the_process_itself_hears_the_same(site):
    _, found = hooks(site, OBSERVER)

    class Own:
        heard: list[object] = []

        def stored(self, events):
            self.heard += events

    assert not found.listens("evicted")
    found.add("own", Own())
    found.stored([EVENT])
    import fake_watch

    assert fake_watch.seen == [("stored", [EVENT])]
    assert Own.heard == [EVENT]
