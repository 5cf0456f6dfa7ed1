"""Discovery from metadata, selection, and every way in which a plugin can be wrong."""

import sys
from pathlib import Path

import pytest
from plugin_samples import storage

from kvcore import __version__
from kvcore.api import BlockingStorage, ConfigError, Context, EvictionPolicy, PluginError
from kvcore.plugins import PluginSpec, Registry, plugin_lists, registry_from_env
from kvcore.plugins.known import BUILTINS
from kvcore.testing import dist, installed


def acme(site: Path, source: str, **kwargs) -> Registry:
    """A registry that sees one distribution, kvcore-acme, with the storage plugin `acme`."""
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}}, {"fake_acme": source}, **kwargs)
    return Registry()


def refused(registry: Registry, name: str = "acme", kind: str = "storage") -> str:
    with pytest.raises(PluginError) as caught:
        registry.component(kind, name)
    return str(caught.value)


# --- discovery


def test_available_imports_nothing(site):
    registry = acme(site, "raise SystemExit('imported')")
    [info] = [i for i in registry.available("storage") if i.name == "acme"]
    assert info.as_dict() == {
        "kind": "storage",
        "name": "acme",
        "distribution": "kvcore-acme",
        "version": "1.0",
        "module": "fake_acme",
        "builtin": False,
        "status": "ready",
    }
    assert "fake_acme" not in sys.modules


def test_a_selected_plugin_is_imported_once_and_made(site):
    registry = acme(site, storage())
    spec = PluginSpec("acme", {"bucket": "b"}, "l2[0].storage")
    made = registry.create("storage", spec, Context(name="here"))
    assert isinstance(made, BlockingStorage)
    assert made.config.bucket == "b"
    assert made.config.part == 8 << 20
    assert made.context.name == "here"
    assert registry.component("storage", "acme") is registry.component("storage", "acme@kvcore-acme")


def test_options_already_validated_are_taken_as_they_are(site):
    registry = acme(site, storage())
    config = registry.config_model("storage", "acme")(bucket="x")
    assert registry.create("storage", PluginSpec("acme", config)).config is config


def test_raw_options_are_validated(site):
    with pytest.raises(ConfigError, match=r"l2\[0\].storage: buckt: Extra inputs"):
        acme(site, storage()).create("storage", PluginSpec("acme", {"buckt": "b"}, "l2[0].storage"))


def test_the_same_distribution_twice_on_the_path_is_no_clash(site, tmp_path):
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}}, {"fake_acme": storage("first")})
    with installed(tmp_path / "other") as other:
        dist(other, "kvcore_acme", {"kvcore.storage": {"acme": "fake_acme"}}, {"fake_acme": storage("second")})
        registry = Registry()
        assert [i.status for i in registry.available("storage") if i.name == "acme"] == ["ready"]
        assert registry.create("storage", PluginSpec("acme", {"bucket": "b"})).label == "second"  # first on the path


def test_broken_metadata_of_others_is_passed_over(site):
    registry = acme(site, storage())
    nameless = site / "broken-1.0.dist-info"
    nameless.mkdir()
    (nameless / "METADATA").write_text("")
    (nameless / "entry_points.txt").write_text("[kvcore.storage]\nx = y\n")
    binary = site / "binary-1.0.dist-info"
    binary.mkdir()
    (binary / "entry_points.txt").write_bytes(b"\xff\xfe[kvcore.storage]\nz = y\n")
    assert [i.name for i in registry.available("storage") if not i.builtin and i.module in ("y", "fake_acme")] == [
        "acme"
    ]
    text = "\n".join(registry.problems())
    assert "metadata of broken has no name or version" in text
    assert "metadata of binary cannot be read" in text


def test_an_unknown_group_is_reported(site):
    dist(site, "kvcore-acme", {"kvcore.storages": {"acme": "fake_acme"}})
    assert any("'kvcore.storages', which is no plugin kind" in p for p in Registry().problems())


def test_path_limits_the_search_and_a_source_tree_still_has_its_builtins(tmp_path):
    dist(tmp_path, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}})
    registry = Registry(path=[str(tmp_path)])
    assert [(i.name, i.builtin) for i in registry.available("storage")] == [
        ("acme", False),
        ("faulty", True),
        ("memory", True),
    ]
    assert {i.name for i in registry.available("eviction")} == set(BUILTINS["eviction"])
    assert [i.version for i in registry.available("keys")] == [__version__] * 2


