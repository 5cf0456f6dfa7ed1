"""The base of every plugin's config model, and field types with units. Imports pydantic: keep it out of start-up."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from kvcore.api.units import brief, format_size, parse_duration, parse_size

Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(lambda n: format_size(n).replace(" ", ""), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["8GiB", "500MB"]}),
]
"""A size in bytes, written with a unit: `8GiB`."""

Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(lambda s: f"{s:g}s", return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["200ms", "2s"]}),
]
"""A time in seconds, written with a unit: `200ms`."""


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
