"""The policies that are simulated: those of the command line, or all that are installed."""

from collections.abc import Iterable
from typing import Any

from kvcore.api import EvictionPolicy
from kvcore.api.errors import ConfigError, KVCoreError, PluginError
from kvcore.api.units import brief
from kvcore.cli.kit.output import error
from kvcore.plugins import PluginSpec, Registry

_FORMS = "write a name, name:option=value,option=value, or {plugin: name, option: value}"


class Candidate:
    """One policy with its options, made anew for each capacity. `label` is as the user wrote it."""

    def __init__(self, registry: Registry, label: str, plugin: str, options: dict[str, Any]) -> None:
        self.label = label
        self.plugin = plugin
        self.options = options
        self._registry = registry

    def make(self) -> EvictionPolicy:
        """A fresh one. Raises `PluginError` or `ConfigError`."""
        made: EvictionPolicy = self._registry.create(
            "eviction", PluginSpec(self.plugin, self.options, f"--policy {self.label}")
        )
        return made


def chosen(registry: Registry, words: Iterable[str]) -> list[Candidate]:
    """The candidates that `words` name, each of which can be made. Raises `KVCoreError`."""
    candidates = [Candidate(registry, word, *_parsed(word)) for word in dict.fromkeys(words)]
    for candidate in candidates:
        candidate.make()
    return candidates


def installed(registry: Registry) -> list[Candidate]:
    """Every installed policy that can be made with its default options; of others it is said on stderr why not."""
    candidates: list[Candidate] = []
    for info in registry.available("eviction"):
        candidate = Candidate(registry, info.name, info.name, {})
        if info.status == "blocked" or any(c.label == info.name for c in candidates):
            continue
        try:
            candidate.make()
        except (PluginError, ConfigError) as e:
            error(f"{info.name} is left out: {e}")
        else:
            candidates.append(candidate)
    return sorted(candidates, key=lambda c: c.label != "lru")  # the default policy first


def _parsed(word: str) -> tuple[str, dict[str, Any]]:
    import yaml

    try:
        if word.lstrip().startswith("{"):
            spec = yaml.safe_load(word)
            plugin = spec.pop("plugin", None)
            if isinstance(plugin, str):
                return plugin, spec
            raise KVCoreError(f"--policy {brief(word)} names no plugin: {_FORMS}")
        plugin, _, rest = word.partition(":")
        pairs = [pair.partition("=") for pair in rest.split(",")] if rest else []
        if not plugin or not all(name and sign for name, sign, _ in pairs):
            raise KVCoreError(f"--policy {brief(word)} is no policy: {_FORMS}")
        return plugin, {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
    except yaml.YAMLError as e:
        problem = getattr(e, "problem", None) or str(e)
        raise KVCoreError(f"--policy {brief(word)} is not YAML ({problem}): {_FORMS}") from None
