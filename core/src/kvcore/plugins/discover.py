"""What is installed, read from metadata alone. Nothing here imports a plugin."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, Literal

from kvcore.api.hooks import GROUPS
from kvcore.plugins.known import BUILTINS, CORE

Status = Literal["ready", "blocked", "clash", "reserved"]


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One installed plugin, as its metadata tells it.

    Args:
        kind: `storage`, `serde`, `eviction`, `keys`, `engine` or `hooks`.
        name: the name in YAML.
        distribution: the package that brings it, and its `version`.
        module: the entry point's target.
        builtin: it belongs to the core, so its name is reserved.
        status: `ready`; `blocked` by the allow or block list; `clash` (several distributions give the name: write
            `name@distribution`); `reserved` (a built-in has the name, so this one cannot be selected).
    """

    kind: str
    name: str
    distribution: str
    version: str
    module: str
    builtin: bool
    status: Status

    @property
    def label(self) -> str:
        """`disk (kvcore-disk 0.1.0)`."""
        return f"{self.name} ({self.distribution} {self.version})"

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON form: `{kind, name, distribution, version, module, builtin, status}`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry point and the distribution it stands in. `dist` is None for the core run from a source tree."""

    kind: str
    entry: EntryPoint
    distribution: str
    version: str
    dist: Distribution | None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def builtin(self) -> bool:
        return normalize(self.distribution) == CORE

    @property
    def label(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


def normalize(distribution: str) -> str:
    """A distribution's name as indexes compare it: `KVCore_Disk` is `kvcore-disk`."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def scan(path: list[str] | None = None) -> tuple[list[Candidate], list[str]]:
    """Every plugin on `path` (default `sys.path`), and what was wrong with metadata that had to be passed over.

    A distribution found twice counts once, the first on the path, which is the one that would be imported.
    """
    kinds = {group: kind for kind, group in GROUPS.items()}
    found: list[Candidate] = []
    problems: list[str] = []
    seen: set[str] = set()
    for dist in distributions(path=path) if path is not None else distributions():
        key = _key(dist)
        if key in seen:
            continue
        if key:
            seen.add(key)
        try:
            text = dist.read_text("entry_points.txt") or ""
            if "kvcore." not in text:
                continue
            entries = dist.entry_points
            # Without a default, to ask for one that is not there is deprecated.
            name, version = (dist.metadata.get_all(field, [""])[0] for field in ("Name", "Version"))
        except Exception as e:  # other people's metadata; one broken package must not stop the rest
            problems.append(f"metadata of {key or dist} cannot be read: {e}")
            continue
        if not name or not version:
            problems.append(f"metadata of {key or dist} has no name or version: its plugins are not used")
            continue
        for entry in entries:
            if entry.group in kinds:
                found.append(Candidate(kinds[entry.group], entry, name, version, dist))
            elif entry.group.startswith("kvcore."):
                problems.append(
                    f"{name} {version} has entry points in {entry.group!r}, which is no plugin kind: "
                    f"the groups are {', '.join(kinds)}"
                )
    if not any(c.builtin for c in found):
        found += list(_source_tree())
    return _unique(found), problems


def _key(dist: Distribution) -> str:
    # What importlib.metadata itself compares; it comes from the folder's name, without reading the metadata.
    name = getattr(dist, "_normalized_name", None) or dist.name
    return normalize(name) if name else ""


def _source_tree() -> Iterable[Candidate]:
    from kvcore import __version__

    for kind, names in BUILTINS.items():
        for name, module in names.items():
            yield Candidate(kind, EntryPoint(name, module, GROUPS[kind]), CORE, __version__, None)


def _unique(found: list[Candidate]) -> list[Candidate]:
    """Sorted, without a line that a distribution has written twice."""
    by_line = {(c.kind, c.name, normalize(c.distribution), c.entry.value): c for c in found}
    return [by_line[line] for line in sorted(by_line)]
