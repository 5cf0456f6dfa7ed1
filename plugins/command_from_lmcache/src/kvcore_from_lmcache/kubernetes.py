"""Kubernetes manifests and Helm values that run LMCache: what they start it with."""

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

from kvcore.api import ConfigError
from kvcore.config.tree import Path, Tree
from kvcore.config.yaml_file import read_text
from kvcore_from_lmcache import engine, operator, words
from kvcore_from_lmcache.draft import Setting
from kvcore_from_lmcache.sources import FILE, Found, from_environment, line_of, over, settings_of
from kvcore_from_lmcache.words import Word

HELM = {
    "cpuOffloadingBufferSize": "max_local_cpu_size",
    "diskOffloadingBufferSize": "max_local_disk_size",
    "logLevel": "log_level",
    "instanceId": "lmcache_instance_id",
    "enableController": "enable_controller",
    "remoteUrl": "remote_url",
}
"""`lmcacheConfig` in the Helm values of vLLM's production stack, as LMCache's settings."""
NO_PATH = "the chart gives LMCache no folder: name one, `l2: [{storage: {plugin: disk, path: ...}}]`"


def is_one(trees: list[Tree]) -> bool:
    """A manifest, or Helm values with LMCache in them; not LMCache's own YAML."""
    return any("apiVersion" in t.value and "kind" in t.value for t in trees) or any(
        any(True for _ in _with(t.value, ("lmcacheConfig",))) for t in trees
    )


def settings(path: str, trees: list[Tree]) -> Found:
    """What stands in all its documents. Raises `ConfigError` when nothing of LMCache does."""
    found = Found()
    files: dict[str, list[Setting]] = {}
    kinds: list[str] = []
    for tree in trees:
        kinds.append(str(tree.value.get("kind", "values")))
        if kinds[-1] in (*operator.KINDS, operator.COORDINATOR):
            found.add(operator.settings(tree))
        elif kinds[-1] == "ConfigMap":
            files |= _files(tree)
    for tree in (tree for tree in trees if tree.value.get("kind") not in (*operator.KINDS, operator.COORDINATOR)):
        for at, value in _with(tree.value, ("command", "args", "env", "lmcacheConfig")):
            found.add(_container(tree, at, value, files))
    for own in files.values():
        found.add(Found(engine=own))
    if not found.all():
        raise ConfigError(
            f"{path} is a Kubernetes manifest ({', '.join(dict.fromkeys(kinds))}) and starts no LMCache. Give the one "
            "that does: a ConfigMap with its YAML, a container with its command, or its operator's LMCacheEngine"
        )
    return found


def _with(value: Any, keys: tuple[str, ...], at: Path = ()) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Every mapping with one of the keys."""
    if isinstance(value, Mapping):
        if any(key in value for key in keys):
            yield at, value
        for key, inner in value.items():
            yield from _with(inner, keys, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _with(inner, keys, (*at, i))


def _files(tree: Tree) -> dict[str, list[Setting]]:
    """LMCache's YAML files in a ConfigMap."""
    files = {}
    name = tree.sources[()].name
    data = tree.value.get("data")
    for key, text in data.items() if isinstance(data, Mapping) else ():
        inner, faults = read_text(str(text), name)
        if not faults and isinstance(inner.value, Mapping):
            found = settings_of(inner, name, below=line_of(tree, ("data", key)))
            if any(engine.knows(s.name) for s in found):
                files[str(key)] = found
    return files


def _container(tree: Tree, at: Path, value: Mapping[str, Any], files: dict[str, list[Setting]]) -> Found:
    """A container, or what a chart makes one of."""
    name = tree.sources[()].name
    found = Found()
    given: list[Word] = []
    for part in ("command", "args"):
        listed = value.get(part)
        for i, word in enumerate(listed if isinstance(listed, list) else ()):
            place = f"{name}:{tree.sources[(*at, part, i)].line}"
            script = any(c in str(word).strip() for c in "\n ") and not str(word).lstrip().startswith(("{", "["))
            given += words.split(str(word), place) if script else [Word(str(word), place)]
    env, places = _environment(tree, at, value)
    if any(word.text for word in given):
        found.add(words.from_words(given))
    told = from_environment(env, places)
    if found.server or any("MP" in str(s.value) for s in found.connector):
        found.add(Found(server=[s.named(s.name.replace("_", "-")) for s in told]))
    elif told or found.engine:
        found.engine, lost = over(told, found.engine)
        found.beside += [(setting, "the engine's flags say otherwise") for setting in lost]
    file = Word(env[FILE], places[FILE]) if FILE in env else words.file_of(given)
    if file is not None:
        own = files.pop(posixpath.basename(file.text), None)
        if own is None:
            found.beside.append((Setting(file.place, "config_file", file.text), words.FROM_FILE))
        else:
            found.engine, lost = over(own, found.engine)
            found.beside += [(setting, "the environment says otherwise") for setting in lost]
    if isinstance(helm := value.get("lmcacheConfig"), Mapping):
        found.add(_helm(tree, (*at, "lmcacheConfig"), helm))
    found.start = []
    return found


def _environment(tree: Tree, at: Path, value: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The container's variables with plain values, and their places."""
    env, places = {}, {}
    listed = value.get("env")
    for i, entry in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(entry, Mapping) and "name" in entry and "value" in entry:
            env[str(entry["name"])] = str(entry["value"])
            places[str(entry["name"])] = f"{tree.sources[()].name}:{line_of(tree, (*at, 'env', i, 'name'))}"
    return env, places


def _helm(tree: Tree, at: Path, values: Mapping[str, Any]) -> Found:
    found = Found()
    for key, value in values.items():
        setting = Setting(f"{tree.sources[()].name}:{line_of(tree, (*at, key))}", f"lmcacheConfig.{key}", value)
        if key == "enabled":
            found.beside.append((setting, "`kvcore run` and the engine's flags say that"))
        elif key == "diskOffloadingBufferSize" and value:
            found.beside.append((setting, NO_PATH))
        elif value not in ("", None):
            found.engine.append(setting.named(HELM.get(key, setting.name)))
        else:
            found.beside.append((setting, "not set"))
    return found
