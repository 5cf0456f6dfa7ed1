"""Who may do what: options, keys and where they come from, rights, TLS. Secrets are never shown."""

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import ValidationError
from s3_place import BUCKET, make_s3, opened, options, prefix_of, put, raw_client
from s3_proxy import Proxy

from kvcore.api import Context, StorageError
from kvcore.config import InvalidConfigError, load_config
from kvcore.plugins import registry_from_env
from kvcore.testing.driver import Driver
from kvcore.testing.memory import make_key
from kvcore.testing.servers import Server, free_port, listens
from kvcore.testing.servers.redis import RedisServer
from kvcore.testing.servers.s3 import ACCESS_KEY, DOMAIN, SECRET_KEY, JuiceFS
from kvcore_s3.config import S3Config
from kvcore_s3.storage import S3Storage
from moved import get, keys_of

SECRET = "this-must-never-be-seen"


def refusal(endpoint: str, **changed: Any) -> str:
    """Why it does not open."""
    driver = opened(endpoint, **changed)
    with pytest.raises(StorageError) as caught, driver:
        pass
    return str(caught.value)


# -- options ---------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bucket": ({"bucket": "My_Bucket"}, "name of a bucket"),
    "directory bucket": ({"bucket": "fast--usw2-az1--x-s3"}, "not supported"),
    "bucket with a folder": ({"bucket": "b/x"}, "`prefix`"),
    "endpoint without a scheme": ({"endpoint": "s3.example.com:9000"}, "https://s3.example.com:9000"),
    "endpoint with keys": ({"endpoint": f"https://me:{SECRET}@example.com"}, "options of their own"),
    "prefix": ({"prefix": "a/../b"}, "not a prefix"),
    "empty segment": ({"prefix": "a//b"}, "not a prefix"),
    "half a key": ({"access_key_id": None}, "`secret_access_key` is given without `access_key_id`"),
    "other half": ({"secret_access_key": None}, "`access_key_id` is given without `secret_access_key`"),
    "two sources": ({"profile": "p"}, "keys are given twice"),
    "token alone": ({"access_key_id": None, "secret_access_key": None, "session_token": SECRET}, "all three"),
    "kms": ({"kms_key_id": "k"}, "encryption: sse-kms"),
    "deadline": ({"deadline": "2s"}, "at least `connect_timeout` and `read_timeout`, here 4s"),
    "part": ({"part_size": "1MiB"}, "5242880"),
    "concurrency": ({"concurrency": 0}, "1"),
    "misspelt": ({"buckett": "x"}, "buckett"),
}


