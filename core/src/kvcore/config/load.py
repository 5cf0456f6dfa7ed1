"""`load_config`: two passes, every fault at once."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from kvcore.api.config import PluginConfig, PluginOf
from kvcore.api.errors import PluginError
from kvcore.api.storage import can_list
from kvcore.config.model import CANNOT_LIST, OWN_CAPACITY, Config, TierConfig
from kvcore.config.overlay import apply_environment, apply_flags
from kvcore.config.scripts import settle
from kvcore.config.tenants import listed_for, quota_faults
from kvcore.config.tree import DEFAULT, Fault, InvalidConfigError, Path, Source, Tree, show
from kvcore.config.validate import validate
from kvcore.config.yaml_file import read_file
from kvcore.plugins import PluginSpec, Registry


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
    registry: Registry,
) -> Config:
    """The configuration of `path`, or of the file that `KVCORE_CONFIG` names, or the defaults.

    Precedence: flags > environment (`KVCORE_L1__SIZE=8GiB`) > file > defaults. `flags` are dotted paths and values:
    `{"l1.size": "8GiB", "l2[0].storage.path": "/cache"}`.

    Raises `ConfigError` whose text lists every fault. Imports the plugins that the configuration names, no others.
    """
    file = os.fspath(path) if path is not None else env.get("KVCORE_CONFIG") or None
    tree, faults = _start(file, registry)
    if file is not None and faults and not tree.value:
        raise InvalidConfigError(faults)  # nothing of the file could be read: what else is wrong would be guesswork
    faults += apply_environment(tree, env)
    faults += apply_flags(tree, flags or {})
    _leave_lone_tokens(tree)
    config = _Loader(tree, registry, faults).build()
    if config is None:
        raise InvalidConfigError(faults)
    config._sources = tree.sources
    config._file = file
    return config


def load_tier(given: Mapping[str, Any], *, registry: Registry, taken: Iterable[str] = ()) -> TierConfig:
    """One tier from plain values, as they would stand in `l2`, for a cache that is running.

    Raises `ConfigError` whose text lists every fault. A tier without a name gets one that is not `taken`.
    """
    tree = Tree()
    tree.set(("l2",), [_copy(given)], Source("file", "the tier"))
    loader = _Loader(tree, registry, [], taken)
    config = loader.build()
    if config is None:
        found = [
            (f.place, f.path.removeprefix("l2[0]").lstrip("."), f.text.replace("l2[0].", "")) for f in loader.faults
        ]
        raise InvalidConfigError([Fault(*fault) for fault in found])
    (tier,) = config.l2
    where = f"tier {tier.name}: "
    return tier.model_copy(
        update={
            "storage": tier.storage._replace(where=f"{where}storage"),
            "serde": tuple(s._replace(where=f"{where}serde") for s in tier.serde),
            "eviction": tier.eviction._replace(where=f"{where}eviction"),
        }
    )


def _start(file: str | None, registry: Registry) -> tuple[Tree, list[Fault]]:
    if file is not None:
        return read_file(file)
    tree = Tree()
    if any(p.name == "disk" and p.status == "ready" for p in registry.available("storage")):
        tree.set(("l2",), [{"storage": "disk"}], DEFAULT)
    return tree, []


def _leave_lone_tokens(tree: Tree) -> None:
    """A token in the environment configures no server by itself: a shell that asks one over HTTP has it, too."""
    paths: tuple[Path, ...] = (("server", "http"), ("server",))
    for path in paths:
        holder: Any = tree.value
        for part in path[:-1]:
            holder = holder.get(part) if isinstance(holder, dict) else None
        lone = holder.get(path[-1]) if isinstance(holder, dict) else None
        if isinstance(lone, dict) and set(lone) == {"token"} and tree.source((*path, "token")).kind == "environment":
            del holder[path[-1]]
            tree.forget(path)
            if path[:-1] and not holder and path[:1] not in tree.sources:
                del tree.value[path[0]]


class _Loader:
    """The two passes over one tree; every fault found goes to `faults`."""

    def __init__(self, tree: Tree, registry: Registry, faults: list[Fault], taken: Iterable[str] = ()) -> None:
        self.faults = faults
        self._taken = taken
        self._tree = tree
        self._registry = registry
        self._specs: list[PluginSpec] = []

    def build(self) -> Config | None:
        """The configuration, or None when there are faults."""
        server = self._tree.value.get("server")
        if isinstance(server, str | list):
            self._tree.set(("server",), {"url": server}, self._tree.source(("server",)))
        settle(self._tree)
        data = _copy(self._tree.value)
        if isinstance(l1 := data.setdefault("l1", {}), dict):
            l1.setdefault("eviction", "lru")
            self._take("eviction", l1, "eviction", ("l1", "eviction"))
        data.setdefault("keys", "engine")
        self._take("keys", data, "keys", ("keys",))
        for i, tier in _entries(data.get("l2")):
            if isinstance(tier, dict):
                tier.setdefault("eviction", "lru")
                self._take("eviction", tier, "eviction", ("l2", i, "eviction"))
                if "storage" in tier:
                    self._take("storage", tier, "storage", ("l2", i, "storage"))
                for j, _ in _entries(tier.get("serde")):
                    self._take("serde", tier["serde"], j, ("l2", i, "serde", j))
                self._check_capacity(i, tier)
        self._name_tiers(data)
        self.faults += quota_faults(data, self._tree)
        self._check_listing(data)
        self._check_hooks(data)
        config = validate(Config, data, self._tree, self.faults, context={"specs": self._specs})
        return None if self.faults else config

    def _take(self, kind: str, holder: Any, part: str | int, path: Path) -> None:
        """Validate the plugin at `holder[part]` and leave its index in `specs` there."""
        self._specs.append(self._spec(kind, holder[part], path))
        holder[part] = len(self._specs) - 1

    def _spec(self, kind: str, node: Any, path: Path) -> PluginSpec:
        where, at = show(path), self._tree.source(path)
        name, options = node, {}
        if isinstance(node, dict):
            options = {k: v for k, v in node.items() if k != "plugin"}
            if "plugin" not in node:
                self._fault(at, path, f"`plugin` is missing: name the {kind} plugin")
                return PluginSpec("", {}, where)
            name, at = node["plugin"], self._tree.source((*path, "plugin"))
        if not isinstance(name, str) or not name:
            text = f"must be the name of a {kind} plugin or {{plugin: name, option: value}}, given {name!r}"
            self._fault(at, path, text)
            return PluginSpec("", {}, where)
        try:
            model = self._registry.config_model(kind, name)
        except PluginError as e:
            self._fault(at, path, str(e))
            return PluginSpec(name, {}, where)
        if model is None:
            for key in options:
                place = self._tree.source((*path, key)).at_key()
                text = f"no such option: {kind} plugin {name!r} has none"
                self.faults.append(Fault(place, show((*path, key)), text))
            return PluginSpec(name, {}, where)
        made = validate(model, options, self._tree, self.faults, prefix=path)
        named = self._named(model, options, path)
        return PluginSpec(name, made.model_copy(update=named) if made is not None else {}, where)

    def _named(self, model: type[PluginConfig], options: dict[str, Any], path: Path) -> dict[str, PluginSpec]:
        """The plugins that a plugin's own options name, such as a storage's eviction policy, validated."""
        found = {}
        for option, field in model.model_fields.items():
            spec = options.get(option)
            name = spec.get("plugin") if isinstance(spec, dict) else spec
            for mark in field.metadata:
                if isinstance(mark, PluginOf) and isinstance(name, str):
                    found[option] = self._spec(mark.kind, spec, (*path, option))
        return found

    def _name_tiers(self, data: dict[str, Any]) -> None:
        """Give each tier a name of its own."""
        tiers = [(i, t) for i, t in _entries(data.get("l2")) if isinstance(t, dict)]
        taken: dict[str, str] = {"l1": "L1", **dict.fromkeys(self._taken, "a tier that is open")}
        for i, tier in tiers:
            name = tier.get("name")
            if isinstance(name, str):
                if name in taken:
                    path = ("l2", i, "name")
                    self._fault(self._tree.source(path), path, f"the name {name!r} is taken by {taken[name]}")
                taken.setdefault(name, f"l2[{i}]")
        for i, tier in tiers:
            if "name" not in tier and type(tier.get("storage")) is int:
                base = self._specs[tier["storage"]].plugin.partition("@")[0]
                names = (base if n == 1 else f"{base}-{n}" for n in count(1))
                tier["name"] = next(name for name in names if name not in taken) if base else "unnamed"
                taken[tier["name"]] = f"l2[{i}]"

    def _check_capacity(self, i: int, tier: dict[str, Any]) -> None:
        """Whether the storage's class says that it keeps to a capacity of its own; others say it when they are made."""
        if tier.get("capacity") is None or type(tier.get("storage")) is not int:
            return
        with suppress(PluginError):  # it stands among the faults
            factory = self._registry.component("storage", self._specs[tier["storage"]].plugin).factory
            if getattr(factory, "evicts", False) is True:
                path = ("l2", i, "capacity")
                self._fault(self._tree.source(path), path, OWN_CAPACITY.format(show(("l2", i, "storage"))))

    def _check_listing(self, data: dict[str, Any]) -> None:
        """Whether storages can list what they hold, where something needs it and their classes tell."""
        for i, tier in _entries(data.get("l2")):
            if not isinstance(tier, dict) or type(tier.get("storage")) is not int:
                continue
            plugin = self._specs[tier["storage"]].plugin
            with suppress(PluginError):  # it stands among the faults
                if can_list(self._registry.component("storage", plugin).factory):
                    continue
                given = (tier.get("name"), tier.get("capacity"), tier.get("ttl"), data.get("tenants"))
                for path in listed_for(i, *given):
                    self._fault(self._tree.source(path), path, CANNOT_LIST.format(plugin))

    def _check_hooks(self, data: dict[str, Any]) -> None:
        seen: set[str] = set()
        for i, node in _entries(data.get("hooks")):
            path = ("hooks", i)
            # without options it is loaded when it is needed
            spec = PluginSpec(node, {}, show(path)) if isinstance(node, str) else self._spec("hooks", node, path)
            self._specs.append(spec)
            data["hooks"][i] = len(self._specs) - 1
            try:
                found = self._registry.find("hooks", spec.plugin)
            except PluginError as e:
                if isinstance(node, str):
                    self._fault(self._tree.source(path), path, str(e))
                continue
            if found.label in seen:
                self._fault(self._tree.source(path), path, f"{spec.plugin!r} is listed twice")
            seen.add(found.label)

    def _fault(self, source: Source, path: Path, text: str) -> None:
        self.faults.append(Fault(str(source), show(path), text))


def _entries(value: Any) -> list[tuple[int, Any]]:
    return list(enumerate(value)) if isinstance(value, list) else []


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(v) for v in value]
    return value
