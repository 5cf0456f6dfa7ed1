"""The quality scale: each criterion is missed by what lacks it, and only then."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.cli.plugins.quality import LEVELS, SUITES, Criterion, judge, level
from kvcore.testing import dist

STORAGE = '''
from kvcore.api import BlockingStorage, PluginConfig

class Config(PluginConfig):
    path: str
    """Where."""

class Store(BlockingStorage):
    persistent = True
    shared = False
    def __init__(self, config, context):
        self.max_object_bytes = 1000
    def exists(self, keys): ...
    def load(self, items): ...
    def store(self, items): ...
    def delete(self, keys): ...
    def list(self): ...
    def usage(self): ...
    def ping(self): ...
'''
PLUGIN = """
from kvcore.api import ApiVersion, Component, hookimpl
@hookimpl
def kvcore_storage():
    from acme.storage import Config, Store
    return Component(api=ApiVersion(1, 0), config=Config, factory=Store)
"""
TEST = (
    "from kvcore.testing import StorageConformance\nclass TestAcme(StorageConformance):\n    def test_own(self): ...\n"
)
README = "# Acme\n\n```yaml\nl2:\n- storage: {plugin: acme, path: x}\n```\n"


def judged(
    site: Path,
    *,
    plugin: str = PLUGIN,
    storage: str = STORAGE,
    test: str = TEST,
    typed: bool = True,
    text: str = README,
    requires: tuple[str, ...] = ("kvcore>=0.1,<1",),
    metadata: Mapping[str, str] = MappingProxyType({"License-Expression": "MIT"}),
) -> list[Criterion]:
    """The criteria of a gold plugin, or of one that lacks something."""
    modules = {"acme.__init__": "", "acme.plugin": plugin, "acme.storage": storage, "acme.test_acme": test}
    files = {"acme/py.typed": ""} if typed else {}
    points = {"kvcore.storage": {"acme": "acme.plugin"}}
    dist(site, "acme-store", points, modules, files=files, requires=requires, metadata=metadata, text=text)
    return judge("storage", "acme")


def missed(criteria: list[Criterion]) -> list[tuple[str, str]]:
    return [(c.level, c.name) for c in criteria if not c.met]


def test_gold(site: Path) -> None:
    criteria = judged(site)
    assert missed(criteria) == []
    assert level(criteria) == "gold"
    assert [c.level for c in criteria] == sorted((c.level for c in criteria), key=LEVELS.index)


@pytest.mark.parametrize(
    ("lacks", "misses", "reached"),
    [
        ({"requires": ()}, [("bronze", "requires"), ("silver", "bounded")], None),
        ({"requires": ("kvcore>=0.1,<1; extra == 'x'",)}, [("bronze", "requires"), ("silver", "bounded")], None),
        ({"storage": STORAGE.replace('    """Where."""\n', "")}, [("bronze", "options")], None),
        ({"requires": ("KVCore>=0.1",)}, [("silver", "bounded")], "bronze"),
        ({"requires": ("kvcore>=0.1,<2",)}, [("silver", "bounded")], "bronze"),
        ({"typed": False}, [("silver", "typed")], "bronze"),
        ({"metadata": {}}, [("silver", "licence")], "bronze"),
        ({"test": ""}, [("silver", "conformance"), ("gold", "own tests")], "bronze"),
        ({"test": TEST.replace("(Storage", "(Serde")}, [("silver", "conformance")], "bronze"),
        ({"test": TEST.replace("def test_own(self): ...", "pass")}, [("gold", "own tests")], "silver"),
        ({"text": "# Acme\n\n```yaml\nl2: [{storage: acme-2}]\n```\n"}, [("gold", "readme")], "silver"),
        ({"text": "acme"}, [("gold", "readme")], "silver"),
        ({"storage": STORAGE.replace("    shared = False\n", "")}, [("gold", "shared")], "silver"),
        ({"storage": STORAGE.replace("self.max_object", "self.most_object")}, [("gold", "max_object_bytes")], "silver"),
        ({"storage": STORAGE.replace("    def list(self): ...\n", "")}, [("gold", "list")], "silver"),
        ({"storage": STORAGE.replace("    def usage(self): ...\n", "")}, [("gold", "usage")], "silver"),
        ({"storage": STORAGE.replace("    def ping(self): ...\n", "")}, [("gold", "ping")], "silver"),
        ({"plugin": PLUGIN.replace("=Store", "=lambda *a: Store(*a)")}, [("gold", "class")], "silver"),
    ],
)
def test_what_it_lacks_is_named(
    site: Path, lacks: dict[str, Any], misses: list[tuple[str, str]], reached: str | None
) -> None:
    criteria = judged(site, **lacks)
    assert missed(criteria) == misses
    assert level(criteria) == reached


def test_a_command_is_shown_as_it_is_written(site: Path) -> None:
    plugin = """