@pytest.mark.parametrize(("changed", "text"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options_are_refused(changed: dict[str, Any], text: str) -> None:
    given = without_nothing({**options("http://127.0.0.1:1"), **changed})
    with pytest.raises(ValidationError) as caught:
        S3Config.model_validate(given)
    said = str([{k: v for k, v in e.items() if k != "input"} for e in caught.value.errors(include_url=False)])
    assert text in said


def test_the_shown_configuration_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file and from the environment; in a table, in JSON, and in the errors about them."""
    file = tmp_path / "kvcore.yaml"
    file.write_text(f"l2: [{{storage: {{plugin: s3, bucket: kvtest, access_key_id: me, session_token: {SECRET}}}}}]\n")
    monkeypatch.setenv("KVCORE_L2__0__STORAGE__SECRET_ACCESS_KEY", SECRET)
    for arguments in (["show", str(file)], ["show", str(file), "--json"], ["check", str(file)]):
        done = subprocess.run(
            [sys.executable, "-m", "kvcore", "config", *arguments], capture_output=True, text=True, check=True
        )
        assert SECRET not in done.stdout + done.stderr
    config = load_config(str(file), env=os.environ, registry=registry_from_env())
    options = config.l2[0].storage.options
    assert isinstance(options, S3Config)
    assert options.secret_access_key is not None
    assert options.secret_access_key.get_secret_value() == SECRET
    assert SECRET not in repr(options) + str(config.rows()) + json.dumps(options.model_dump(mode="json"))


def test_errors_hide_secrets(tmp_path: Path) -> None:
    file = tmp_path / "kvcore.yaml"
    file.write_text(
        f"l2: [{{storage: {{plugin: s3, bucket: B, secret_access_key: [{SECRET}], secret_key: {SECRET}}}}}]"
    )
    with pytest.raises(InvalidConfigError) as caught:
        load_config(str(file), env={}, registry=registry_from_env())
    assert SECRET not in str(caught.value)
    assert "l2[0].storage.bucket" in str(caught.value)


# -- keys ------------------------------------------------------------------------------------------------------------


def test_wrong_keys_are_said_at_open(server: JuiceFS) -> None:
    said = refusal(server.endpoint, secret_access_key=SECRET)
    assert "SignatureDoesNotMatch" in said
    assert "the secret key is wrong" in said
    assert server.endpoint in said
    assert BUCKET in said
    assert SECRET not in said
    assert "no such access key" in refusal(server.endpoint, access_key_id="nobody-here")


def test_no_keys_are_said_at_open(server: JuiceFS) -> None:
    said = refusal(server.endpoint, access_key_id=None, secret_access_key=None)
    assert "Unable to locate credentials" in said
    assert "`access_key_id`" in said


@pytest.mark.parametrize("way", ["environment", "profile", "default file", "credentials_file", "profile in a file"])
def test_where_keys_come_from(server: JuiceFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    given: dict[str, Any] = {"access_key_id": None, "secret_access_key": None, "prefix": prefix_of(tmp_path)}
    right = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    file = tmp_path / "aws" / "credentials"
    if way in ("credentials_file", "profile in a file"):
        file = tmp_path / "mine"
        given["credentials_file"] = str(file)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")  # what the options name comes first
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    if way == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    else:
        profile = "serving" if "profile" in way else "default"
        if profile != "default":
            given["profile"] = profile
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"[other]\naws_access_key_id = x\naws_secret_access_key = y\n[{profile}]\n{right}")
    with open_with(server, given) as driver:
        assert put(driver, keys_of(1)) == ["ok"]


def open_with(server: JuiceFS, given: dict[str, Any]) -> Driver:
    """A driver over the server with other options; None takes one away."""
    config = S3Config.model_validate(without_nothing({**options(server.endpoint), **given}))
    return Driver(S3Storage(config, Context()))


def without_nothing(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def test_an_endpoint_from_the_environment(server: JuiceFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    with open_with(server, {"endpoint": None, "prefix": prefix_of(tmp_path), "addressing": "path"}) as driver:
        assert put(driver, keys_of(1)) == ["ok"]


def test_files_and_profiles_that_are_not_there(server: JuiceFS, tmp_path: Path) -> None:
    none = {"access_key_id": None, "secret_access_key": None}
    for changed, text in (
        ({"profile": "nope"}, r"nope.*the profiles are: none"),
        ({"credentials_file": str(tmp_path / "nope")}, r"`credentials_file` .*nope: there is no such file"),
        ({"ca_bundle": str(tmp_path / "nope")}, r"`ca_bundle` .*nope: there is no such file"),
    ):
        with pytest.raises(StorageError, match=text), open_with(server, {**none, **changed, "endpoint": None}):
            pass


# -- another kind of server ------------------------------------------------------------------------------------------


def test_tls_to_a_port_without(server: JuiceFS) -> None:
    said = refusal(server.endpoint.replace("http:", "https:"))
    assert "WRONG_VERSION_NUMBER" in said
    assert said.endswith("use http:// in `endpoint`")


def test_a_server_that_is_not_s3(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It answers in HTTP, or not even that."""
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with Server("http", command, ready=lambda: listens(port), folder=tmp_path):
        assert refusal(f"http://127.0.0.1:{port}").endswith("is it an S3 endpoint?")
    with RedisServer(tmp_path) as redis, opened(f"http://127.0.0.1:{redis.port}"):
        assert "is it no S3 endpoint?; it is used as soon as it answers" in caplog.text


# -- the bucket and rights -------------------------------------------------------------------------------------------


def test_a_missing_bucket_is_said_at_open(server: JuiceFS) -> None:
    said = refusal(server.endpoint, bucket="not-there")
    assert "NoSuchBucket" in said
    assert "s3://not-there" in said
    assert "`create_bucket: true`" in said
    with opened(server.endpoint, bucket="made-by-us", create_bucket=True) as driver:
        assert put(driver, keys_of(1)) == ["ok"]
    with opened(server.endpoint, bucket="made-by-us", create_bucket=True) as driver:  # it is there now
        assert get(driver, keys_of(1)) == ["ok"]
    with (
        pytest.raises(StorageError, match="NoSuchBucket"),
        Driver(make_s3(server.endpoint, bucket="not-there", create_bucket=True, passive=True)),
    ):  # `kvcore store` makes nothing
        pass


@pytest.fixture
def user(server: JuiceFS) -> Iterator[Any]:
    """Makes users that may do the given actions in the bucket of the tests; the options that name one."""

    def make(name: str, *actions: str) -> dict[str, str]:
        where = [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"]
        server.add_user(name, f"secret-of-{name}", [{"Effect": "Allow", "Action": list(actions), "Resource": where}])
        return {"access_key_id": name, "secret_access_key": f"secret-of-{name}"}

    return make  # type: ignore[return-value]


def test_a_reader_loads_and_stores_nothing(server: JuiceFS, tmp_path: Path, user: Any) -> None:
    """`read_only` does not count against the tier: it goes on serving."""
    prefix = prefix_of(tmp_path)
    with opened(server.endpoint, prefix=prefix) as owner:
        assert put(owner, keys_of(3)) == ["ok"] * 3
    with opened(
        server.endpoint, prefix=prefix, part_size="5MiB", **user("reader", "s3:GetObject", "s3:ListBucket")
    ) as driver:
        assert get(driver, keys_of(3)) == ["ok"] * 3
        assert driver.exists(keys_of(4)) == [True] * 3 + [False]
        for nbytes in (1000, 6 << 20):
            assert put(driver, [make_key("new")], nbytes) == ["read_only"]
        with pytest.raises(StorageError, match="s3:DeleteObject"):
            driver.delete(keys_of(2))
        assert get(driver, keys_of(3)) == ["ok"] * 3


def test_who_may_not_list_is_refused_at_open(server: JuiceFS, user: Any) -> None:
    said = refusal(server.endpoint, **user("blind", "s3:GetObject", "s3:PutObject"))
    assert "403 AccessDenied" in said
    assert "s3:ListBucket" in said


def test_who_may_not_read_is_told_so(server: JuiceFS, tmp_path: Path, user: Any) -> None:
    with opened(
        server.endpoint, prefix=prefix_of(tmp_path), **user("writer", "s3:PutObject", "s3:ListBucket")
    ) as driver:
        assert put(driver, keys_of(2)) == ["ok"] * 2
        assert get(driver, keys_of(2)) == ["io"] * 2
        with pytest.raises(StorageError, match=r"HeadObject: 403.*s3:GetObject.*s3:ListBucket"):
            driver.exists(keys_of(2))


def test_encryption_that_the_server_does_not_do(server: JuiceFS, tmp_path: Path) -> None:
    """The headers are sent with each upload; this front end has no keys and says so."""
    with Proxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        for encryption, header in (
            ({"encryption": "sse-s3"}, b"x-amz-server-side-encryption:AES256"),
            ({"encryption": "sse-kms", "kms_key_id": "my-key"}, b"x-amz-server-side-encryption-aws-kms-key-id:my-key"),
        ):
            with opened(proxy.endpoint, prefix=prefix_of(tmp_path), part_size="5MiB", **encryption) as driver:
                for nbytes in (1000, 6 << 20):
                    proxy.heads.clear()
                    assert put(driver, keys_of(1), nbytes) == ["io"]
                    sent = b"".join(proxy.heads).replace(b": ", b":")
                    assert header in sent


# -- how it is reached -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["auto", "path", "virtual"])
def test_addressing(server: JuiceFS, tmp_path: Path, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`virtual` puts the bucket's name into the host's. That is no name of the DNS here: it is found all the same."""
    find = socket.getaddrinfo

    def here(host: str, *rest: Any, **more: Any) -> Any:
        return find("127.0.0.1" if host.endswith(DOMAIN) else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", here)
    with Proxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        endpoint = proxy.endpoint.replace("127.0.0.1", DOMAIN)
        with opened(endpoint, prefix=prefix_of(tmp_path), addressing=style) as driver:
            assert put(driver, keys_of(2)) == ["ok"] * 2
            assert get(driver, keys_of(3)) == ["ok", "ok", "missing"]
            driver.delete(keys_of(1))
            assert driver.exists(keys_of(2)) == [False, True]
        host = f"host: {BUCKET}.{DOMAIN}:{proxy.port}" if style == "virtual" else f"host: {DOMAIN}:{proxy.port}"
        assert all(host in head.decode().lower() for head in proxy.heads)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca.pem`, and `server.pem` with `server.key` for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "server.key")
    certificate.cert_chain_pems[0].write_to_path(folder / "server.pem")
    return folder


def test_tls(server: JuiceFS, tmp_path: Path, certificates: Path) -> None:
    """With the right certificates; over TLS payloads are not signed, which `sign_payload: always` insists on."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    trusted = {"ca_bundle": str(certificates / "ca.pem"), "prefix": prefix_of(tmp_path), "part_size": "5MiB"}
    with Proxy(int(server.endpoint.rpartition(":")[2]), tls=context) as proxy:
        for sign, unsigned in (("auto", True), ("always", False)):
            proxy.heads.clear()
            with opened(proxy.endpoint, sign_payload=sign, **trusted) as driver:
                for nbytes in (100_001, (11 << 20) + 1):
                    assert put(driver, keys_of(2), nbytes) == ["ok"] * 2
                    assert get(driver, keys_of(3), nbytes) == ["ok", "ok", "missing"]
            puts = [head for head in proxy.heads if head.startswith(b"PUT")]
            assert puts
            assert all((b"UNSIGNED-PAYLOAD" in head) is unsigned for head in puts)
        said = refusal(proxy.endpoint)
        assert "certificate" in said
        assert "`ca_bundle`" in said


def test_unsigned_over_plain_http_only_when_asked_for(server: JuiceFS, tmp_path: Path) -> None:
    with Proxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        with opened(proxy.endpoint, prefix=prefix_of(tmp_path)) as driver:
            assert put(driver, keys_of(1)) == ["ok"]
        assert not any(b"UNSIGNED-PAYLOAD" in head for head in proxy.heads)


def test_through_a_proxy(server: JuiceFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the environment names, as boto3 does; with its password."""
    with Proxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("http_proxy", proxy.endpoint.replace("//", "//me:p%40ss@"))
        monkeypatch.setenv("no_proxy", "elsewhere.example.com")
        with opened(server.endpoint, prefix=prefix_of(tmp_path)) as driver:
            assert put(driver, keys_of(2)) == ["ok"] * 2
            assert get(driver, keys_of(3)) == ["ok", "ok", "missing"]
        assert proxy.requests["PUT"] == 2
        for head in proxy.heads:
            assert f" {server.endpoint}/{BUCKET}".encode() in head  # a proxy is given the whole URL
            assert b"proxy-authorization: basic bwu6cebzcw==" in head.lower()


def test_raw_client_sees_the_same(server: JuiceFS, tmp_path: Path) -> None:
    prefix = prefix_of(tmp_path)
    with opened(server.endpoint, prefix=prefix) as driver:
        assert put(driver, keys_of(2)) == ["ok"] * 2
    listed = raw_client(server.endpoint).list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")
    assert listed["KeyCount"] == 2
