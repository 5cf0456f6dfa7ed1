"""A router for prefill and decode on engines of their own. Needs starlette, uvicorn and httpx.

    python proxy.py PORT PREFILL_URL DECODE_URL

Each request goes to the first engine for one token, and then, with the `kv_transfer_params` that this one answered, to
the second, whose answer is the client's. Where the first engine fails, the second computes the prompt itself.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PREFILL_S = 300.0


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same request for one token, in one piece. It keeps the client's `kv_transfer_params`, such as a tenant."""
    one = {key: value for key, value in body.items() if key not in ("stream", "stream_options", "min_tokens", "n")}
    for key in ("max_tokens", "max_completion_tokens"):
        if key in one or key == "max_tokens":
            one[key] = 1
    return one


def application(prefill: str, decode: str) -> Starlette:
    """The router between these two."""

    @asynccontextmanager
    async def clients(app: Starlette) -> AsyncIterator[None]:
        async with (
            httpx.AsyncClient(base_url=prefill, timeout=PREFILL_S) as app.state.prefill,
            httpx.AsyncClient(base_url=decode, timeout=None) as app.state.decode,
        ):
            yield

    async def complete(request: Request) -> Response:
        body = await request.json()
        try:
            answer = await request.app.state.prefill.post(request.url.path, json=prefill_body(body))
            promised = answer.json().get("kv_transfer_params") if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            promised = None
        if promised:
            body["kv_transfer_params"] = {**(body.get("kv_transfer_params") or {}), **promised}
        client: httpx.AsyncClient = request.app.state.decode
        try:
            reply = await client.send(client.build_request("POST", request.url.path, json=body), stream=True)
        except httpx.HTTPError as error:
            return JSONResponse({"error": f"{decode} does not answer: {error!r}"}, 502)
        headers = {"content-type": reply.headers.get("content-type", "application/json")}
        done = BackgroundTask(reply.aclose)
        return StreamingResponse(reply.aiter_raw(), reply.status_code, headers, background=done)

    async def health(request: Request) -> Response:
        return Response()

    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=clients)


def main() -> None:
    port, prefill, decode = sys.argv[1:]
    uvicorn.run(application(prefill, decode), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
