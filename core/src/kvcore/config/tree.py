"""The loose configuration: plain values, and where each of them was written."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvcore.api.errors import ConfigError
from kvcore.api.units import brief

Path = tuple[str | int, ...]

MAX_DEPTH = 32
"""Levels below the root, in a file or set one by one."""
MAX_INT = (1 << 63) - 1
SHORT: Mapping[Path, str] = {("server",): "url", ("server", "http"): "listen", ("plugins", "run"): "path"}
"""What a mapping's only text stands for, where that is not `plugin`. Of a list, in each of its entries."""
NO_TEXT = "not valid Unicode text: write it in UTF-8"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from. `name` is the file, the variable or the flag; lines and columns count from 1.

    `key` is the position of the value's key in a file, where it has one.
    """

    kind: Literal["file", "environment", "flag", "default"]
    name: str = ""
    line: int = 0
    column: int = 0
    key: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.name}:{self.line}:{self.column}" if self.line else self.name
        return f"{self.kind} {abridged(self.name)}".strip()

    def at_key(self) -> str:
        """As `str`, but pointing at the key."""
        return f"{self.name}:{self.key[0]}:{self.key[1]}" if self.key else str(self)


DEFAULT = Source("default")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: its place (`kvcore.yaml:3:9`), its path (`l2[0].storage.path` or empty) and what."""

    place: str
    path: str
    text: str

    def __str__(self) -> str:
        path = "" if self.place == f"flag {self.path}" else self.path  # a flag is named by its path
        return ": ".join(part for part in (self.place, path, self.text) if part)


class InvalidConfigError(ConfigError):
    """Every fault of a configuration, one a line, in the order of the file."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = sorted(dict.fromkeys(faults), key=_position)
        super().__init__("\n".join(map(str, self.faults)))


def _position(fault: Fault) -> tuple[int, int]:
    match = re.search(r":(\d+):(\d+)\Z", fault.place)
    return (int(match[1]), int(match[2])) if match else (sys.maxsize, 0)


class Row(NamedTuple):
    """One value of a loaded configuration, for people: secrets are masked, sizes and durations have units."""

    path: str
    value: Any
    source: Source


@dataclass
class Tree:
    """Values, and the source of each path that was written. `texts` holds the raw text of values that came as text from
    the environment or a flag, in case the type wants text where YAML reads a number."""

    value: Any = field(default_factory=dict)
    sources: dict[Path, Source] = field(default_factory=dict)
    texts: dict[Path, str] = field(default_factory=dict)

    def source(self, path: Path) -> Source:
        """Of `path` itself, or of the nearest thing around it that was written."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.sources:
                return self.sources[path[:length]]
        return DEFAULT

    def set(self, path: Path, value: Any, source: Source, text: str | None = None) -> str | None:
        """Put `value` at `path`, replacing what is there. Returns what is wrong with the path, or None.

        A plugin written as a bare name becomes `{plugin: name}` when an option is set below it, a server `{url: ...}`.
        """
        if len(path) > MAX_DEPTH:
            return f"is nested deeper than {MAX_DEPTH} levels"
        if not isinstance(self.value, dict):
            self.value = {}
        at: Any = self.value
        for depth, part in enumerate(path):
            last = depth == len(path) - 1
            if isinstance(at, list):
                if not isinstance(part, int):
                    return f"{show(path[:depth])} is a list: {part!r} is no index"
                if part > len(at):
                    return f"{show(path[:depth])} has {len(at)} entries: the next index is {len(at)}, not {part}"
                if part == len(at):
                    at.append(None)
            elif isinstance(part, int):
                return f"{show(path[:depth])} is no list, so it has no entry {part}"
            if last:
                at[part] = value
                break
            child = at.get(part) if isinstance(at, dict) else at[part]
            if isinstance(child, str):
                name = SHORT.get(tuple(p for p in path[: depth + 1] if isinstance(p, str)), "plugin")
                child = {name: child}
                self.sources[(*path[: depth + 1], name)] = self.source(path[: depth + 1])
            elif not isinstance(child, dict | list):
                child = [] if isinstance(path[depth + 1], int) else {}
            at[part] = child
            at = child
        self.forget(path)
        self.sources[path] = source
        if text is not None:
            self.texts[path] = text
        self._mark(path, value, source)
        return None

    def forget(self, path: Path) -> None:
        """That anything was written there."""
        for table in (self.sources, self.texts):
            for old in [p for p in table if p[: len(path)] == path]:
                del table[old]

    def _mark(self, path: Path, value: Any, source: Source) -> None:
        items: Any = (
            value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        )
        for part, child in items:
            self.sources[(*path, part)] = source
            self._mark((*path, part), child, source)


def abridged(name: str) -> str:
    """A name for an error's text, where nobody reads thousands of characters."""
    return name if len(name) <= 200 else f"{name[:100]}... ({len(name)} characters)"


def is_text(value: str) -> bool:
    """Whether it can be written down: bytes of the environment that are no UTF-8, or `"\\ud800"` in YAML, cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in value)


def show(path: Path) -> str:
    """`l2[0].storage.path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def parse_path(text: str) -> Path:
    """The path that `show` writes. Raises `ValueError`."""
    if not isinstance(text, str) or not re.fullmatch(r"[A-Za-z_][\w-]*(\[\d{1,9}\]|\.\w[\w-]*)*", text):
        raise ValueError(f"{brief(text)} is no path: write it like l1.size or l2[0].storage.path")
    return tuple(int(i) if i else name for i, name in re.findall(r"\[(\d+)\]|([\w-]+)", text))