def test_unknown_kind(site):
    with pytest.raises(PluginError, match="'storge' is no kind of plugin: the kinds are storage, serde"):
        Registry().available("storge")


# --- names


def test_an_unknown_name_gives_the_installed_the_nearest_and_the_command(tmp_path):
    dist(tmp_path, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}}, version="2.3")
    registry = Registry(path=[str(tmp_path)])
    text = refused(registry, "acmee")
    assert "no storage plugin is named 'acmee'" in text
    assert f"Installed: acme (kvcore-acme 2.3), faulty (kvcore {__version__}), memory (kvcore {__version__})" in text
    assert "Did you mean 'acme'?" in text
    assert "pip install" not in text
    assert "To get 'disk': pip install kvcore-disk" in refused(registry, "disk")
    assert "Did you mean 'mooncake'?" in refused(registry, "moncake")
    assert "pip install kvcore-mooncake" in refused(registry, "moncake")
    assert "pip install kvcore-zstd" in refused(registry, "zstd", "serde")
    assert "pip install kvcore-vllm" in refused(registry, "vllm", "engine")
    assert "another kind: eviction" in refused(registry, "lru", "serde")


def test_two_distributions_of_one_name(site):
    for name, version in (("kvcore-acme", "1.0"), ("other-acme", "2.0")):
        module = name.replace("-", "_") + "_m"
        dist(site, name, {"kvcore.storage": {"acme": module}}, {module: storage(name)}, version=version)
    registry = Registry()  # no error until it is selected
    assert [i.status for i in registry.available("storage") if i.name == "acme"] == ["clash", "clash"]
    text = refused(registry)
    assert "2 storage plugins are named 'acme': kvcore-acme 1.0 (kvcore_acme_m), other-acme 2.0 (other_acme_m)" in text
    assert "Write 'acme@kvcore-acme' or 'acme@other-acme'" in text
    made = registry.create("storage", PluginSpec("acme@Other_Acme", {"bucket": "b"}))
    assert made.label == "other-acme"
    assert "no storage plugin 'acme' comes from 'third'" in refused(registry, "acme@third")


def test_a_distribution_that_declares_a_name_twice(site):
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_a"}, "kvcore.serde": {}})
    points = site / "kvcore_acme-1.0.dist-info" / "entry_points.txt"
    points.write_text("[kvcore.storage]\nacme = fake_a\nacme = fake_b\n")
    assert "declares the name twice" in refused(Registry())
    points.write_text("[kvcore.storage]\nacme = fake_a\nacme = fake_a\n")
    assert len([i for i in Registry().available("storage") if i.name == "acme"]) == 1


def test_a_third_party_never_takes_a_builtin_name(site):
    dist(site, "kvcore-acme", {"kvcore.storage": {"memory": "fake_acme"}}, {"fake_acme": storage()})
    registry = Registry()
    assert registry.find("storage", "memory").distribution == "kvcore"
    assert registry.component("storage", "memory").config.__name__ == "MemoryConfig"
    assert [(i.distribution, i.status) for i in registry.available("storage") if i.name == "memory"] == [
        ("kvcore", "ready"),
        ("kvcore-acme", "reserved"),
    ]
    assert any("'memory' is a built-in of kvcore" in p and "kvcore-acme 1.0" in p for p in registry.problems())
    assert "such names are reserved" in refused(registry, "memory@kvcore-acme")
    assert "fake_acme" not in sys.modules


# --- versions


@pytest.mark.parametrize(
    "requirement", ["kvcore>=0.1,<1", "KVCore", "kvcore>=99; python_version < '3'", "kvcore>=99; extra == 'x'"]
)
def test_a_requirement_on_the_core_that_holds(site, requirement):
    acme(site, storage(), requires=[requirement, "not a requirement !", "other>=3"]).component("storage", "acme")


def test_a_requirement_on_the_core_that_fails_stops_the_import(site):
    registry = acme(site, storage(), requires=["kvcore>=99,<100"])
    text = refused(registry)
    assert "storage plugin 'acme' (kvcore-acme 1.0) needs kvcore<100,>=99" in text
    assert f"but this is kvcore {__version__}" in text
    assert "fake_acme" not in sys.modules


