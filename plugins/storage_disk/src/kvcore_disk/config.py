"""The options of the disk storage."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from kvcore.api import format_size, parse_size
from kvcore.api.config import EvictionSpec, PluginConfig

AUTO_SHARE = 0.5
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*\Z")


def _parse_capacity(value: object) -> int | str:
    """A size in bytes, or `auto`, or a percentage as written."""
    if value == "auto":
        return "auto"
    if isinstance(value, str) and (match := _PERCENT.match(value)):
        if 0 < float(match[1]) <= 100:
            return f"{match[1]}%"
        raise ValueError(f"{value!r} is not between 0% and 100%")
    try:
        nbytes = parse_size(value)
    except ValueError:
        raise ValueError(
            f"{value!r} is not a capacity: write `auto`, a share such as 80%, or a size such as 50GiB"
        ) from None
    if nbytes < 1:
        raise ValueError(f"{value!r} leaves no room: write `auto`, a share such as 80%, or a size such as 50GiB")
    return nbytes


def _check_path(value: Path) -> Path:
    # Path("") is ".", so an empty value would otherwise fill the current directory with objects.
    if str(value) in ("", "."):
        raise ValueError("an empty path; name a directory such as /var/cache/kvcore")
    return value


Capacity = Annotated[
    int | str,
    BeforeValidator(_parse_capacity),
    PlainSerializer(
        lambda v: v if isinstance(v, str) else format_size(v).replace(" ", ""), return_type=str, when_used="json"
    ),
    WithJsonSchema({"type": "string", "examples": ["auto", "80%", "50GiB"]}),
]


def default_path() -> Path:
    """`kvcore/disk` below `$XDG_CACHE_HOME`, or below `~/.cache` when that is not set to an absolute path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache")) / "kvcore" / "disk"


class DiskConfig(PluginConfig):
    """Options of `storage: disk`."""

    path: Annotated[Path, AfterValidator(_check_path)] = Field(default_factory=default_path)
    """The directory of the objects; made if it is not there. `~` is the home directory. Processes may share it."""

    capacity: Capacity = "auto"
    """The most that objects and writes in flight may occupy: a size (`50GiB`), or a share (`80%`) of what the file
    system has free when the storage opens plus what the cache already holds. `auto` is `50%`."""

    eviction: EvictionSpec = "lru"
    """The policy that chooses what goes when the capacity is reached: a name, or `{plugin: NAME, option: value}`."""

    fsync: bool = False
    """Write each object through to the device before it is published. Without it a power loss may cost recent objects;
    a torn object is never served either way."""

    direct: Literal["auto", "on", "off"] = "auto"
    """O_DIRECT: `auto` uses it where the file system takes it, `on` insists, `off` goes through the page cache."""


def capacity_bytes(capacity: int | str, free_bytes: int, held_bytes: int) -> int:
    """The capacity in bytes, given what the file system has free and what the cache holds now."""
    if isinstance(capacity, int):
        return capacity
    share = AUTO_SHARE if capacity == "auto" else float(capacity.rstrip("%")) / 100
    return int(share * (free_bytes + held_bytes))
