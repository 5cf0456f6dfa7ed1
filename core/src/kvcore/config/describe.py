"""What options a config model has, for people: `kvcore plugins show` and the generated documentation."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import to_jsonable_python


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
    schema = model.model_json_schema(by_alias=False, mode="validation")
    found = []
    for name, field in model.model_fields.items():
        prop = schema["properties"].get(name, {})
        default = None
        if not field.is_required():
            default = prop["default"] if "default" in prop else _plain(field.get_default(call_default_factory=True))
        found.append(
            Option(
                name,
                _type(prop, schema.get("$defs", {})),
                field.is_required(),
                default,
                " ".join((field.description or "").split()),
            )
        )
    return found


def _plain(value: Any) -> Any:
    return to_jsonable_python(value, fallback=str)


def _type(prop: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    if "$ref" in prop:
        return _type(defs.get(prop["$ref"].rpartition("/")[2], {}), defs)
    for union in ("anyOf", "oneOf"):
        if union in prop:
            return " or ".join(dict.fromkeys(_type(p, defs) for p in prop[union]))
    if "enum" in prop or "const" in prop:
        return " or ".join(f"`{v}`" for v in prop.get("enum", [prop.get("const")]))
    if prop.get("examples"):
        return "such as " + ", ".join(f"`{e}`" for e in prop["examples"])
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
    return names.get(kind, kind)
