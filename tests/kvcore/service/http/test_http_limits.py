"""Clients that do not read, or come in crowds, and names that are none: the server answers others, and goes on."""

import http.client
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from http_client import Client

from kvcore.service.http import guard, runner

ASK = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


def until(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def deaf(client: Client, data: bytes) -> socket.socket:
    """A connection that asks for so much and reads nothing of it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", client.server.port))
    made.settimeout(1)
    made.sendall(data)
    return made


@contextmanager
def crowd(client: Client, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(("127.0.0.1", client.server.port))) for _ in range(count)]
        for one in made:
            one.sendall(data)
        yield made


def connections(client: Client) -> int:
    assert client.server._server is not None
    return len(client.server._server.server_state.connections)


@pytest.mark.parametrize("asked", [ASK * 300, ASK * 299 + LAST], ids=["many", "the last of many"])
def test_an_answer_that_is_not_read_costs_the_connection(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: bytes
) -> None:
    monkeypatch.setattr(runner, "UNREAD_S", 0.5)
    _, client = serve()
    with deaf(client, asked):
        until(lambda: connections(client) == 1, "it is there")
        until(lambda: connections(client) == 0, "it has ended")
    assert not [r for r in caplog.records if r.levelno > logging.INFO]
    assert client.get("/status").status == 200


def test_a_request_that_takes_too_long_is_no_exception(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer waits behind others that are not read."""
    monkeypatch.setattr(guard, "REQUEST_S", 0.3)
    monkeypatch.setattr(runner, "UNREAD_S", 1.0)
    _, client = serve()
    with deaf(client, ASK * 300):
        until(lambda: connections(client) == 1, "it is there")
        until(lambda: connections(client) == 0, "it has ended")
    assert "Traceback" not in caplog.text
    assert "TimeoutError" not in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        ASK * 200,
        b"POST /clear HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["silent", "deaf", "half a body"],
)
def test_a_crowd_keeps_nobody_from_asking_whether_all_is_well(serve: Any, data: bytes) -> None:
    """Beyond the bound others are told so; those who do not even ask there make room for those who do."""
    _, client = serve()
    with crowd(client, runner.MAX_CONNECTIONS, data):
        until(lambda: connections(client) == runner.MAX_CONNECTIONS, "they are there")
        for path in ("/healthz", "/readyz"):
            assert client.get(path).status == 200
        status, body, headers = client.raw("GET", "/status")
        assert (status, json.loads(body)["type"]) == (503, "urn:kvcore:busy")
        assert headers["retry-after"] == "10"
        assert client.get("/readyz").status == 200
        with crowd(client, 3 * runner.SPARE_CONNECTIONS):
            assert client.get("/readyz").status == 200
            until(lambda: connections(client) <= runner.MAX_CONNECTIONS + runner.SPARE_CONNECTIONS, "a bound")
    until(lambda: connections(client) == 0, "they are gone")
    assert client.get("/status").status == 200


def test_a_connection_is_used_again(serve: Any) -> None:
    """Limits on what is not read do not touch one that is."""
    _, client = serve()
    connection = http.client.HTTPConnection("127.0.0.1", client.server.port, timeout=10)
    for _ in range(20):
        connection.request("GET", "/openapi.json")
        assert connection.getresponse().read()
    assert connections(client) == 1
    connection.close()


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [["a"], {"a": 1}, 7, None, True])
def test_a_tiers_name_that_is_no_name(serve: Any, name: Any) -> None:
    engine, client = serve("[{storage: memory}]")
    answer = client.post("/tiers", {"name": name, "storage": "memory"})
    assert (answer.status, "name" in answer.body["detail"]) == (422, True)
    assert list(engine.tiers) == ["memory"]


def test_quotas_of_a_name_that_no_tenant_has(serve: Any) -> None:
    _, client = serve("[]", "l1: {size: 8MiB}\ntenants: {alice: {l1: 2MiB}}")
    quotas = {"quotas": {"l1": "1MiB"}}
    answer = client.ask("PUT", f"/tenants/{'x' * 257}", quotas)
    assert (answer.status, "at most 256 characters, not 257" in answer.body["detail"]) == (422, True)
    kinds = {"Content-Type": "application/json"}
    status, body, _ = client.raw("PUT", "/tenants/%ff%fe", json.dumps(quotas), kinds)
    assert (status, json.loads(body)["type"]) == (400, "urn:kvcore:wrong-path")
    for name in ("x" * 256, "b%C3%A9a"):
        assert client.ask("PUT", f"/tenants/{name}", quotas).status == 200
