"""The quality scale of plugins: what a program can check, for `kvcore plugins check --quality`. Runs in a child.

Bronze: it says what it is. Silver: it can be depended on. Gold: it can be operated. Written down in
`docs/write-a-plugin.md`.
"""

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement

from kvcore import __version__
from kvcore.api import BlockingStorage, ConfigError, Storage
from kvcore.api.hooks import Component
from kvcore.cli.plugins.trial import make
from kvcore.config.describe import options
from kvcore.plugins import PluginInfo, registry_from_env
from kvcore.plugins.discover import normalize
from kvcore.plugins.known import CORE

Level = Literal["bronze", "silver", "gold"]
LEVELS: tuple[Level, ...] = ("bronze", "silver", "gold")
SUITES = {
    "storage": "StorageConformance",
    "serde": "SerdeConformance",
    "eviction": "EvictionConformance",
    "keys": "KeyGeneratorConformance",
    "hooks": "ObserverConformance",
}
STORAGE_TRAITS = ("persistent", "shared", "max_object_bytes")
STORAGE_METHODS = {
    "list": "`kvcore store` can show, verify and copy what is held",
    "usage": "`kvcore doctor` and the metrics can say how full it is",
    "ping": "a probe can tell that the store answers",
}


class Criterion(NamedTuple):
    """One thing that is asked of a plugin. `text` says why, or what to do when it is not `met`."""

    level: Level
    name: str
    met: bool
    text: str


def judge(kind: str, name: str) -> list[Criterion]:
    """Every criterion of this plugin, in the order of the levels. Raises `PluginError` when it does not even load,
    or cannot be made."""
    registry = registry_from_env()
    info = registry.find(kind, name)
    component = made = None
    if kind == "hooks":
        with suppress(ConfigError):  # it has options that must be given
            registry.use_hooks([name])
        if registry.offers_observer(name):
            component = registry.component(kind, name)
    else:
        component = registry.component(kind, name)
        made = make(registry, kind, name)
    found = [
        Criterion(
            "bronze", "loads", True, "it imports, can be made, and its hooks, API version and options are accepted"
        )
    ]
    found += _package(info, SUITES.get(kind) if component is not None else None)
    if component is not None:
        found += _options(component)
        found += _component(info, component, made)
    return sorted(found, key=lambda c: LEVELS.index(c.level))


def level(criteria: list[Criterion]) -> Level | None:
    """The highest level of which, and of those below, every criterion is met."""
    reached: Level | None = None
    for step in LEVELS:
        if not all(c.met for c in criteria if c.level == step):
            break
        reached = step
    return reached


