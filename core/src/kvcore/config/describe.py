"""What options a config model has, for people: `kvcore plugins show` and the generated documentation."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel


class Option(NamedTuple):
    """One option. `type` is for people; `default` is as it would be written, meaningless when `required`."""

    name: str
    type: str
    required: bool
    default: Any
    description: str


def options(model: type[BaseModel] | None) -> list[Option]:
    """The options of a model, in the order of their declaration. None has none."""
    if model is None:
        return []
    schema = model.model_json_schema(by_alias=False)
    return [
        Option(
            name,
            _type(schema["properties"].get(name, {}), schema.get("$defs", {})),
            field.is_required(),
            None if field.is_required() else _as_written(model, name),
            " ".join((field.description or "").split()),
        )
        for name, field in model.model_fields.items()
    ]


def _as_written(model: type[BaseModel], name: str) -> Any:
    """The default with its unit, through the field's own serializer."""
    default = model.model_fields[name].get_default(call_default_factory=True)
    holder = model.model_construct(**{name: default})
    return holder.model_dump(mode="json", include={name}, warnings=False)[name]


def _type(prop: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    if "$ref" in prop:
        return _type(defs.get(prop["$ref"].rpartition("/")[2], {}), defs)
    for union in ("anyOf", "oneOf"):
        if union in prop:
            return " or ".join(dict.fromkeys(_type(p, defs) for p in prop[union]))
    if "enum" in prop or "const" in prop:
        return " or ".join(f"`{v}`" for v in prop.get("enum", [prop.get("const")]))
    if prop.get("examples"):
        return "text such as " + ", ".join(f"`{e}`" for e in prop["examples"])
    if prop.get("format") in ("path", "password"):
        return {"path": "path", "password": "secret"}[prop["format"]]
    kind = prop.get("type", "any")
    if kind == "array":
        return f"list of {_type(prop.get('items', {}), defs)}"
    names = {
        "integer": "whole number",
        "boolean": "`true` or `false`",
        "string": "text",
        "object": "mapping",
        "null": "nothing",
    }
    return names.get(str(kind), str(kind))