@pytest.mark.parametrize(
    ("api", "says"),
    [
        ("ApiVersion(2, 0)", "was built for storage API 2.0, but kvcore offers 1.0: pip install --upgrade kvcore"),
        ("ApiVersion(1, 1)", "was built for storage API 1.1, but kvcore offers 1.0: pip install --upgrade kvcore"),
        ("ApiVersion(0, 9)", "was built for storage API 0.9, but kvcore offers 1.0: pip install --upgrade kvcore-acme"),
        ("'1.0'", "declares api='1.0'"),
    ],
)
def test_built_for_another_api(site, api, says):
    assert says in refused(acme(site, storage().replace("ApiVersion(1, 0)", api)))


# --- broken plugins


def test_a_plugin_that_raises_on_import(site):
    text = refused(acme(site, "import math\n\n\nmath.sqrt('no')\n"))
    assert text.startswith("storage plugin 'acme' (kvcore-acme 1.0) cannot be imported: TypeError: must be real number")
    assert f"at {site / 'fake_acme.py'}:4" in text


def test_a_plugin_whose_dependency_is_missing(site):
    text = refused(
        acme(site, storage().replace("    return Component", "    import boto_of_acme\n    return Component"))
    )
    assert "failed in kvcore_storage(): ModuleNotFoundError: No module named 'boto_of_acme'" in text
    assert f"{site / 'fake_acme.py'}:" in text
    assert "'boto_of_acme' is not installed here" in text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("x = 1", "implements no hook"),
        ("def kvcore_storage():\n    pass", "implements no hook"),
    ],
)
def test_other_modules_that_are_no_plugins(site, source, says):
    assert says in refused(acme(site, source))


def test_an_entry_point_without_its_module(site):
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_gone.plugin", "bad": "not a module"}})
    assert "No module named 'fake_gone'" in refused(Registry())
    assert "cannot be imported" in refused(Registry(), "bad")


def test_a_misspelt_hook(site):
    text = refused(acme(site, storage().replace("def kvcore_storage", "def kvcore_storag")))
    assert "has a wrong hook: unknown hook 'kvcore_storag'" in text
    assert "did you mean kvcore_storage?" in text


def test_a_hook_with_a_wrong_argument(site):
    text = refused(acme(site, storage().replace("def kvcore_storage()", "def kvcore_storage(config)")))
    assert text.endswith("has a wrong hook: kvcore_storage has the unknown argument config: it takes no argument")


def test_an_observer_with_a_wrong_argument(site):
    code = "from kvcore.api import hookimpl\n@hookimpl\ndef kvcore_stored(events, tier, more=1): pass\n"
    dist(site, "kvcore-watch", {"kvcore.hooks": {"watch": "fake_watch"}}, {"fake_watch": code})
    with pytest.raises(PluginError) as caught:
        Registry().use_hooks(["watch"])
    assert str(caught.value).endswith("kvcore_stored has the unknown argument tier: it may take events")


def test_words_of_the_lists_that_mean_nothing_are_warned_of(caplog):
    env = {"KVCORE_BLOCK_PLUGINS": "dsik, memory", "KVCORE_ALLOW_PLUGINS": "KVCORE,lru@kvcore,acme@kvcore"}
    registry_from_env(env)
    assert [r.getMessage() for r in caplog.records] == [
        "KVCORE_BLOCK_PLUGINS: no installed plugin matches 'dsik'",
        "KVCORE_ALLOW_PLUGINS: no installed plugin matches 'acme@kvcore'",
    ]


def test_the_hook_of_another_kind(site):
    registry = acme(site, storage().replace("def kvcore_storage", "def kvcore_serde"))
    assert "does not implement kvcore_storage" in refused(registry)


