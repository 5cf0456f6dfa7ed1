"""Passwords, ACL users, databases and TLS: what is wrong is said at `open`, without the password."""

import re
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from redis_place import connections, make_redis, opened, put

from kvcore.api import StorageError
from kvcore.testing.memory import source
from kvcore.testing.servers import Server, ServerError, free_port, listens
from kvcore.testing.servers.proxy import Proxy
from kvcore.testing.servers.redis import RedisServer
from moved import eventually, get, keys_of, kind

SECRET = "hunter2"
README = Path(__file__).parents[2] / "plugins" / "storage_redis" / "README.md"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with a password, and a user who may only read."""
    with RedisServer(tmp_path_factory.mktemp("guarded"), password=SECRET) as server:
        server.ask("ACL", "SETUSER", "reader", "on", ">read me", "~kvcore:*", "+get", "+exists")
        server.ask("ACL", "SETUSER", "elsewhere", "on", f">{SECRET}", "~other:*", "+@all")
        yield server


def refusal(url: str, **options: object) -> str:
    """Why it does not open."""
    storage = make_redis(url, **options)
    with pytest.raises(StorageError) as caught:
        storage.open()
    storage.close()
    return str(caught.value)


# -- another kind of server ------------------------------------------------------------------------------------------


def test_tls_to_a_port_without(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with opened(server.url.replace("redis://", "rediss://"), connect_timeout="500ms", tls_verify="off"):
        assert "no answer to the TLS handshake: is it a TLS port?" in caplog.text


def test_a_server_that_is_not_redis(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with Server("http", command, ready=lambda: listens(port), folder=tmp_path), opened(f"redis://127.0.0.1:{port}"):
        assert re.search("expected a reply, got .*: is it a Redis server", caplog.text)


def test_sentinels_that_are_none(server: RedisServer) -> None:
    said = refusal(server.url, sentinel_master="mymaster")
    assert "unknown command" in said
    assert said.endswith(": name Sentinels, or leave out `sentinel_master`")


# -- who we are ------------------------------------------------------------------------------------------------------


def test_password_from_everywhere(guarded: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv("CACHE_PASSWORD", SECRET)
    in_url = guarded.url.replace("redis://", f"redis://:{SECRET}@")
    ways: list[dict[str, str]] = [
        {"url": in_url},
        {"url": in_url.replace("//:", "//default:")},
        {"password": SECRET},
        {"password_env": "CACHE_PASSWORD"},
        {"password_file": str(file)},
        {"password_file": str(file), "username": "default"},
    ]
    for options in ways:
        with opened(**{"url": guarded.url, **options}) as driver:
            put(driver, keys_of(2))
            assert get(driver, keys_of(2)) == ["ok"] * 2
            assert len(driver.entries()) == 2
            assert driver.usage() is not None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "give `password_env` or `password_file`"),
        ({"password": "wrong"}, "give the right `username`"),
        ({"username": "reader", "password": "wrong"}, "give the right `username`"),
        ({"username": "nobody", "password": "wrong"}, "give the right `username`"),
        ({"username": "elsewhere", "password": SECRET}, "give the ACL user +get"),
        ({"password": SECRET, "database": 99}, "correct `database`"),
        ({"password_env": "NOT_SET"}, "the environment variable NOT_SET is not set"),
        ({"password_file": "/no/such/file"}, "/no/such/file cannot be read"),
    ],
)
def test_a_refusal_is_an_error_of_open(guarded: RedisServer, options: dict[str, object], expected: str) -> None:
    text = refusal(guarded.url, **options)
    assert expected in text
    assert SECRET not in text
    assert "wrong" not in text.replace("WRONGPASS", "")


def test_a_password_that_nobody_asked_for(server: RedisServer) -> None:
    text = refusal(server.url, password=SECRET)
    assert "refuses AUTH" in text
    assert SECRET not in text


def test_a_server_that_repeats_what_it_does_not_know(tmp_path: Path) -> None:
    """Servers quote the arguments of an unknown command: here the password."""
    with RedisServer(tmp_path, arguments=["--rename-command", "AUTH", "LOGIN"]) as server:
        text = refusal(server.url, password=SECRET)
        assert "unknown command 'AUTH'" in text
        assert SECRET not in text


def test_a_user_who_may_only_read(guarded: RedisServer) -> None:
    """Loads work, stores are refused as `read_only` and counted, the connection stays."""
    keys = keys_of(3)
    with opened(guarded.url, password=SECRET) as writer:
        put(writer, keys)
        with opened(guarded.url, username="reader", password="read me") as reader:
            assert get(reader, keys) == ["ok"] * 3
            assert [kind(o) for o in reader.store([source(key, b"x" * 100_000) for key in keys])] == ["read_only"] * 3
            with pytest.raises(StorageError, match="NOPERM"):
                reader.delete(keys)
            assert get(reader, keys) == ["ok"] * 3
            assert connections(reader) == 1


def test_the_rights_that_the_readme_names_suffice(server: RedisServer, tmp_path: Path) -> None:
    serving = ["+get", "+set", "+exists", "+unlink", "+ping"]
    examining = ["+scan", "+strlen", "+object|idletime", "+dbsize", "+info"]
    text = README.read_text()
    assert f"`{' '.join(serving)}`" in text
    assert f"`{' '.join(examining)}`" in text
    keys = keys_of(3)
    for rights in (serving, serving + examining):
        server.ask("ACL", "SETUSER", "least", "reset", "on", ">pw", f"~{tmp_path}:*", *rights)
        with opened(server.url, f"{tmp_path}:", username="least", password="pw") as driver:
            put(driver, keys)
            assert get(driver, keys) == ["ok"] * 3
            assert driver.exists(keys) == [True] * 3
            driver.call("ping")
            if rights is serving:
                with pytest.raises(StorageError, match="no permissions"):
                    driver.entries()
            else:
                assert {entry.key for entry in driver.entries()} == set(keys)
                assert driver.usage() is not None
            driver.delete(keys)


def test_a_password_that_is_changed(own: RedisServer, tmp_path: Path) -> None:
    """The file is read at each new connection."""
    file = tmp_path / "password"
    file.write_text("first")
    own.ask("CONFIG", "SET", "requirepass", "first")
    with opened(own.url, password_file=str(file)) as driver:
        put(driver, keys_of(1))
        own.password = "first"
        own.ask("CONFIG", "SET", "requirepass", "second")
        own.password = "second"
        own.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert get(driver, keys_of(1)) == ["io"]
        file.write_text("second\n")
        assert get(driver, keys_of(1)) == ["ok"]


def test_databases_are_apart(server: RedisServer, tmp_path: Path) -> None:
    keys = keys_of(2)
    with (
        opened(server.url, f"{tmp_path}:", database=3) as three,
        opened(f"{server.url}/4", f"{tmp_path}:") as four,
    ):
        put(three, keys)
        assert get(four, keys) == ["missing"] * 2
        assert four.entries() == []
        assert get(three, keys) == ["ok"] * 2
        assert len(three.entries()) == 2


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def certificates(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca.pem`, and `server.pem` with `server.key` for 127.0.0.1, and `client.pem` with its key inside."""
    folder = tmp_path_factory.mktemp("certificates")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other-ca.pem")
    server = authority.issue_cert("127.0.0.1")
    server.cert_chain_pems[0].write_to_path(folder / "server.pem")
    server.private_key_pem.write_to_path(folder / "server.key")
    authority.issue_cert("kvcore.example.org").private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
    return folder


