"""Where LMCache's settings come from: a YAML file, the environment, or a command line; and what they are together."""

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.api import ConfigError
from kvcore.config.tree import Fault, Tree
from kvcore.config.yaml_file import read_text, scalar, text_of
from kvcore_from_lmcache.draft import Setting, parsed

PREFIX = "LMCACHE_"
FILE = PREFIX + "CONFIG_FILE"
MANY = ("l2-adapter", "l1-manager")
"""Flags that may stand there several times."""
AGAIN = "the same again"
ANOTHER = "another LMCache's: convert it by itself"


@dataclass(slots=True)
class Found:
    """The settings of an LMCache, by who reads them.

    Attributes:
        engine: keys of the YAML, for LMCache inside an engine's process.
        server: flags of its server.
        connector: keys for the engine's side of that server.
        beside: what stands there too and is none of its settings, or has no effect; and why.
        start: the engine's command without LMCache, from `kvcore run` on. Empty where there is none.
    """

    engine: list[Setting] = field(default_factory=list)
    server: list[Setting] = field(default_factory=list)
    connector: list[Setting] = field(default_factory=list)
    beside: list[tuple[Setting, str]] = field(default_factory=list)
    start: list[str] = field(default_factory=list)

    def all(self) -> list[Setting]:
        """All that was read."""
        return [*self.engine, *self.server, *self.connector, *(setting for setting, _ in self.beside)]

    def add(self, other: "Found") -> None:
        """What another place of the same sources says: the first word counts."""
        for mine, others in zip((self.engine, self.server, self.connector), other.lists(), strict=True):
            before = {(s.name, str(s.value)) for s in mine}
            names = {s.name for s in mine}
            for setting in others:
                if (setting.name, str(setting.value)) in before:
                    self.beside.append((setting, AGAIN))
                elif setting.name in names:
                    self.beside.append((setting, ANOTHER))
                else:
                    mine.append(setting)
        self.beside += other.beside
        self.start = self.start or other.start

    def lists(self) -> tuple[list[Setting], list[Setting], list[Setting]]:
        """Those that are converted."""
        return self.engine, self.server, self.connector


def read_trees(path: str) -> list[Tree]:
    """The documents of a YAML (or JSON) file, each with its lines. Raises `ConfigError`."""
    if _is_special(path):
        raise ConfigError(f"{path} is no regular file: give a YAML file, or /dev/stdin")
    text = text_of(path)
    if isinstance(text, Fault):
        raise ConfigError(str(text))
    trees = []
    for piece in _documents(text):
        tree, faults = read_text(piece, path)
        if faults:
            raise ConfigError("\n".join(map(str, faults)))
        trees.append(tree)
    return trees


def settings_of(tree: Tree, place: str, below: int = 0) -> list[Setting]:
    """The settings in LMCache's YAML, which begins `below` so many lines of the place's file."""
    found = []
    for key, value in tree.value.items():
        inner = isinstance(value, Mapping) and len(value) > 0  # an empty one is a setting, too
        for name, plain, at in (
            ((f"{key}.{k}", v, (key, k)) for k, v in value.items()) if inner else ((key, value, (key,)),)
        ):
            found.append(Setting(f"{place}:{below + line_of(tree, at)}", str(name), plain))
    return found


def line_of(tree: Tree, path: tuple[str | int, ...]) -> int:
    """Where this value's key stands."""
    source = tree.sources[path]
    return source.key[0] if source.key else source.line


def from_environment(env: Mapping[str, str], places: Mapping[str, str] | None = None) -> list[Setting]:
    """The settings in variables `LMCACHE_*`, but the one that names the file."""
    found = []
    for variable in env if places is not None else sorted(env):
        if not variable.startswith(PREFIX) or variable == FILE:
            continue
        name, value = variable.removeprefix(PREFIX).lower(), _plain(env[variable])
        place = (places or {}).get(variable, variable)
        if isinstance(value, Mapping):
            found += [Setting(place, f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            found.append(Setting(place, name, value))
    return found


def over(below: list[Setting], above: list[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Both, where `above` wins as the environment does over LMCache's file; and those of `below` that lost."""
    names = {s.name for s in above}
    return [s for s in below if s.name not in names] + above, [s for s in below if s.name in names]


def _is_special(path: str) -> bool:
    """A device or a named pipe, which may keep its reader waiting for ever. What a shell hands over is none."""
    if path.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/")):
        return False
    try:
        mode = Path(path).expanduser().stat().st_mode
    except (OSError, RuntimeError, ValueError):  # reading it says why
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _documents(text: str) -> list[str]:
    """A file's YAML documents, each with as many empty lines before it as there are lines."""
    lines = text.split("\n")
    cuts = [i for i, line in enumerate(lines) if line.split(" ")[0].rstrip() == "---"]
    starts = [0, *(cut + 1 for cut in cuts)]
    pieces = ["\n" * start + "\n".join(lines[start:end]) for start, end in zip(starts, [*cuts, None], strict=True)]
    return [piece for piece in pieces if any(_says(line) for line in piece.split("\n"))] or [text]


def _says(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _plain(text: str) -> Any:
    return parsed(text) if text.startswith("{") else scalar(text)
