"""What a conversion makes: the new configuration, and a line about every setting that was there before."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvcore.config.tree import MAX_INT
from kvcore.config.yaml_file import read_text

Verdict = Literal["kept", "changed", "left out"]
GIB = 1 << 30
_SECRET = re.compile(
    r"passw|passphrase|secret|credential|authorization|connection_string|(api|access|account)key"
    r"|(?<![a-z])(auth|key|keys|pass|pwd|token)(?![a-z])(?!_prefix)|(\A|\.)tokens\Z"
)
_BRACKETS = re.compile(r"\A\s*[\[{]|\{\s*[\"']")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_URL = (  # a `?` before an `@` may be part of the password, or the `@` one of the query
    (re.compile(r"://\S*[?#]\S*@\S*"), "://***"),
    (re.compile(r"(://[^?#\s]*)[?#]\S+"), r"\1?***"),
    (re.compile(r"(://[^:@\s]*:)\S+@"), r"\1***@"),
)
_ORDER = ("l1", "chunk_tokens", "lookup_timeout", "server", "l2", "plugins", "metrics_port", "log_level")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of LMCache's configuration.

    Attributes:
        place: where it stands: `lmcache.yaml:3`, `LMCACHE_CHUNK_SIZE`, `--l1-size-gb`, or `default`.
        name: LMCache's name, such as `chunk_size` or `extra_config.s3_region`.
        written: how it stands there, where that is another name.
    """

    place: str
    name: str
    value: Any
    written: str = ""

    @property
    def shown(self) -> str:
        """As it was written; secrets masked."""
        name = self.written or self.name
        return f"{name}: {_masked(name, self.value)}"

    def named(self, name: str) -> "Setting":
        """The same by another of LMCache's names."""
        return self if name == self.name else replace(self, name=name, written=self.written or self.name)


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one setting: kept as `became`, changed to it, or left out, and why."""

    setting: Setting
    verdict: Verdict
    became: str = ""
    why: str = ""

    def __str__(self) -> str:
        became = f" -> {self.became}" if self.became else ""
        why = f"  ({self.why})" if self.why else ""
        return f"{self.verdict:9} {self.setting.place}  {self.setting.shown}{became}{why}"


@dataclass(slots=True)
class Draft:
    """The configuration in the making. `lines` has one or more lines for each setting."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def keep(self, setting: Setting, path: str, value: Any, why: str = "") -> None:
        """The same in kvcore: set it."""
        self._set(setting, "kept", path, value, why)

    def change(self, setting: Setting, path: str, value: Any, why: str) -> None:
        """Something else in kvcore that serves the purpose: set it."""
        self._set(setting, "changed", path, value, why)

    def serves(self, setting: Setting, became: str, why: str = "", verdict: Verdict = "kept") -> None:
        """Part of what another setting has become."""
        self.lines.append(Line(setting, verdict, became, why))

    def default(self, setting: Setting, became: str, why: str = "") -> None:
        """What kvcore does anyway, so that the file need not say it."""
        self.lines.append(Line(setting, "kept", became, f"the default: {why}" if why else "the default"))

    def leave(self, setting: Setting, why: str) -> None:
        """There is nothing like it in kvcore."""
        self.lines.append(Line(setting, "left out", "", why))

    def tier(self, plugin: str) -> str:
        """Add a tier; the path of its storage."""
        tiers = self.values.setdefault("l2", [])
        tiers.append({"storage": {"plugin": plugin}})
        return f"l2[{len(tiers) - 1}].storage"

    def put(self, path: str, value: Any) -> None:
        """Set a value of the new configuration."""
        at: Any = self.values
        *way, last = path.replace("[", ".[").split(".")
        for step in way:
            at = at[int(step[1:-1])] if step.startswith("[") else at.setdefault(step, {})
        at[last] = value

    def ordered(self) -> dict[str, Any]:
        """The configuration, its parts in the order in which people read them."""
        return {name: self.values[name] for name in _ORDER if name in self.values}

    def _set(self, setting: Setting, verdict: Verdict, path: str, value: Any, why: str) -> None:
        if isinstance(value, str) and _url(value) != value:
            self.leave(setting, f"{path} may hold no login and no query: secrets stay out of the file")
            return
        self.put(path, value)
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        self.lines.append(Line(setting, verdict, f"{path}: {shown}", why))


def size(nbytes: float) -> str:
    """Bytes with the largest unit that says them exactly."""
    whole = round(nbytes)
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if whole and whole % unit == 0:
            return f"{whole // unit}{name}"
    return f"{whole}B"


def gib(value: Any) -> str | None:
    """A number of GiB, which LMCache calls GB, as a size; None when it is no number above 0."""
    number = as_number(value)
    return size(number * GIB) if number is not None and 0 < number <= MAX_INT / GIB else None


def as_number(value: Any) -> float | None:
    """A number, also when it was written as text; none that kvcore has no room for."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= MAX_INT else None


def yes(value: Any) -> bool:
    """As LMCache reads a truth value."""
    return value is True or str(value).lower() in ("true", "1", "yes", "on")


def is_secret(name: str) -> bool:
    """Whether what has this name may be one: `encryption_key`, `authToken`; no `chunk_tokens`."""
    return _SECRET.search(_HUMP.sub("_", name).lower()) is not None


def parsed(text: str) -> Any:
    """What YAML or JSON, which begins with a bracket, says. `...` when it says nothing: it may hold a secret."""
    tree, faults = read_text(f"value: {text}", "")
    return "..." if faults else tree.value["value"]


def _masked(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_secret(name):
        return "***"
    if isinstance(value, Mapping):
        # A variable of a container: {name: HF_TOKEN, value: ...}
        own = {"value": str(value["name"])} if "name" in value else {}
        return {key: _masked(own.get(key, str(key)), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked("", inner) for inner in value]
    if not isinstance(value, str):
        return value
    if name == "extra_config" or _BRACKETS.search(value):
        inside = parsed(value)
        if not isinstance(inside, Mapping | list):
            return "..."
        masked = _masked("", inside)
        return value if masked == inside else masked
    return _url(value)


def _url(text: str) -> str:
    for pattern, shown in _URL:
        text = pattern.sub(shown, text)
    return text
