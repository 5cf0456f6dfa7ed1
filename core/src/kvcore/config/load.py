"""`load_config`: two passes, every fault at once."""

import os
from collections.abc import Mapping
from typing import Any

from kvcore.api.errors import ConfigError, PluginError
from kvcore.config.model import Config
from kvcore.config.overlay import apply_environment, apply_flags
from kvcore.config.tree import DEFAULT, Fault, Path, Source, Tree, show
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
        raise _error(faults)  # nothing of the file could be read: what else is wrong would be guesswork
    faults += apply_environment(tree, env)
    faults += apply_flags(tree, flags or {})
    config = _build(tree, registry, faults)
    if config is None:
        raise _error(faults)
    config._sources = tree.sources
    config._file = file
    return config


def _error(faults: list[Fault]) -> ConfigError:
    lines = list(dict.fromkeys(str(f) for f in faults))
    error = ConfigError("\n".join(lines))
    error.faults = faults  # type: ignore[attr-defined]
    return error


def _start(file: str | None, registry: Registry) -> tuple[Tree, list[Fault]]:
    if file is not None:
        return read_file(file)
    tree = Tree()
    if any(p.name == "disk" and p.status == "ready" for p in registry.available("storage")):
        tree.set(("l2",), [{"storage": "disk"}], DEFAULT)
    return tree, []


def _build(tree: Tree, registry: Registry, faults: list[Fault]) -> Config | None:
    data = tree.value
    specs: list[PluginSpec] = []

    def take(kind: str, holder: Any, part: str | int, path: Path, default: str | None = None) -> None:
        """Replace the plugin at `holder[part]` by its index in `specs`."""
        if isinstance(holder, dict):
            if part not in holder:
                if default is None:
                    return
                holder[part] = default
        node = holder[part]
        specs.append(_spec(kind, node, path, tree, registry, faults))
        holder[part] = len(specs) - 1

    data = _copy(data)
    if isinstance(l1 := data.setdefault("l1", {}), dict):
        take("eviction", l1, "eviction", ("l1", "eviction"), "lru")
    take("keys", data, "keys", ("keys",), "engine")
    for i, tier in _entries(data.get("l2")):
        if isinstance(tier, dict):
            take("storage", tier, "storage", ("l2", i, "storage"))
            for j, _ in _entries(tier.get("serde")):
                take("serde", tier["serde"], j, ("l2", i, "serde", j))
    _name_tiers(data, specs, tree, faults)
    _check_hooks(data, tree, registry, faults)
    config = validate(Config, data, (), tree, faults, context={"specs": specs})
    return config if not faults else None


def _spec(kind: str, node: Any, path: Path, tree: Tree, registry: Registry, faults: list[Fault]) -> PluginSpec:
    """Validate one plugin spec. What is wrong goes to `faults`, and a stand-in is returned."""
    where = show(path)
    options: dict[str, Any] = {}
    name = node
    if isinstance(node, dict):
        options = {k: v for k, v in node.items() if k != "plugin"}
        if "plugin" not in node:
            text = f"`plugin` is missing: name the {kind} plugin"
            faults.append(Fault(str(tree.source(path)), where, text))
            return PluginSpec("", {}, where)
        name = node["plugin"]
    if not isinstance(name, str) or not name:
        text = f"must be the name of a {kind} plugin or {{plugin: name, option: value}}, given {name!r}"
        faults.append(Fault(str(tree.source(path)), where, text))
        return PluginSpec("", {}, where)
    at: Source = tree.source((*path, "plugin")) if isinstance(node, dict) else tree.source(path)
    try:
        model = registry.config_model(kind, name)
    except PluginError as e:
        faults.append(Fault(str(at), where, str(e)))
        return PluginSpec(name, {}, where)
    if model is None:
        for key in options:
            place = tree.source((*path, key)).at_key()
            faults.append(Fault(place, show((*path, key)), f"no such option: {kind} plugin {name!r} has none"))
        return PluginSpec(name, {}, where)
    made = validate(model, options, path, tree, faults)
    return PluginSpec(name, made if made is not None else {}, where)


def _name_tiers(data: dict[str, Any], specs: list[PluginSpec], tree: Tree, faults: list[Fault]) -> None:
    """Give each tier a name of its own."""
    tiers = [(i, t) for i, t in _entries(data.get("l2")) if isinstance(t, dict)]
    taken: dict[str, int] = {"l1": -1}
    for i, tier in tiers:
        name = tier.get("name")
        if not isinstance(name, str):
            if name is None:
                tier.pop("name", None)
            continue
        if name in taken:
            other = "L1 has it" if name == "l1" else f"l2[{taken[name]}] has it"
            faults.append(Fault(str(tree.source(("l2", i, "name"))), f"l2[{i}].name", f"{name!r} is taken: {other}"))
        taken[name] = i
    for i, tier in tiers:
        token = tier.get("storage")
        if "name" not in tier and type(token) is int and token < len(specs):
            base = specs[token].plugin.partition("@")[0]
            name, n = base, 1
            while name in taken:
                n += 1
                name = f"{base}-{n}"
            if base:
                tier["name"] = name
                taken[name] = i


def _check_hooks(data: dict[str, Any], tree: Tree, registry: Registry, faults: list[Fault]) -> None:
    for i, name in _entries(data.get("hooks")):
        if isinstance(name, str):
            try:
                registry.find("hooks", name)
            except PluginError as e:
                faults.append(Fault(str(tree.source(("hooks", i))), f"hooks[{i}]", str(e)))


def _entries(value: Any) -> list[tuple[int, Any]]:
    return list(enumerate(value)) if isinstance(value, list) else []


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(v) for v in value]
    return value
