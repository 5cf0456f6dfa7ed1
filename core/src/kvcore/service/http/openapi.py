"""The OpenAPI document of the endpoints, from their typed models."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvcore import __version__
from kvcore.service.http.routes import Endpoint
from kvcore.service.problems import MEDIA_TYPE, ProblemModel

_REF = "#/components/schemas/{model}"


def document(endpoints: Sequence[Endpoint], loopback: bool) -> dict[str, Any]:
    """OpenAPI 3.1, as plain values."""
    bodies = [(e.body, "validation") for e in endpoints if e.body]
    answers = [(e.answer, "serialization") for e in endpoints if not isinstance(e.answer, str)]
    inputs: list[Any] = list(dict.fromkeys([*bodies, *answers, (ProblemModel, "serialization")]))
    names, defined = models_json_schema(inputs, ref_template=_REF)
    schemas = {tuple(key): schema for key, schema in names.items()}
    paths: dict[str, dict[str, Any]] = {}
    for e in endpoints:
        paths.setdefault(e.path, {})[e.method.lower()] = _operation(e, schemas, loopback)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvcore", "version": __version__, "summary": "A KV cache for LLM inference: what it holds."},
        "paths": paths,
        "components": {
            "schemas": defined.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(e: Endpoint, schemas: dict[Any, Any], loopback: bool) -> dict[str, Any]:
    summary, _, more = e.does.partition(". ")
    protected = e.access == "token" or (e.access == "open" and not loopback)
    refused = {*e.problems, 421, 500, 504}
    refused |= {401, 403} if protected else set()
    refused |= {422} if e.query or e.body else set()
    refused |= {413, 415} if e.body else set()
    if isinstance(e.answer, str):
        content: dict[str, Any] = {e.answer: {"schema": {"type": "object" if "json" in e.answer else "string"}}}
    else:
        content = {"application/json": {"schema": schemas[e.answer, "serialization"]}}
    responses: dict[str, Any] = {str(e.status): {"description": HTTPStatus(e.status).phrase, "content": content}}
    for status in sorted(refused):
        model = content if status == 503 and e.access == "health" else _problem(schemas)
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": model}
    operation: dict[str, Any] = {
        "operationId": e.name,
        "summary": summary.rstrip("."),
        "responses": responses,
        "security": [{"token": []}] if protected else [],
    }
    if more:
        operation["description"] = more
    if parameters := [*_path_parameters(e.path), *(_query_parameters(e.query) if e.query else [])]:
        operation["parameters"] = parameters
    if e.body:
        schema = schemas[e.body, "validation"]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _problem(schemas: dict[Any, Any]) -> dict[str, Any]:
    return {MEDIA_TYPE: {"schema": schemas[ProblemModel, "serialization"]}}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]


def _query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    found = []
    for name, field in schema["properties"].items():
        kept = {k: v for k, v in field.items() if k not in ("title", "description")}
        required = name in schema.get("required", ())
        found.append({"name": name, "in": "query", "required": required, "schema": kept})
        if "description" in field:
            found[-1]["description"] = field["description"]
    return found