from kvcore.api import ApiVersion, Command, Component, hookimpl
class Greet(Command):
    help = "greet"
    def add_arguments(self, parser): ...
    def run(self, args): return 0
@hookimpl
def kvcore_command():
    return Component(api=ApiVersion(1, 0), factory=Greet)
"""

    def readme(name: str, text: str) -> bool:
        modules = {f"{name}_plugin": plugin}
        dist(site, name, {"kvcore.command": {name: f"{name}_plugin"}}, modules, text=text)
        return {c.name: c.met for c in judge("command", name)}["readme"]

    assert readme("hail", "Run `kvcore hail`.")
    assert not readme("wave", "```yaml\nwave: 1\n```")


def test_tests_beside_the_source_count(site: Path, tmp_path: Path) -> None:
    """A package installed from a folder: its project's tests, or in a repository of several, the repository's."""
    judged(site, test="")
    project = tmp_path / "repository" / "packages" / "acme-store"
    project.mkdir(parents=True)
    info = site / "acme_store-1.0.dist-info"
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{project}", "dir_info": {"editable": True}}))

    def conforms() -> bool:
        return {c.name: c.met for c in judge("storage", "acme")}["conformance"]

    def put(folder: Path, text: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "test_it.py").write_text(text)

    assert not conforms()
    put(project / "tests", TEST)  # of something else
    assert not conforms()
    put(project / "tests", f"from acme.storage import Store\n{TEST}")
    assert conforms()
    (project / "tests" / "test_it.py").unlink()
    put(tmp_path / "repository" / "tests" / "acme", TEST)
    assert not conforms()
    (tmp_path / "repository" / ".git").mkdir()
    assert conforms()


SERDE = """
from kvcore.api import ApiVersion, Component, Serde, hookimpl
class Acme(Serde):
    lossy = False
    tag = "{tag}"
    def encode(self, source, layout): ...
    def decode(self, source, into, layout): ...
    def max_encoded_bytes(self, nbytes): ...
@hookimpl
def kvcore_serde():
    return Component(api=ApiVersion(1, 0), factory=Acme)