def test_several_hooks_in_one_module(site):
    both = (
        storage() + "\n@hookimpl\ndef kvcore_eviction():\n    from kvcore.builtin.eviction_lru import kvcore_eviction\n"
    )
    both += "    return kvcore_eviction()\n"
    points = {"kvcore.storage": {"acme": "fake_acme"}, "kvcore.eviction": {"acme": "fake_acme"}}
    dist(site, "kvcore-acme", points, {"fake_acme": both})
    registry = Registry()
    assert registry.config_model("storage", "acme").__name__ == "Config"
    assert isinstance(registry.create("eviction", PluginSpec("acme")), EvictionPolicy)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("return Component(", "return dict(", "not a Component"),
        ("factory=Store", "factory=3", "factory 3 cannot be called"),
        ("config=Config", "config=dict", "is no subclass of kvcore.api.PluginConfig"),
        ("bucket: str", "model_config = {'extra': 'allow'}\n    bucket: str", "must keep extra='forbid'"),
    ],
)
def test_a_wrong_component(site, old, new, says):
    assert says in refused(acme(site, storage().replace(old, new)))


def test_a_factory_that_fails(site):
    source = storage().replace("self.config, self.context = config, context", "raise OSError('no route')")
    with pytest.raises(PluginError) as caught:
        acme(site, source).create("storage", PluginSpec("acme", {"bucket": "b"}, "l2[1].storage"))
    assert "storage plugin 'acme' (kvcore-acme 1.0) failed to start (l2[1].storage): OSError: no route, at" in str(
        caught.value
    )


def test_a_factory_that_fails_inside_others_is_named_once(site):
    source = storage().replace("self.config, self.context = config, context", "raise OSError('no route')")
    acme_in_two = {"storage": {"plugin": "faulty", "storage": {"plugin": "acme", "bucket": "b"}}}
    with pytest.raises(PluginError) as caught:
        acme(site, source).create("storage", PluginSpec("faulty", acme_in_two, "l2[1].storage"))
    text = str(caught.value)
    place = "l2[1].storage.storage.storage"
    assert text.startswith(f"storage plugin 'acme' (kvcore-acme 1.0) failed to start ({place}): OSError: no route, at")
    assert text.count("failed to start") == 1


def test_a_factory_that_makes_something_else(site):
    with pytest.raises(PluginError, match="its factory made a dict, not a Storage or BlockingStorage"):
        acme(site, storage().replace("factory=Store", "factory=lambda a, b: {}")).create(
            "storage", PluginSpec("acme", {"bucket": "b"})
        )


def test_an_unselected_plugin_cannot_matter(site):
    registry = acme(site, "raise RuntimeError")
    assert registry.component("storage", "memory").config is not None


# --- lists


@pytest.mark.parametrize("word", ["acme", "kvcore-acme", "KVCore_Acme", "acme@kvcore-acme"])
def test_the_block_list_acts_before_import(site, word):
    acme(site, "raise SystemExit")
    registry = Registry(block=[word])
    assert "is blocked here, by KVCORE_BLOCK_PLUGINS" in refused(registry)
    assert [i.status for i in registry.available("storage") if i.name == "acme"] == ["blocked"]
    assert "fake_acme" not in sys.modules


def test_the_allow_list_leaves_the_core_its_own(site):
    acme(site, storage())
    assert "is blocked here" in refused(Registry(allow=["disk"]))
    assert Registry(allow=["disk"]).find("eviction", "lru").status == "ready"
    assert Registry(allow=["acme"]).component("storage", "acme")


def test_blocking_one_of_two_settles_a_clash(site):
    for name in ("kvcore-acme", "other-acme"):
        module = name.replace("-", "_") + "_m"
        dist(site, name, {"kvcore.storage": {"acme": module}}, {module: storage(name)})
    assert Registry(block=["other-acme"]).find("storage", "acme").distribution == "kvcore-acme"


def test_lists_from_the_environment():
    lists = plugin_lists({"KVCORE_BLOCK_PLUGINS": "a, b@c,,", "KVCORE_ALLOW_PLUGINS": ""})
    assert lists == (("a", "b@c"), None)


# --- what a context offers


def test_a_context_makes_eviction_policies():
    context = Registry().context("l2[0].storage")
    assert isinstance(context.make_eviction("lru"), EvictionPolicy)
    assert isinstance(context.make_eviction({"plugin": "fifo"}), EvictionPolicy)
    with pytest.raises(PluginError, match="no eviction plugin is named 'lruu'"):
        context.make_eviction("lruu")
    with pytest.raises(PluginError, match=r"l2\[0\].storage.eviction: 7 is no plugin"):
        context.make_eviction(7)