@pytest.fixture(params=["terminator", "native"])
def tls_port(request: pytest.FixtureRequest, server: RedisServer, certificates: Path, tmp_path: Path) -> Iterator[int]:
    """A port that speaks TLS: the server's own, or that of a terminator in front of a server without TLS."""
    if request.param == "terminator":
        with Proxy(server.port, terminator(certificates)) as proxy:
            yield proxy.port
        return
    native = RedisServer(tmp_path, "native", tls=certificates)
    try:
        native.start()
    except ServerError as error:
        if "TLS" not in str(error):
            raise
        pytest.skip("NOT TESTED: the server was built without TLS; KVCORE_TEST_REDIS_SERVER may name another")
    with native:
        yield native.port


def terminator(certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    return context


def test_objects_over_tls(tls_port: int, certificates: Path, tmp_path: Path) -> None:
    keys = keys_of(12)
    url = f"rediss://127.0.0.1:{tls_port}"
    with opened(url, f"{tmp_path}:", tls_ca=str(certificates / "ca.pem")) as driver:
        put(driver, keys, 300_001)
        assert get(driver, keys, 300_001) == ["ok"] * 12
        assert get(driver, keys, 300_001) == ["ok"] * 12
        assert driver.exists([*keys, *keys_of(200)[12:]]) == [True] * 12 + [False] * 188
        assert len(driver.entries()) == 12
        assert connections(driver) == 1
        small = [driver.submit("exists", keys) for _ in range(20)]
        assert all(call.result() == [True] * 12 for call in small)


def test_certificates_that_do_not_fit(tls_port: int, certificates: Path, tmp_path: Path) -> None:
    url, other = f"rediss://127.0.0.1:{tls_port}", f"rediss://localhost:{tls_port}"
    wrong, right = str(certificates / "other-ca.pem"), str(certificates / "ca.pem")
    assert "name the authority with `tls_ca`" in refusal(url, tls_ca=wrong)
    assert "not accepted" in refusal(url)
    assert "not valid for 'localhost'" in refusal(other, tls_ca=right)
    assert "cannot be used" in refusal(url, tls_ca=str(tmp_path / "none.pem"))
    for options in ({"tls_verify": "ca", "tls_ca": right}, {"tls_verify": "off"}):
        with opened(other, f"{tmp_path}:", **options) as driver:
            put(driver, keys_of(2))
            assert len(driver.entries()) == 2


def test_a_client_certificate(server: RedisServer, certificates: Path, tmp_path: Path) -> None:
    context = terminator(certificates)
    context.load_verify_locations(certificates / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    ca, cert = str(certificates / "ca.pem"), str(certificates / "client.pem")
    with Proxy(server.port, context) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        with opened(url, f"{tmp_path}:", tls_ca=ca, tls_cert=cert) as driver:
            put(driver, keys_of(2))
            assert get(driver, keys_of(2)) == ["ok"] * 2
            assert len(driver.entries()) == 2
        assert "give `tls_cert`" in refusal(url, tls_ca=ca)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert "does it want a `tls_cert`" in refusal(url, tls_ca=ca)


def test_no_tls_to_a_port_that_speaks_it(tls_port: int) -> None:
    with opened(f"redis://127.0.0.1:{tls_port}", timeout="500ms") as driver:
        assert get(driver, keys_of(1))[0] in ("io", "timeout")
        assert connections(driver) == 0


def test_tls_to_a_port_that_does_not_speak_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                client.sendall(b"-ERR Protocol error\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert "is it a TLS port" in refusal(f"rediss://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_a_connection_cut_in_tls(server: RedisServer, certificates: Path, tmp_path: Path) -> None:
    keys = keys_of(3)
    with Proxy(server.port, terminator(certificates)) as proxy:
        ca = str(certificates / "ca.pem")
        with opened(f"rediss://127.0.0.1:{proxy.port}", f"{tmp_path}:", tls_ca=ca) as driver:
            put(driver, keys, 300_000)
            proxy.cut_replies_after = 400_000
            found = get(driver, keys, 300_000)
            assert found == ["ok", "ok", "io"]
            assert connections(driver) == 0
            proxy.cut_replies_after = None
            assert get(driver, keys, 300_000) == ["ok"] * 3


def test_frozen_behind_tls(own: RedisServer, certificates: Path) -> None:
    ca = str(certificates / "ca.pem")

    with (
        Proxy(own.port, terminator(certificates)) as proxy,
        opened(f"rediss://127.0.0.1:{proxy.port}", tls_ca=ca, timeout="500ms") as driver,
    ):
        put(driver, keys_of(3))
        own.freeze()
        assert get(driver, keys_of(3)) == ["timeout"] * 3
        (outcome,) = driver.store([source(keys_of(1)[0], b"x" * 30_000_000)])
        assert kind(outcome) == "timeout"
        own.thaw()
        eventually(lambda: get(driver, keys_of(3)) == ["ok"] * 3)