"""


@pytest.mark.parametrize(("tag", "met"), [("acme/1", True), ("acme", False), ("other/1", False), ("acme-2/1", False)])
def test_a_serdes_frames_must_lead_back_to_it(site: Path, tag: str, met: bool) -> None:
    dist(site, "acme", {"kvcore.serde": {"acme": "fake_acme"}}, {"fake_acme": SERDE.replace("{tag}", tag)})
    [criterion] = [c for c in judge("serde", "acme") if c.name == "tag"]
    assert criterion.met is met
    assert (f"not '{tag}'" in criterion.text) is not met


def test_a_property_says_nothing_where_no_instance_can_be_made(site: Path) -> None:
    config = 'class Config(PluginConfig):\n    level: int\n    """How much."""\n'
    source = SERDE.replace('tag = "{tag}"', "@property\n    def tag(self): return 'acme/1'")
    source = source.replace("Serde, hookimpl\n", f"PluginConfig, Serde, hookimpl\n{config}")
    source = source.replace("factory=Acme", "config=Config, factory=Acme")
    dist(site, "acme", {"kvcore.serde": {"acme": "fake_acme"}}, {"fake_acme": source})
    [criterion] = [c for c in judge("serde", "acme") if c.name == "tag"]
    assert not criterion.met
    assert criterion.text.endswith(
        "; it is a property, which says nothing here: acme could not be made without options"
    )


def test_a_key_scheme_has_a_number(site: Path) -> None:
    source = "from kvcore.api import *\nfrom kvcore.builtin.keys_tokens import TokenKeys\n"
    source += "class Keys(TokenKeys):\n    scheme = 'acme'\n"
    source += "@hookimpl\ndef kvcore_keys():\n    return Component(api=ApiVersion(1, 0), factory=Keys)\n"
    dist(site, "acme", {"kvcore.keys": {"acme": "fake_acme"}}, {"fake_acme": source})
    assert ("silver", "scheme") in missed(judge("keys", "acme"))
    assert ("silver", "scheme") not in missed(judge("keys", "tokens"))


def test_hooks_have_a_level_too(site: Path) -> None:
    source = "from kvcore.api import hookimpl\n@hookimpl\ndef kvcore_stored(events): ...\n"
    dist(site, "acme", {"kvcore.hooks": {"acme": "fake_acme"}}, {"fake_acme": source}, requires=["kvcore<1"])
    criteria = judge("hooks", "acme")
    assert level(criteria) == "bronze"
    assert "conformance" not in {c.name for c in criteria}


OBSERVER = '''
from kvcore.api import ApiVersion, Component, PluginConfig, hookimpl
class Config(PluginConfig):
    path: str
    """Where."""
class Watch:
    def __init__(self, config, context): ...
    @hookimpl
    def kvcore_stored(self, events): ...
@hookimpl
def kvcore_observer():
    return Component(api=ApiVersion(1, 0), config=Config, factory=Watch)
'''


def test_an_observer_is_asked_for_its_options_and_its_suite(site: Path) -> None:
    """Also one whose options must be given."""
    suite = "from kvcore.testing import ObserverConformance\nclass TestAcme(ObserverConformance): ...\n"
    modules = {"acme.__init__": "", "acme.plugin": OBSERVER, "acme.test_acme": suite}
    dist(site, "acme-watch", {"kvcore.hooks": {"acme": "acme.plugin"}}, modules, requires=["kvcore<1"])
    met = {c.name for c in judge("hooks", "acme") if c.met}
    assert {"options", "conformance"} <= met


def test_an_observer_without_them_has_neither(site: Path) -> None:
    bare = OBSERVER.replace('    """Where."""\n', "")
    modules = {"acme.__init__": "", "acme.plugin": bare}
    dist(site, "acme-watch", {"kvcore.hooks": {"acme": "acme.plugin"}}, modules, requires=["kvcore<1"])
    assert {("bronze", "options"), ("silver", "conformance")} <= set(missed(judge("hooks", "acme")))


@pytest.mark.parametrize(
    ("kind", "name"), [("storage", "memory"), ("serde", "raw"), ("eviction", "lru"), ("keys", "engine")]
)
def test_the_builtins_are_gold(kind: str, name: str) -> None:
    assert missed(judge(kind, name)) == []


def test_the_suites_are_those_of_the_kit() -> None:
    from kvcore import testing

    assert all(hasattr(testing, suite) for suite in SUITES.values())


def test_the_command(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    judged(site, metadata={})
    dist(site, "acme-broken", {"kvcore.storage": {"broken": "fake_broken"}}, {"fake_broken": "import os; os.abort()"})
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def check(*words: str) -> tuple[int, str]:
        status = main(["plugins", "check", "--quality", *words])
        return status, capsys.readouterr().out

    status, out = check("acme")
    assert status == 0
    assert out.splitlines()[0] == "ok    storage acme (acme-store 1.0) bronze"
    assert "  met    bronze requires: its metadata requires kvcore\n" in out
    assert "  missed silver licence: its metadata names the licence\n" in out
    found = json.loads(check("acme", "--json")[1])["plugins"][0]
    assert (found["level"], found["ok"]) == ("bronze", True)
    assert {"level": "silver", "name": "licence", "met": False, "text": "its metadata names the licence"} in found[
        "criteria"
    ]
    status, out = check("broken", "--json")
    assert status == 1
    found = json.loads(out)["plugins"][0]
    assert (found["level"], found["criteria"], found["ok"]) == (None, [], False)
    assert "SIGABRT" in found["text"]
