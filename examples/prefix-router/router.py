"""A small router for OpenAI's API: a prompt goes to the engine that has to compute the least of it.

    python router.py --port 8000 --engine http://127.0.0.1:8001,ipc:///run/a.events,ipc:///run/a.replay --engine ...

The cost of an engine is the tokens it would have to compute for this prompt, and those it is computing for others.
`--policy round-robin` ignores what the engines hold.
"""

import argparse
import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from index import EngineIndex
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from streams import Stream

POLICIES = ("prefix", "round-robin")


class Engine:
    """One engine: its address, what it holds, and what it is doing."""

    def __init__(self, url: str, events: str, replay: str) -> None:
        self.url = url
        self.index = EngineIndex()
        self.stream = Stream(events, replay, self.index)
        self.pending_tokens = 0
        self.requests = 0

    def cost(self, prompt: Sequence[int]) -> int:
        """Tokens to compute before this prompt's first token."""
        return len(prompt) - self.index.cached_tokens(prompt) + self.pending_tokens

    @contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """It is computing so many tokens of a prompt."""
        self.pending_tokens += tokens
        try:
            yield
        finally:
            self.pending_tokens -= tokens

    @contextmanager
    def running(self, prompt: Sequence[int]) -> Iterator[None]:
        """It is answering this prompt, and so will hold its blocks."""
        self.requests += 1
        self.index.coming(prompt, 1)
        try:
            yield
        finally:
            self.index.coming(prompt, -1)


class Router:
    """Chooses engines and passes requests on."""

    def __init__(self, engines: list[Engine], policy: str) -> None:
        self.engines = engines
        self._policy = policy
        self._turn = itertools.count()
        self._client = httpx.AsyncClient(timeout=None)

    def choose(self, prompt: Sequence[int]) -> Engine:
        """The engine for a prompt. Of those that cost the same, they take turns."""
        turn = next(self._turn) % len(self.engines)
        in_turn = self.engines[turn:] + self.engines[:turn]
        return in_turn[0] if self._policy == "round-robin" else min(in_turn, key=lambda e: e.cost(prompt))

    async def forward(self, request: Request) -> Response:
        """A completion or a chat completion."""
        body = await request.json()
        prompt = await self._tokens(body)
        engine = self.choose(prompt)
        computing = ExitStack()  # until the first token; the prompt counts as held there until the end
        computing.enter_context(engine.computing(len(prompt) - engine.index.cached_tokens(prompt)))
        running = ExitStack()
        running.enter_context(computing)
        running.enter_context(engine.running(prompt))
        try:
            sent = self._client.build_request("POST", engine.url + request.url.path, json=body)
            answer = await self._client.send(sent, stream=True)
        except BaseException:
            running.close()
            raise

        async def content() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    computing.close()
                    yield part
            finally:
                running.close()
                await answer.aclose()

        headers = {"content-type": answer.headers["content-type"], "x-engine": engine.url}
        return StreamingResponse(content(), answer.status_code, headers)

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        """The prompt as the engines see it: the first engine's tokenizer says so, chat template included."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return prompt
        asked = {k: body[k] for k in ("model", "prompt", "messages", "tools", "chat_template_kwargs") if k in body}
        answer = await self._client.post(self.engines[0].url + "/tokenize", json=asked)
        return list(answer.json()["tokens"]) if answer.status_code == 200 else []

    async def models(self, request: Request) -> Response:
        """As the engines say."""
        answer = await self._client.get(self.engines[0].url + "/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def status(self, request: Request) -> Response:
        """What the router knows of its engines."""
        engines = [
            {"url": e.url, "requests": e.requests, "blocks": len(e.index), "pending_tokens": e.pending_tokens}
            for e in self.engines
        ]
        return JSONResponse({"policy": self._policy, "engines": engines})


def application(router: Router) -> Starlette:
    """The router's API."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(engine.stream.run()) for engine in router.engines]
        yield
        for task in tasks:
            task.cancel()

    return Starlette(
        routes=[
            Route("/v1/completions", router.forward, methods=["POST"]),
            Route("/v1/chat/completions", router.forward, methods=["POST"]),
            Route("/v1/models", router.models),
            Route("/status", router.status),
        ],
        lifespan=lifespan,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Routes prompts to the engine that holds most of them.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--engine", action="append", required=True, help="URL,EVENTS,REPLAY", metavar="ENGINE")
    parser.add_argument("--policy", choices=POLICIES, default="prefix")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    router = Router([Engine(*given.split(",")) for given in options.engine], options.policy)
    print(json.dumps({"policy": options.policy, "engines": options.engine}), flush=True)
    uvicorn.run(application(router), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