def _package(info: PluginInfo, suite: str | None) -> Iterator[Criterion]:
    """What the distribution says, and what it brings. `suite`: that of its kind, where it offers a component."""
    package = info.module.partition(":")[0].partition(".")[0]
    try:
        dist: Distribution | None = distribution(info.distribution)
    except PackageNotFoundError:  # the core, run from a source tree
        dist = None
    needs = [r for line in (dist.requires if dist else None) or () if normalize((r := Requirement(line)).name) == CORE]
    needs = [r for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    after = f"{int(__version__.partition('.')[0]) + 1}.0"
    bounded = bool(needs) and not any(r.specifier.contains(after, prereleases=True) for r in needs)
    yield Criterion("bronze", "requires", info.builtin or bool(needs), f"its metadata requires {CORE}")
    text = f"its requirement on {CORE} excludes {after}, whose interfaces nobody knows yet: {CORE}>=...,<{after[:-2]}"
    yield Criterion("silver", "bounded", info.builtin or bounded, text)
    spec = find_spec(package)
    typed = any((Path(folder) / "py.typed").is_file() for folder in (spec and spec.submodule_search_locations) or ())
    yield Criterion("silver", "typed", typed, f"{package}/py.typed is there, so that its types are used")
    fields = dist.metadata.json if dist else {}
    licence = any(fields.get(field) for field in ("license_expression", "license", "license_file"))
    yield Criterion("silver", "licence", info.builtin or licence, "its metadata names the licence")
    tests = [] if dist is None else list(_tests(dist, package))
    if suite is not None:
        text = f"a test inherits {suite}; it ships in the package, or stands in tests/ beside its source"
        tested = info.builtin or any(_inherits(t, suite) for t in tests)
        yield Criterion("silver", "conformance", tested, text)
    own = any(isinstance(n, ast.FunctionDef) and n.name.startswith("test_") for t in tests for n in ast.walk(t))
    yield Criterion("gold", "own tests", info.builtin or own, "there are tests of its own, beside the suite")
    if info.kind == "command":
        shown = f"kvcore {info.name}" in str(fields.get("description", ""))
        yield Criterion("gold", "readme", info.builtin or shown, f"its README shows `kvcore {info.name}`")
    elif info.kind != "engine":  # an engine's connector stands in no file of ours
        blocks = re.findall(r"^```ya?ml$(.*?)^```$", str(fields.get("description", "")), re.S | re.M)
        shown = any(re.search(rf"(?<![\w-]){re.escape(info.name)}(?![\w-])", block) for block in blocks)
        text = f"its README has a YAML example that names {info.name}"
        yield Criterion("gold", "readme", info.builtin or shown, text)


def _options(component: Component) -> Iterator[Criterion]:
    bare = [o.name for o in options(component.config) if not o.description]
    text = f"every option has a docstring{': ' + ', '.join(bare) + ' have none' if bare else ''}"
    yield Criterion("bronze", "options", not bare, text)


def _component(info: PluginInfo, component: Component, instance: Any) -> Iterator[Criterion]:
    """What the class declares and implements. `instance` is None when it has options that must be given."""
    made = component.factory
    if info.kind in ("serde", "keys"):
        word = "tag" if info.kind == "serde" else "scheme"
        told = getattr(made if instance is None else instance, word, "")
        unseen = instance is None and not isinstance(told, str)  # a property of the class
        value = "" if unseen else str(told)
        pattern = rf"{re.escape(info.name)}/\d+" if word == "tag" else r".+/\d+"
        text = (
            f"its tag is {info.name}/NUMBER, so that its frames are read when it is no longer configured"
            if word == "tag"
            else "its scheme ends with /NUMBER, so that another derivation can have another one"
        )
        given = f", not {value!r}" if value else "; it could not be made without options"
        if unseen:
            given = f"; it is a property, which says nothing here: {info.name} could not be made without options"
        met = re.fullmatch(pattern, value) is not None
        yield Criterion("silver", word, met, text if met else text + given)
    traits = {"storage": STORAGE_TRAITS, "serde": ("lossy",)}.get(info.kind, ())
    if traits and not isinstance(made, type):
        yield Criterion("gold", "class", False, "its factory is its class, so that it can be seen what that declares")
        return
    for trait in traits:
        yield Criterion("gold", trait, _declares(made, trait), f"the class declares `{trait}`, be it the default")
    if info.kind == "storage":
        base = Storage if issubclass(made, Storage) else BlockingStorage  # type: ignore[arg-type]
        for name, why in STORAGE_METHODS.items():
            met = getattr(made, name) is not getattr(base, name)
            yield Criterion("gold", name, met, f"`{name}` is implemented: {why}")


def _declares(made: Any, trait: str) -> bool:
    """Whether a class of the plugin's own, or its constructor, sets or annotates `trait`."""
    for cls in getattr(made, "__mro__", ()):
        if not cls.__module__.startswith("kvcore.api."):
            code = getattr(vars(cls).get("__init__"), "__code__", None)
            if trait in vars(cls) or trait in getattr(code, "co_names", ()):
                return True
    return False


def _tests(dist: Distribution, package: str) -> Iterator[ast.Module]:
    """Parsed Python files that may test the package: its own, and those in `tests` of its project or repository."""
    paths = [Path(str(dist.locate_file(f))) for f in dist.files or () if f.suffix == ".py"]
    url = json.loads(dist.read_text("direct_url.json") or "{}").get("url", "")  # PEP 610: installed from a folder
    if url.startswith("file://"):
        project = Path(unquote(urlsplit(url).path))
        parents = [project, *project.parents]
        roots = [i for i, folder in enumerate(parents) if (folder / ".git").exists()][:1]
        for folder in parents[: roots[0] + 1 if roots else 1]:
            paths += (folder / "tests").rglob("*.py")
    for path in dict.fromkeys(paths):
        try:
            text = path.read_text("utf-8")
            if package in text or package in path.parts:
                yield ast.parse(text)
        except (OSError, ValueError, SyntaxError):
            continue


def _inherits(tree: ast.Module, suite: str) -> bool:
    return any(
        getattr(base, "id", getattr(base, "attr", "")) == suite
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    )
