"""The strict pass: a closed pydantic model over a part of the tree, and its errors in our words."""

import json
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from kvcore.api.units import brief
from kvcore.config.overlay import OTHER_VARIABLES, PREFIX
from kvcore.config.tree import NO_TEXT, Fault, Path, Source, Tree, show
from kvcore.plugins.registry import PluginSpec, nearest

Model = TypeVar("Model", bound=BaseModel)

_HIDDEN = "a hidden value"
_TYPES = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "path_type": "must be a path",
}
_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of", "finite_number"}
"""Errors of a value that is of the right type."""


def validate(
    model: type[Model],
    data: Any,
    tree: Tree,
    faults: list[Fault],
    *,
    prefix: Path = (),
    context: Mapping[str, Any] | None = None,
) -> Model | None:
    """`data` as a `model`, or None with every error added to `faults`. `prefix` is the path of `data` in the tree.

    Validation is strict (no "256" for 256, no 1 for true), as for JSON. Values that came as text from the
    environment or a flag are tried as YAML reads them, and once more as the text itself.
    """
    try:
        return _parse(model, data, context)
    except ValidationError as e:
        first = e
    data = _with_texts(data, prefix, tree, first)
    try:
        return _parse(model, data, context)
    except ValidationError as e:
        faults += _faults(e, model, data, prefix, tree)
        return None


def _parse(model: type[Model], data: Any, context: Mapping[str, Any] | None) -> Model:
    return model.model_validate_json(json.dumps(data, default=str), strict=True, context=dict(context or {}))


def _with_texts(data: Any, prefix: Path, tree: Tree, error: ValidationError) -> Any:
    data = json.loads(json.dumps(data, default=str))
    wrong: dict[Path, set[str]] = {}
    for e in error.errors(include_url=False, include_input=False):
        wrong.setdefault(_real_path(e["loc"], data, e["type"] == "missing"), set()).add(e["type"])
    for path, kinds in wrong.items():
        text = tree.texts.get((*prefix, *path))
        if text is not None and path and not kinds <= _BOUNDS:
            holder = data
            for part in path[:-1]:
                holder = holder[part]
            holder[path[-1]] = text
    return data


def _real_path(loc: tuple[Any, ...], data: Any, missing: bool) -> Path:
    """`loc` without the steps that pydantic adds for unions and validators."""
    path: list[str | int] = []
    for i, part in enumerate(loc):
        if (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and type(part) is int and 0 <= part < len(data)
        ):
            data = data[part]
            path.append(part)
        elif missing and i == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _faults(error: ValidationError, model: type[BaseModel], data: Any, prefix: Path, tree: Tree) -> list[Fault]:
    by_path: dict[Path, list[Any]] = {}
    for e in error.errors(include_url=False):
        by_path.setdefault(_real_path(e["loc"], data, e["type"] == "missing"), []).append(e)
    found = []
    for path, errors in by_path.items():
        full = (*prefix, *path)
        # Of a union's members, those that got furthest say the most.
        texts = list(dict.fromkeys(_text(e, model, path) for e in errors))
        source = tree.source(full)
        if errors[0]["type"] == "value_error":  # of a mapping: what overrides the file is what was last written
            source = _overriding(tree, full) or source
        extra = errors[0]["type"] == "extra_forbidden"
        given = "" if errors[0]["type"] == "missing" else _given(data, model, path)
        text = " or ".join(texts)
        if extra:
            # What a variable of no option holds is not ours to print: secrets are kept in variables.
            told = "" if source.kind == "environment" else f", given {given}"
            text = f"no such option{told}{_unknown(model, path, full, tree)}"
        elif given and errors[0]["type"] != "value_error":
            text += f", given {given}"
        found.append(Fault(source.at_key() if extra else str(source), show(full), text))
    return found


def _overriding(tree: Tree, path: Path) -> Source | None:
    """A flag, or else a variable, that has set something below `path`."""
    below = [s for p, s in tree.sources.items() if p[: len(path)] == path and len(p) > len(path)]
    return next((s for kind in ("flag", "environment") for s in below if s.kind == kind), None)


