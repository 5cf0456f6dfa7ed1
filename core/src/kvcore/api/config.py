"""The base of every plugin's config model, and field types with units. Imports pydantic: keep it out of start-up."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationInfo, WithJsonSchema

from kvcore.api.units import MAX_DURATION_S, MAX_SIZE_BYTES, brief, format_size, parse_duration, parse_size


def _size(value: object, info: ValidationInfo) -> int:
    if info.mode == "python" and type(value) is int and 0 <= value <= MAX_SIZE_BYTES:  # files are checked as JSON
        return value
    return parse_size(value)


def _duration(value: object, info: ValidationInfo) -> float:
    in_code = info.mode == "python" and type(value) is not bool
    if in_code and isinstance(value, int | float) and 0 <= value <= MAX_DURATION_S:
        return float(value)
    return parse_duration(value)


Size = Annotated[
    int,
    BeforeValidator(_size),
    PlainSerializer(lambda n: format_size(n).replace(" ", ""), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["8GiB", "500MB"]}),
]
"""A size in bytes. In a file it has a unit (`8GiB`); in Python code an `int` will do, too."""

Duration = Annotated[
    float,
    BeforeValidator(_duration),
    PlainSerializer(lambda s: f"{s:g}s", return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["200ms", "2s"]}),
]
"""A time in seconds. In a file it has a unit (`200ms`); in Python code a number will do, too."""


class PluginOf(NamedTuple):
    """Marks a field whose value names a plugin of `kind` and its options, so that they are checked with the rest."""

    kind: str


def _spec(value: object, what: str, example: str) -> Any:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Mapping) and isinstance(value.get("plugin"), str):
        return dict(value)
    raise ValueError(
        f"{brief(value)} is not {what}: write a name such as {example}, or {{plugin: NAME, option: value}}"
    )


EvictionSpec = Annotated[
    Any,
    BeforeValidator(partial(_spec, what="an eviction policy", example="lru")),
    PluginOf("eviction"),
    WithJsonSchema({"type": "plugin"}),
]
"""An eviction policy for `Context.make_eviction`: its name, or a mapping with `plugin` and the policy's options."""

StorageSpec = Annotated[
    Any,
    BeforeValidator(partial(_spec, what="a storage", example="disk")),
    PluginOf("storage"),
    WithJsonSchema({"type": "plugin"}),
]
"""A storage for `Context.make_storage`: its name, or a mapping with `plugin` and the storage's options."""


class PluginConfig(BaseModel):
    """Base of a plugin's own options: closed (an unknown key is an error), immutable, every field described."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, use_attribute_docstrings=True)
