"""An endpoint's whole description, from which its route and its place in `/openapi.json` are made."""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcore.api import KVCoreError
from kvcore.l2.threads import DeadlineExceeded
from kvcore.observe import logger
from kvcore.service.http.guard import MAX_BODY_BYTES, authorize, body
from kvcore.service.problems import FaultModel, Problem

Access = Literal["health", "open", "token"]
"""`health`: always. `open`: without a token, where only this machine can ask. `token`: with the token."""


class Call(NamedTuple):
    """What a request says: the parts of its path, its query and its body, validated."""

    path: Mapping[str, str]
    query: Any
    body: Any


@dataclass(frozen=True)
class Endpoint:
    """One method of one path.

    Args:
        pattern: its path with `{name}` for a part, `{name:path}` for one that may hold a `/`.
        does: a sentence; more may follow.
        handler: answers with an `answer`, or with a response of its own.
        answer: the model, or the media type of what is no JSON.
        problems: statuses of its own problems.
        most_bytes: of a body. The token, where one is needed, is asked for before it is read.
    """

    method: str
    pattern: str
    does: str
    handler: Callable[[Call], Awaitable[BaseModel | Response]]
    answer: type[BaseModel] | str
    access: Access = "open"
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    status: int = 200
    problems: tuple[int, ...] = ()
    most_bytes: int = MAX_BODY_BYTES

    @property
    def path(self) -> str:
        """As it is written in the document."""
        return re.sub(r":\w+}", "}", self.pattern)

    @property
    def name(self) -> str:
        """A unique word: `get_tiers`, `delete_tiers_name`."""
        return "_".join([self.method.lower(), *re.findall(r"\w+", self.path)])


def route(endpoint: Endpoint, token: str | None, loopback: bool) -> Route:
    """The route that checks, validates and answers."""
    protected = endpoint.access == "token" or (endpoint.access == "open" and not loopback)

    async def answer(request: Request) -> Response:
        try:
            if protected:
                authorize(request, token)
            query = _query(endpoint.query, request) if endpoint.query else None
            given = _parse(endpoint.body, await body(request, endpoint.most_bytes)) if endpoint.body else None
            found = await endpoint.handler(Call(request.path_params, query, given))
        except Problem as problem:
            return problem.response()
        except (DeadlineExceeded, TimeoutError) as error:
            return Problem(504, "took-too-long", f"not done in time: {error}").response()
        except KVCoreError as error:
            return Problem(422, "refused", str(error)).response()
        except Exception:
            logger.exception("%s %s failed", endpoint.method, endpoint.path)
            return Problem(500, "internal", "a bug: the server's log has more").response()
        if isinstance(found, Response):
            return found
        return Response(found.model_dump_json(), endpoint.status, media_type="application/json")

    return Route(endpoint.pattern, answer, methods=[endpoint.method], name=endpoint.name)


async def http_problem(request: Request, error: Exception) -> Response:
    """What Starlette refuses by itself: an unknown path, another method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        text = f"{request.url.path} takes {allowed}, not {request.method}: see /openapi.json"
        return Problem(405, "method", text, headers={"Allow": allowed}).response()
    text = f"there is no {request.url.path!r:.200}: /openapi.json lists what there is"
    return Problem(error.status_code, "not-found", text).response()


def _query(model: type[BaseModel], request: Request) -> BaseModel:
    items = request.query_params.multi_items()
    twice = sorted(name for name, count in Counter(name for name, _ in items).items() if count > 1)
    if twice:
        faults = [FaultModel(where=f"query.{name}", detail="is given twice") for name in twice]
        raise Problem(422, "wrong-query", f"given twice: {', '.join(twice)}", faults=faults)
    try:
        return model.model_validate(dict(items))
    except ValidationError as error:
        raise _refused("query", error) from error


def _parse(model: type[BaseModel], data: bytes) -> BaseModel:
    try:
        return model.model_validate_json(data or b"{}", strict=True)
    except ValidationError as error:
        raise _refused("body", error) from error


def _refused(part: str, error: ValidationError) -> Problem:
    faults = []
    for e in error.errors(include_url=False, include_input=False):
        where = ".".join([part, *map(str, e["loc"])])
        text = str(e["ctx"]["error"]) if e["type"] == "value_error" else e["msg"].replace("Input should be", "must be")
        faults.append(FaultModel(where=where, detail=text[:500]))
    return Problem(422, f"wrong-{part}", "; ".join(f"{f.where}: {f.detail}" for f in faults[:5]), faults=faults[:50])