def _text(error: Any, model: type[BaseModel], path: Path) -> str:
    kind, ctx = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is missing" + _about(model, path)
    if kind == "value_error":
        text = str(ctx.get("error", error["msg"]))
        secret = error.get("input")
        return text.replace(secret, "***") if _secret(model, path) and isinstance(secret, str) and secret else text
    if kind == "json_invalid":  # a key; values are looked at where they are read
        return f"holds a name that is {NO_TEXT}"
    if kind in ("too_short", "too_long") and _secret(model, path):
        least, most = ctx.get("min_length"), ctx.get("max_length")
        wanted = f"at least {least}" if kind == "too_short" else f"at most {most}"
        return f"must have {wanted} characters, not {ctx['actual_length']}"
    if kind == "too_long":
        return f"has {ctx['actual_length']} entries, at most {ctx['max_length']} are possible"
    if kind in ("literal_error", "enum"):
        return f"must be {ctx['expected']}"
    if kind in ("model_type", "model_attributes_type"):
        return getattr(_model_at(model, path), "written", "must be a mapping")
    text = _TYPES.get(kind) or error["msg"].replace("Input should be", "must be")
    if kind == "string_type" and isinstance(error["input"], int | float):
        text += " (put it in quotes)"
    if kind in ("list_type", "tuple_type") and isinstance(error["input"], str):
        text += f" (write [{error['input']}])" if not _secret(model, path) else ""
    return str(text)


def _unknown(model: type[BaseModel], path: Path, full: Path, tree: Tree) -> str:
    holder = _model_at(model, path[:-1])
    allowed = sorted(holder.model_fields) if holder else []
    text = f"; allowed: {', '.join(allowed) or 'none'}"
    if tree.source(full).kind == "environment":
        hint = _variable(model, full, allowed)
    else:
        near = nearest(str(path[-1]), allowed)
        hint = repr(near) if near else None
    return f"{text}; did you mean {hint}?" if hint else text


def _variable(model: type[BaseModel], full: Path, allowed: list[str]) -> str | None:
    """The variable that was meant: the nearest name, or one with `__` where a single `_` was written."""
    *above, name = map(str, full)
    near = None
    if not above:
        near = _with_levels(model, name)
        allowed = [*allowed, *(v.removeprefix(PREFIX).lower() for v in OTHER_VARIABLES)]
    near = near or nearest(name, allowed)
    return PREFIX + "__".join((*above, near)).upper() if near else None


def _with_levels(model: type[BaseModel], name: str) -> str | None:
    """`l1__size` for `l1_size`, `l2__0__storage__path` for `l2_0_storage_path`; None when no field begins the name."""
    for field in sorted(model.model_fields, key=len, reverse=True):
        rest = name.removeprefix(field).lstrip("_")
        if not rest or not name.startswith(f"{field}_"):
            continue
        annotation = model.model_fields[field].annotation
        if annotation is PluginSpec:
            return f"{field}__{rest}"
        listed = not _models(annotation)
        inner = _model_at(model, (field, 0) if listed else (field,))
        if inner is None:
            continue
        levels = [field]
        if listed:
            index, _, below = rest.partition("_")
            levels.append(index if index.isdecimal() and below else "0")
            rest = below.lstrip("_") if index.isdecimal() and below else rest
        return "__".join([*levels, _with_levels(inner, rest) or nearest(rest, inner.model_fields) or rest])
    return None


def _about(model: type[BaseModel], path: Path) -> str:
    holder = _model_at(model, path[:-1])
    field = holder.model_fields.get(str(path[-1])) if holder and path else None
    return f": {' '.join(field.description.split())}" if field is not None and field.description else ""


def _given(value: Any, model: type[BaseModel], path: Path) -> str:
    for part in path:
        value = value[part]
    if _secret(model, path):
        return _HIDDEN
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return brief(value)


def _secret(model: type[BaseModel], path: Path) -> bool:
    """Whether the value at `path` is a secret, or an unknown option that may be a misspelt one."""
    for length in range(1, len(path) + 1):
        holder = _model_at(model, path[: length - 1])
        if holder is None:
            return False
        name = str(path[length - 1])
        secrets = {n for n, f in holder.model_fields.items() if _mentions(f.annotation, (SecretStr, SecretBytes))}
        if name in secrets:
            return True
        if name not in holder.model_fields and (secrets or any(w in name.lower() for w in ("secret", "pass", "token"))):
            return True
    return False


def _mentions(annotation: Any, types: tuple[type[Any], ...]) -> bool:
    return annotation in types or any(_mentions(a, types) for a in get_args(annotation))


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model that the value at `path` has, where that is one model."""
    annotation: Any = model
    for part in path:
        models = list(_models(annotation))
        if isinstance(part, int):
            annotation = _item(annotation)
        elif models and part in models[0].model_fields:
            annotation = models[0].model_fields[part].annotation
        else:
            annotation = _item(annotation)
    return next(iter(_models(annotation)), None)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [m for a in get_args(annotation) for m in _models(a)]
    return []


def _item(annotation: Any) -> Any:
    """What a list, a tuple or a mapping holds."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return next((i for a in get_args(annotation) if (i := _item(a)) is not None), None)
    arguments = [a for a in get_args(annotation) if a is not Ellipsis]
    return arguments[-1] if arguments else None
