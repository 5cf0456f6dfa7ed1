"""Who may ask what, and what becomes of requests that are none."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from http_client import TOKEN, Client
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import ValidationError
from starlette.requests import Request

from kvcore.api import ConfigError
from kvcore.cli import main
from kvcore.config import HttpConfig, load_config
from kvcore.plugins import Registry
from kvcore.service import open_engine
from kvcore.service.http import guard, routes, runner
from kvcore.service.http.models import TenantsQuery
from kvcore.service.problems import Problem
from kvcore.testing.chunks import hashes, spec

PROTECTED = [
    ("GET", "/namespaces", None),
    ("GET", "/objects", None),
    ("GET", f"/objects/{'0' * 32}-0-{'0' * 64}", None),
    ("POST", "/clear", {"all": True}),
    ("POST", "/tiers", {"storage": "memory"}),
    ("DELETE", "/tiers/memory", None),
    ("GET", "/tenants", None),
    ("PUT", "/tenants/memory", {"quotas": {"l1": "1MiB"}}),
]
OPEN = ["/metrics", "/status", "/plugins", "/tiers", "/openapi.json"]
HEALTH = ["/healthz", "/readyz"]


def protected(client: Client) -> set[tuple[str, str]]:
    """Methods and paths that the document calls protected."""
    return {
        (method.upper(), path)
        for path, operations in client.api["paths"].items()
        for method, operation in operations.items()
        if operation["security"]
    }


def test_the_document_is_valid_and_lists_every_route(serve: Any) -> None:
    _, client = serve()
    OpenAPIV31SpecValidator(client.api).validate()
    listed = {(m.upper(), path) for path, operations in client.api["paths"].items() for m in operations}
    found = set()
    for method in ("GET", "PUT", "POST", "DELETE", "PATCH"):
        for _, path in listed:
            status, body, _ = client.raw(method, path.replace("{name}", "x"), "{}", {"Content-Type": "text/plain"})
            if status != 405 and not (status == 404 and b"urn:kvcore:not-found" in body):
                found.add((method, path))
    assert found == listed
    assert {path for _, path in listed} >= {*OPEN, *HEALTH}
    for operations in client.api["paths"].values():
        for operation in operations.values():
            assert operation["summary"]
            for parameter in operation.get("parameters", ()):
                assert parameter["in"] == "path" or parameter["description"], parameter


def test_with_no_token_configured_what_needs_one_is_refused_with_the_way_out(serve: Any) -> None:
    engine, client = serve("[{storage: memory}]", token=None)
    for method, path, body in PROTECTED:
        answer = client.ask(method, path, body)
        assert (answer.status, answer.body["type"]) == (403, "urn:kvcore:no-token"), path
        assert "set `server.http.token`" in answer.body["detail"]
    for path in OPEN + HEALTH:
        assert client.get(path).status == 200
    assert list(engine.tiers) == ["memory"]


@pytest.mark.parametrize("token", [None, "", "wrong horse battery", TOKEN + "x", TOKEN[:-1], "ü" * 20])
def test_a_wrong_token(serve: Any, token: str | None) -> None:
    engine, right = serve("[{storage: memory}]")
    assert {(m, p.partition("?")[0].replace("memory", "{name}")) for m, p, _ in PROTECTED} - protected(right) == {
        ("GET", f"/objects/{'0' * 32}-0-{'0' * 64}")
    }
    for method, path, body in PROTECTED:
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}".encode().decode("latin-1")
        right.token = None
        status, answer, sent = right.raw(method, path, json.dumps(body) if body else None, headers)
        assert status == 401, path
        assert json.loads(answer)["type"] in ("urn:kvcore:token-missing", "urn:kvcore:token-wrong")
        assert sent["www-authenticate"].startswith("Bearer")
    assert list(engine.tiers) == ["memory"]


def test_beyond_this_machine_all_but_health_needs_the_token(serve: Any) -> None:
    _, client = serve(listen="0.0.0.0:0")
    assert client.get("/status").status == 200
    client.token = None
    for path in HEALTH:
        assert client.get(path).status == 200
    for path in OPEN:
        assert client.get(path).status == 401, path
    assert client.raw("GET", "/ui")[0] == 200  # it holds nothing: what it asks needs the token
    assert {path for _, path in protected(client)} >= set(OPEN)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"listen": "127.0.0.1"}, "is no address for HTTP: write an IP address and a port"),
        ({"listen": "cache.example:80"}, "is no address for HTTP"),
        ({"listen": "127.0.0.1:70000"}, "is no address for HTTP"),
        ({"listen": "300.0.0.1:80"}, "is no address for HTTP"),
        ({"listen": "127.0.0.1:80", "token": "short"}, "at least 16"),
    ],
)
def test_configurations_that_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        HttpConfig(**given)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1234", 200),
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("[::1]:7601", 200),
        ("10.1.2.3:7601", 200),
        ("cache.example:7601", 200),
        ("evil.example", 421),
        ("evil.example:7601", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1@evil.example", 421),
        ("[evil.example]", 421),
        ("", 421),
    ],
)
def test_a_page_elsewhere_cannot_have_its_name_lead_here(serve: Any, host: str, status: int) -> None:
    _, client = serve(hosts=["Cache.example"])
    assert client.raw("GET", "/status", None, {"Host": host})[0] == status


def test_an_unknown_path_and_another_method(serve: Any) -> None:
    _, client = serve()
    for path in ("/nothing", "/tiers/", "/tiers/x/y", "/objects/a/b", "/../etc/passwd", "/%00"):
        answer = client.get(path)
        assert (answer.status, answer.body["type"]) == (404, "urn:kvcore:not-found"), path
    answer = client.ask("PATCH", "/tiers")
    assert answer.status == 405
    assert {"GET", "POST"} & set(answer.headers["allow"].split(", "))


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/objects?limit=0", "query.limit"),
        ("/objects?limit=1001", "query.limit"),
        ("/objects?limit=many", "query.limit"),
        ("/objects?namespace=xyz", "query.namespace"),
        ("/objects?tier=../x", "query.tier"),
        ("/objects?pages=3", "query.pages"),
        ("/objects?limit=1&limit=2", "query.limit"),
    ],
)
def test_wrong_queries(serve: Any, path: str, where: str) -> None:
    _, client = serve()
    answer = client.get(path)
    assert (answer.status, answer.body["type"]) == (422, "urn:kvcore:wrong-query")
    assert [f["where"] for f in answer.body["faults"]] == [where]


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "body"),
        ({"all": True, "tenant": "a"}, "body"),
        ({"all": False}, "body.all"),
        ({"namespace": "00"}, "body.namespace"),
        ({"namespace": 7}, "body.namespace"),
        ({"all": True, "teirs": True}, "body.teirs"),
        ([], "body"),
    ],
)
def test_wrong_bodies(serve: Any, body: Any, where: str) -> None:
    _, client = serve()
    answer = client.post("/clear", body)
    assert (answer.status, answer.body["type"]) == (422, "urn:kvcore:wrong-body")
    assert where in [f["where"] for f in answer.body["faults"]]


@pytest.mark.parametrize("body", ["{", "[" * 30_000, '{"all": tru', "\x00", '{"all": true}{}', "nan"])
def test_what_is_no_json(serve: Any, body: str) -> None:
    _, client = serve()
    status, answer, _ = client.raw("POST", "/clear", body, {"Content-Type": "application/json"})
    assert (status, json.loads(answer)["type"]) == (422, "urn:kvcore:wrong-body")


def test_bodies_are_bounded_and_typed(serve: Any) -> None:
    _, client = serve()
    kinds = {"Content-Type": "application/json"}
    long = b'{"tenant": "' + b"x" * (64 << 10) + b'"}'
    assert client.raw("POST", "/clear", long, kinds)[0] == 413
    assert client.raw("POST", "/clear", iter([long[:1000]] * 66), kinds)[0] == 413  # no length is said
    status, body, _ = client.raw("POST", "/clear", "all=true", {"Content-Type": "application/x-www-form-urlencoded"})
    assert (status, json.loads(body)["type"]) == (415, "urn:kvcore:not-json")
    assert client.get("/healthz").status == 200


def test_long_prompts_are_explained_for_who_has_the_token(serve: Any) -> None:
    engine, client = serve()
    space = engine.register(spec())
    named = [h.hex() for h in hashes(2000)]
    assert client.post("/explain", {"hashes": named, "namespace": space.namespace.hex()}).status == 200
    tokens = list(range(50_000))
    answer = client.post("/diff", {"a": {"tokens": tokens}, "b": {"tokens": tokens}})
    assert "how " in answer.body["detail"], "it was read: nobody here can hash the tokens of this engine"
    kinds = {"Content-Type": "application/json"}
    assert client.raw("POST", "/explain", iter([b" " * (1 << 20)] * 17), kinds)[0] == 413
    client.token = None
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=60) as asking:
        asking.sendall(b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16000000\r\n\r\n")
        assert asking.recv(100).startswith(b"HTTP/1.1 401 "), "its body is not waited for"


def test_garbage_is_refused_and_harms_nobody(serve: Any) -> None:
    _, client = serve()
    for data in (
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 100_000,
        b"\x16\x03\x01\x02\x00",
        b"\r\n" * 50,
    ):
        with socket.create_connection(("127.0.0.1", client.server.port), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(15)
            answer = b""
            try:
                while part := connection.recv(4096):
                    answer += part
            except ConnectionResetError:
                pass
        assert not answer or answer.startswith(b"HTTP/1.1 4"), data[:20]
    assert client.get("/healthz").status == 200


def test_those_who_connect_and_say_nothing_keep_nobody_out(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "HEADER_S", 0.5)
    _, client = serve()
    silent = [socket.create_connection(("127.0.0.1", client.server.port)) for _ in range(runner.MAX_CONNECTIONS)]
    for connection in silent[::2]:
        connection.sendall(b"GET /healthz HTT")  # and half of them never get to the point
    begun = time.monotonic()
    while True:
        try:
            assert client.get("/healthz").status == 200
            break
        except (ConnectionError, http.client.HTTPException):  # all are taken
            assert time.monotonic() - begun < 10
            time.sleep(0.05)
    for connection in silent:
        connection.close()


@pytest.mark.parametrize("http", ["127.0.0.1:7601", "{listen: 127.0.0.1:7601}"])
def test_its_configuration_in_short_and_in_long_with_the_token_from_the_environment(tmp_path: Path, http: str) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text(f"server: {{url: unix:///run/x.sock, http: {http}}}\nl2: []\n")
    config = load_config(path, env={"KVCORE_SERVER__HTTP__TOKEN": TOKEN}, registry=Registry())
    assert config.server is not None
    assert config.server.http is not None
    assert (str(config.server.http.listen), config.server.http.listen.loopback) == ("127.0.0.1:7601", True)
    assert config.server.http.token is not None
    assert config.server.http.token.get_secret_value() == TOKEN
    assert TOKEN not in str(config.rows())


@pytest.mark.parametrize("listen", ["0.0.0.0:7601", "'[::]:7601'"])
def test_only_the_server_needs_the_token_to_be_reached_from_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], listen: str
) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text(f"l2: []\nserver: {{url: unix://{tmp_path}/x.sock, http: {listen}}}\n")
    text = f"{path}:2:"
    open_engine(str(path)).close()
    for command, status in ((["serve", "--config"], 1), (["config", "check"], 0)):
        assert main([*command, str(path)]) == status
        out, err = capsys.readouterr()
        assert f"server.http: {listen.strip(chr(39))} can be reached from elsewhere: set a `token`" in out + err
        assert text in out + err


def test_a_flag_that_is_wrong_is_named_as_it_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text(f"l2: []\nserver: {{url: unix://{tmp_path}/x.sock, http: 127.0.0.1:7601}}\n")
    for address, text in [
        ("0.0.0.0:7691", "--http: server.http: 0.0.0.0:7691 can be reached from elsewhere: set a `token`, or listen"),
        ("here", "--http: server.http.listen: 'here' is no address for HTTP"),
    ]:
        assert main(["serve", "--config", str(path), "--http", address]) == 1
        assert text in capsys.readouterr().err
    path.write_text("server: {url: tcp://127.0.0.1:7600, token: abc}\n")
    with pytest.raises(
        ConfigError, match=r"server\.token: must have at least 16 characters, not 3, given a hidden value"
    ):
        load_config(path, env={}, registry=Registry())


def test_a_query_is_looked_through_once_however_long_it_is() -> None:
    class Pairs(list[tuple[str, str]]):
        looks = 0

        def __iter__(self) -> Iterator[tuple[str, str]]:
            self.looks += 1
            return super().__iter__()

    items = Pairs([(f"a{i}", "") for i in range(1000)] + [("limit", "1"), ("limit", "2")])
    request: Any = SimpleNamespace(query_params=SimpleNamespace(multi_items=lambda: items))
    with pytest.raises(Problem, match="given twice: limit"):
        routes._query(TenantsQuery, request)
    assert items.looks < 5


def test_who_leaves_in_the_midst_of_a_body_is_refused_and_no_bug() -> None:
    said: list[Any] = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return said.pop(0)

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "path": "/clear", "headers": headers}, receive)
    with pytest.raises(Problem, match="has left before the end"):
        asyncio.run(guard.body(request, 100))
