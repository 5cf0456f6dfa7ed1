"""Options: what is wrong is said at once, with the next step; a password is never shown."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvcore.cli import main
from kvcore.config import load_config
from kvcore.plugins import Registry
from kvcore_redis.address import Endpoint, parse_url
from kvcore_redis.config import RedisConfig

SECRET = "hunter2"


def single(host: str, port: int) -> tuple[Endpoint, ...]:
    return (Endpoint(host, port),)


@pytest.mark.parametrize(
    ("url", "endpoints", "tls", "username", "password", "database"),
    [
        ("redis://localhost", single("localhost", 6379), False, None, None, None),
        ("redis://localhost:7000/3", single("localhost", 7000), False, None, None, 3),
        ("rediss://cache.example.org:6380/", single("cache.example.org", 6380), True, None, None, None),
        ("redis://[::1]:7000", single("::1", 7000), False, None, None, None),
        ("redis://[fe80::1]", single("fe80::1", 6379), False, None, None, None),
        ("redis://me:p%40s%3As@h:1", single("h", 1), False, "me", "p@s:s", None),
        ("redis://:only@h", single("h", 6379), False, None, "only", None),
        ("redis://a:1,b,c:3", (Endpoint("a", 1), Endpoint("b", 6379), Endpoint("c", 3)), False, None, None, None),
        ("unix:///run/valkey/valkey.sock", single("/run/valkey/valkey.sock", 0), False, None, None, None),
        ("unix://me:pw@/run/v.sock?db=2", single("/run/v.sock", 0), False, "me", "pw", 2),
    ],
)
def test_urls(
    url: str,
    endpoints: tuple[Endpoint, ...],
    tls: bool,
    username: str | None,
    password: str | None,
    database: int | None,
) -> None:
    assert parse_url(url) == (endpoints, tls, username, password, database)


def test_sentinels_have_a_port_of_their_own() -> None:
    config = RedisConfig.model_validate({"url": "redis://a,b:1", "sentinel_master": "m"})
    assert config.address.endpoints == (Endpoint("a", 26379), Endpoint("b", 1))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("localhost:6379", "redis://HOST:PORT"),
        ("http://localhost", "redis://HOST:PORT"),
        ("redis://", "names no host"),
        ("redis://:6379", "names no host"),
        ("redis://a,,b", "names no host"),
        ("redis://h:port", "a port that is no number"),
        ("redis://h:0", "a port that is no number"),
        ("redis://h:65536", "a port that is no number"),
        ("redis://::1:6379", "names no host"),
        ("redis://[::1", "not a URL"),
        ("redis://h/x", "a database that is no number"),
        ("redis://h/-1", "a database that is no number"),
        ("redis://h?timeout=1", "has a query"),
        ("unix://", "names no socket"),
        ("unix://relative/path", "names no socket"),
        ("unix:///a?x=1", "?db=NUMBER"),
    ],
)
def test_a_wrong_url_is_explained_without_its_password(url: str, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_url(url)
    assert text in str(caught.value)
    scheme, _, rest = url.partition("://")
    with pytest.raises(ValueError) as caught:
        parse_url(f"{scheme}://me:{SECRET}@{rest}")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cluster": True, "sentinel_master": "m"}, "exclude each other"),
        ({"url": "redis://a,b"}, "several servers"),
        ({"url": "unix:///s", "cluster": True}, "a Unix socket"),
        ({"url": "unix:///s", "sentinel_master": "m"}, "a Unix socket"),
        ({"password": "x", "password_env": "X"}, "the password is given more than once"),
        ({"url": "redis://:x@h", "password_file": "f"}, "the password is given more than once"),
        ({"url": "redis://me:x@h", "username": "me"}, "the user name is given more than once"),
        ({"url": "redis://h/1", "database": 2}, "the database is given more than once"),
        ({"sentinel_password_env": "X"}, "`sentinel_password_env` is of use only with `sentinel_master`"),
        ({"tls_ca": "ca.pem"}, "`tls_ca` is of use only with a `url` that begins with rediss://"),
        ({"url": "rediss://h", "tls_key": "k"}, "`tls_key` needs `tls_cert`"),
        ({"tls_verify": "never"}, "tls_verify"),
        ({"prefix": ""}, "prefix"),
        ({"prefix": "two words"}, "prefix"),
        ({"ttl": "0s"}, "ttl"),
        ({"ttl": "5 parsecs"}, "no known unit"),
        ({"timeout": "0s"}, "timeout"),
        ({"connections": 0}, "connections"),
        ({"database": -1}, "database"),
        ({"username": ""}, "username"),
        ({"passwort": "x"}, "passwort"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RedisConfig.model_validate(options)
    assert text in str(caught.value)


SECRETS = [
    f"url: 'redis://me:{SECRET}@127.0.0.1:1'",
    f"url: 'redis://127.0.0.1:1', password: {SECRET}",
]


@pytest.mark.parametrize("options", SECRETS)
def test_show_and_repr_keep_the_password(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str) -> None:
    file = tmp_path / "kvcore.yaml"
    file.write_text(f"l2: [{{storage: {{plugin: redis, {options}}}}}]\n")
    for words in (["config", "show"], ["config", "show", "--json"], ["config", "check"]):
        assert main([words[0], words[1], str(file), *words[2:]]) == 0
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
    assert "127.0.0.1:1" in shown.out
    config = load_config(file, env={}, registry=Registry())
    assert SECRET not in repr(config)
    assert SECRET not in repr(config.l2[0].storage.options)


@pytest.mark.parametrize(
    "options",
    [
        f"url: 'redis://me:{SECRET}@'",
        f"url: 'http://me:{SECRET}@host'",
        f"url: 'redis://me:{SECRET}@host:port'",
        f"url: ['redis://me:{SECRET}@host']",
        f"password: [{SECRET}]",
        f"pasword: {SECRET}",
        f"url: 'redis://me:{SECRET}@a,b'",
    ],
)
def test_faults_keep_the_password(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str) -> None:
    file = tmp_path / "kvcore.yaml"
    file.write_text(f"l2: [{{storage: {{plugin: redis, {options}}}}}]\n")
    assert main(["config", "check", str(file), "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["faults"]
    assert SECRET not in shown.out + shown.err


def test_sizes_and_times_are_shown_with_units() -> None:
    shown = RedisConfig.model_validate({"ttl": "1h", "timeout": "500ms"}).model_dump(mode="json")
    assert (shown["ttl"], shown["timeout"], shown["connect_timeout"]) == ("3600s", "0.5s", "2s")
    assert shown["url"] == "redis://127.0.0.1:6379"


README = Path(__file__).parents[2] / "plugins" / "storage_redis" / "README.md"


def test_the_readme_has_every_option_and_valid_yaml(tmp_path: Path) -> None:
    text = README.read_text()
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    assert [name for name in RedisConfig.model_fields if f"`{name}`" not in rows] == []
    found = re.findall(r"```yaml\n(.*?)```", text, re.S)
    assert len(found) == 2
    for i, block in enumerate(found):
        file = tmp_path / f"{i}.yaml"
        file.write_text(block)
        assert load_config(file, env={}, registry=Registry()).l2
