"""A client that believes nothing: what comes back must be what `/openapi.json` promises."""

import http.client
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator

from kvcore.service.http import HttpServer

TOKEN = "correct horse battery"


class Answer(NamedTuple):
    status: int
    body: Any
    """JSON as plain values, else text."""
    headers: Mapping[str, str]


class Client:
    """Asks `server`; `token` None sends none."""

    def __init__(self, server: HttpServer, token: str | None = TOKEN) -> None:
        self.server = server
        self.token = token
        self.api = json.loads(self.raw("GET", "/openapi.json")[1])

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, body: Any) -> Answer:
        return self.ask("POST", path, body)

    def delete(self, path: str) -> Answer:
        return self.ask("DELETE", path)

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        data = None if body is None else json.dumps(body)
        status, text, headers = self.raw(method, path, data, {"Content-Type": "application/json"} if data else {})
        kind = headers["content-type"].partition(";")[0]
        answer = Answer(status, json.loads(text) if "json" in kind else text.decode(), headers)
        self._check(method, path.partition("?")[0], answer, headers["content-type"])
        return answer

    def raw(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = {}
    ) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        given = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            connection.request(method, path, body, given | dict(headers))
            response = connection.getresponse()
            return response.status, response.read(), {k.lower(): v for k, v in response.getheaders()}
        finally:
            connection.close()

    def _check(self, method: str, path: str, answer: Answer, kind: str) -> None:
        if answer.status in (404, 405) and answer.body["type"] in ("urn:kvcore:not-found", "urn:kvcore:method"):
            return  # no operation of the document
        (operation,) = (
            operations[method.lower()]
            for template, operations in self.api["paths"].items()
            if re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path) and method.lower() in operations
        )
        promised = operation["responses"][str(answer.status)]["content"]
        schema = promised[kind]["schema"]
        if isinstance(answer.body, str):
            return
        if answer.status >= 400 and kind == "application/problem+json":
            assert answer.body["status"] == answer.status
            assert answer.body["detail"]
        validator = Draft202012Validator({**schema, "components": self.api["components"]})
        validator.validate(answer.body)
