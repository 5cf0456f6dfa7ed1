"""Where LMCache's settings come from: a YAML file, the environment, or a command line."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.api import ConfigError
from kvcore.cli.from_lmcache.draft import Setting
from kvcore.config.yaml_file import read_file, read_text, scalar

PREFIX = "LMCACHE_"


def from_file(path: str) -> list[Setting]:
    """The settings of LMCache's YAML (or JSON) file. Raises `ConfigError`."""
    tree, faults = read_file(path)
    if faults:
        raise ConfigError("\n".join(map(str, faults)))
    if "apiVersion" in tree.value and "kind" in tree.value:
        raise ConfigError(
            f"{path} is a Kubernetes manifest ({tree.value['kind']}), not LMCache's configuration. Give what it starts "
            "LMCache with: the container's command and arguments behind `--`, or the YAML in its ConfigMap"
        )
    found = []
    for key, value in tree.value.items():
        inner = isinstance(value, Mapping) and len(value) > 0  # an empty one is a setting, too
        for name, plain, at in (
            ((f"{key}.{k}", v, (key, k)) for k, v in value.items()) if inner else ((key, value, (key,)),)
        ):
            source = tree.sources[at]
            line = source.key[0] if source.key else source.line
            found.append(Setting(f"{path}:{line}", name, plain))
    return found


def from_environment(env: Mapping[str, str]) -> list[Setting]:
    """The settings in variables `LMCACHE_*`, but the one that names the file."""
    found = []
    for variable in sorted(env):
        if not variable.startswith(PREFIX) or variable == PREFIX + "CONFIG_FILE":
            continue
        name, value = variable.removeprefix(PREFIX).lower(), _plain(env[variable])
        if isinstance(value, Mapping):
            found += [Setting(variable, f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            found.append(Setting(variable, name, value))
    return found


def from_command(words: Sequence[str]) -> list[Setting]:
    """The flags of a command line of LMCache's server, with or without the command before them.

    An adapter's JSON becomes one setting, a mapping. Raises `ConfigError` for JSON that is none.
    """
    if len(words) == 1:
        words = shlex.split(words[0])
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
    return [_flag(name, values) for name, values in flags]


def over(below: list[Setting], above: list[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Both, where `above` wins as the environment does over LMCache's file; and those of `below` that lost."""
    names = {s.name for s in above}
    return [s for s in below if s.name not in names] + above, [s for s in below if s.name in names]


def _flag(name: str, values: list[str]) -> Setting:
    text = " ".join(values)
    if name in ("l2-adapter", "l1-manager"):
        try:
            return Setting(f"--{name}", name, json.loads(text))
        except ValueError as e:
            raise ConfigError(f"--{name} is no JSON ({e}): quote it as for LMCache, '{{\"type\": ...}}'") from None
    if not values:
        off = name.startswith("no-")
        return Setting(f"--{name}", name.removeprefix("no-"), not off)
    return Setting(f"--{name}", name, scalar(text))


def _plain(text: str) -> Any:
    if not text.startswith("{"):
        return scalar(text)
    tree, faults = read_text(f"value: {text}", "")
    return text if faults else tree.value["value"]
