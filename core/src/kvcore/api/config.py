"""The base of every plugin's config model, and field types with units. Imports pydantic: keep it out of start-up."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from kvcore.api.units import format_size, parse_duration, parse_size

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


class PluginConfig(BaseModel):
    """Base of a plugin's own options: closed (an unknown key is an error), immutable, every field described."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, use_attribute_docstrings=True)
