"""Files, faults, precedence, sources and secrets."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from plugin_samples import storage

from kvcore.api import ConfigError
from kvcore.api.serde import MAX_STAGES
from kvcore.config import Config, InvalidConfigError, load_config
from kvcore.plugins import PluginSpec, Registry
from kvcore.testing import dist


@pytest.fixture
def registry(site):
    """The built-ins and one third-party storage, `acme`, with options."""
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}}, {"fake_acme": storage()})
    return Registry(path=[str(site)])  # whatever else is installed here


@pytest.fixture
def load(registry, tmp_path, monkeypatch):
    """`load(text)` writes `kvcore.yaml` and loads it with an empty environment."""
    monkeypatch.chdir(tmp_path)

    def do(text: str | None = None, env=None, flags=None) -> Config:
        if text is not None:
            Path("kvcore.yaml").write_text(text)
        return load_config("kvcore.yaml" if text is not None else None, env=env or {}, flags=flags, registry=registry)

    return do


@pytest.fixture
def faults(load):
    """`faults(text)` is the list of fault lines."""

    def do(text: str | None = None, **kwargs) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, **kwargs)
        assert isinstance(caught.value, InvalidConfigError)
        return str(caught.value).splitlines()

    return do


# --- good files


def test_the_defaults(load):
    config = load()
    assert config.file is None
    assert (config.l1.size, config.l1.lease, config.l1.eviction.plugin) == ("auto", 60.0, "lru")
    assert config.keys == PluginSpec("engine", {}, "keys")
    assert (config.chunk_tokens, config.min_object_size, config.lookup_timeout) == ("auto", 1 << 20, 2.0)
    assert (config.salt, config.l2, config.hooks, config.metrics_port) == ("", (), (), None)
    assert {row.source.kind for row in config.rows()} == {"default"}


def test_without_a_file_an_installed_disk_is_the_tier(site):
    dist(site, "acme-disk", {"kvcore.storage": {"disk": "fake_disk"}}, {"fake_disk": storage()})
    registry = Registry(path=[str(site)])
    flags = {"l2[0].storage.bucket": "b"}
    config = load_config(env={}, flags=flags, registry=registry)
    assert [(t.name, t.storage.plugin) for t in config.l2] == [("disk", "disk")]
    assert load_config(env={}, flags={"l2": []}, registry=registry).l2 == ()


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "---\n...\n", "null\n", "{}\n", "\ufeff"])
def test_an_empty_file_is_the_defaults(load, text):
    assert load(text).l1.size == "auto"


def test_a_whole_file(load):
    config = load(
        """
        l1: {size: 8GiB, eviction: s3fifo, lease: 30s}
        keys: tokens
        chunk_tokens: 128
        min_object_size: 512KiB
        lookup_timeout: 250ms
        salt: "2024"
        l2:
          - storage: memory
          - name: cold
            storage:
              plugin: acme@kvcore-acme
              bucket: kv
              part: 1.5MiB
            serde: [raw, {plugin: raw}]
            timeout: 1m
            queue_size: 64MB
          - storage: memory
        metrics_port: 0
        log_level: debug
        """
    )
    assert (config.l1.size, config.l1.eviction.plugin, config.l1.lease) == (8 << 30, "s3fifo", 30.0)
    assert (config.chunk_tokens, config.min_object_size, config.lookup_timeout) == (128, 512 << 10, 0.25)
    assert [t.name for t in config.l2] == ["memory", "cold", "memory-2"]
    cold = config.l2[1]
    assert (cold.storage.options.bucket, cold.storage.options.part, cold.storage.where) == (
        "kv",
        3 << 19,
        "l2[1].storage",
    )
    assert [(s.plugin, s.where) for s in cold.serde] == [("raw", "l2[1].serde[0]"), ("raw", "l2[1].serde[1]")]
    assert (cold.timeout, cold.queue_size) == (60.0, 64_000_000)
    with pytest.raises(ValueError, match="frozen"):
        config.salt = "x"


def test_anchors_and_merges(load):
    config = load(
        """
        l2:
          - &tier {storage: memory, timeout: 3s}
          - *tier
          - {<<: *tier, timeout: 4s}
        """
    )
    assert [(t.name, t.timeout) for t in config.l2] == [("memory", 3.0), ("memory-2", 3.0), ("memory-3", 4.0)]


def test_merges_of_merges(load):
    config = load(
        """
        l2:
          - &a {storage: memory, timeout: 3s, write: none}
          - &b {<<: *a, timeout: 4s, read: always}
          - &c {<<: [*b, *a, *c], name: c, read: auto}
        """
    )
    assert [(t.timeout, t.write, t.read) for t in config.l2] == [
        (3.0, "none", "auto"),
        (4.0, "none", "always"),
        (4.0, "none", "auto"),
    ]


# --- files that are none

BOMB = "a: &a [x]\n" + "".join(f"{c}: &{c} [{','.join(['*' + before] * 9)}]\n" for before, c in pairwise("abcdefgh"))
"""Nine to the power of seven values."""


def test_a_directory(registry, tmp_path):
    with pytest.raises(ConfigError, match="is a directory: give the path of a YAML file"):
        load_config(tmp_path, env={}, registry=registry)


def test_an_absent_file(registry, tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: does not exist"):
        load_config(tmp_path / "gone.yaml", env={}, registry=registry)


def test_an_unreadable_file(registry, tmp_path):
    file = tmp_path / "kvcore.yaml"
    file.write_text("keys: tokens\n")
    file.chmod(0)
    if os.access(file, os.R_OK):  # root reads everything: a path through a plain file cannot be read by anyone
        file = file / "below"
    with pytest.raises(ConfigError, match="cannot be read: "):
        load_config(file, env={}, registry=registry)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("l1: [", "kvcore.yaml:1:6: is not YAML: while parsing a flow"),
        ("l1:\n\t size: 1", "kvcore.yaml:2:1: is not YAML"),
        ("a: b: c", "kvcore.yaml:1:5: is not YAML: mapping values are not allowed here"),
        ("- a\n- b\n", "kvcore.yaml:1:1: must be a mapping (`key: value` lines), not a list"),
        ("hello", "kvcore.yaml:1:1: must be a mapping (`key: value` lines), not one plain value"),
        ("a: 1\n---\nb: 2\n", "kvcore.yaml:2:1: is not YAML: expected a single document"),
        ("l1: \x01", "kvcore.yaml: is not YAML"),
        ("l1: *nowhere", "kvcore.yaml:1:5: is not YAML: found undefined alias"),
        ("[" * 100 + "]" * 100, "not a list"),
        ("l1: " + "[" * 100_000, "kvcore.yaml: is nested deeper than 32 levels"),
        ("l1: " + "[" * 40 + "]" * 40, "kvcore.yaml: is nested deeper than 32 levels"),
        ("l1: &a [*a]", "kvcore.yaml: is nested deeper than 32 levels"),
        ("keys: " + "x" * (1 << 20), "is larger than 1024 KiB"),
        (
            BOMB,
            "kvcore.yaml: holds more than 10000 values after its aliases are expanded",
        ),
    ],
)  # fmt: skip
def test_not_a_configuration(faults, text, says):
    [line] = faults(text)
    assert says in line


def test_not_utf8(registry, tmp_path):
    (tmp_path / "k.yaml").write_bytes(b"salt: \xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 6\)"):
        load_config(tmp_path / "k.yaml", env={}, registry=registry)


# --- faults


def test_every_fault_at_once_with_its_place(faults):
    text = """\
l1:
  size: 8
  evction: lru
  lease: 5
keys: tokns
chunk_tokens: many
salt: 123
l2:
  - storage: {plugin: acme, buckt: x, retries: many}
    serde: raw
  - storge: memory
  - {storage: redis, timeout: 2 parsecs}
hooks: [nobody]
metrics_port: true
l1: {}
"""
    lines = faults(text)
    expected = [
        "kvcore.yaml:2:9: l1.size: 8 is not a size: write a number and a unit, such as 8GiB or 500MB",
        "kvcore.yaml:3:3: l1.evction: no such option, given 'lru'; "
        "allowed: eviction, lease, size, ttl; did you mean 'eviction'?",
        "kvcore.yaml:4:10: l1.lease: 5 is not a duration: write a number and a unit, such as 200ms or 2s",
        "kvcore.yaml:5:7: keys: no keys plugin is named 'tokns'. Did you mean 'tokens'?",
        "kvcore.yaml:6:15: chunk_tokens: 'many' is no number of tokens: write a whole number above 0, or auto",
        "kvcore.yaml:7:7: salt: must be text (put it in quotes), given 123",
        "kvcore.yaml:9:14: l2[0].storage.bucket: is missing: Where the objects are kept.",
        "kvcore.yaml:9:29: l2[0].storage.buckt: no such option, given a hidden value; "
        "allowed: bucket, part, retries, secret_key; did you mean 'bucket'?",
        "kvcore.yaml:9:48: l2[0].storage.retries: must be a whole number, given 'many'",
        "kvcore.yaml:10:12: l2[0].serde: must be a list (write [raw]), given 'raw'",
        "kvcore.yaml:11:5: l2[1].storage: is missing: Where the bytes are kept: a storage plugin.",
        "kvcore.yaml:11:5: l2[1].storge: no such option, given 'memory'; "
        "allowed: capacity, eviction, name, promote, queue_size, read, serde, storage, timeout, ttl, write; "
        "did you mean 'storage'?",
        "kvcore.yaml:12:15: l2[2].storage: no storage plugin is named 'redis'.",
        "kvcore.yaml:12:31: l2[2].timeout: '2 parsecs' has no known unit of duration",
        "kvcore.yaml:13:9: hooks[0]: no hooks plugin is named 'nobody'.",
        "kvcore.yaml:14:15: metrics_port: must be a whole number, given true",
        "kvcore.yaml:15:1: l1: is written twice, first in line 1: keep one",
    ]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)
    assert lines[12].endswith("To get 'redis': pip install kvcore-redis")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("l1:", "1:4: l1: must be a mapping, given nothing"),
        ("l1: 8GiB", "1:5: l1: must be a mapping, given '8GiB'"),
        ("l2: {storage: memory}", "1:5: l2: must be a list, given a mapping"),
        ("l2: [memory]", "1:6: l2[0]: must be a mapping, given 'memory'"),
        ("hooks: x", "1:8: hooks: must be a list (write [x]), given 'x'"),
        ("hooks: [1]", "1:9: hooks[0]: must be the name of a hooks plugin or {plugin: name, option: value}, given 1"),
        ("chunk_tokens: 0", "1:15: chunk_tokens: 0 is no number of tokens"),
        ("chunk_tokens: true", "chunk_tokens: True is no number of tokens"),
        ('chunk_tokens: "256"', "chunk_tokens: '256' is no number of tokens"),
        ("metrics_port: 70000", "metrics_port: must be less than or equal to 65535, given 70000"),
        ("metrics_port: 80.0", "metrics_port: must be a whole number, given 80.0"),
        ("lookup_timeout: 0s", "lookup_timeout: must be greater than 0, given '0s'"),
        ("lookup_timeout: -1s", "lookup_timeout: '-1s' is not a duration"),
        ("log_level: loud", "log_level: must be 'debug', 'info', 'warning' or 'error', given 'loud'"),
        ("keys: [a]", "keys: must be the name of a keys plugin or {plugin: name, option: value}, given ['a']"),
        ("keys: {scheme: x}", "1:7: keys: `plugin` is missing: name the keys plugin"),
        ("keys: {plugin: 3}", "keys: must be the name of a keys plugin"),
        ("keys: {plugin: engine, x: 1}", "1:24: keys.x: no such option: keys plugin 'engine' has none"),
        ("l2: [{storage: memory, name: L1}]", "l2[0].name: String should match pattern"),
        ("l2: [{storage: memory, name: l1}]", "l2[0].name: the name 'l1' is taken by L1"),
        ("l2: [{storage: memory, name: a}, {storage: memory, name: a}]", "l2[1].name: the name 'a' is taken by l2[0]"),
        ("on: 1", "1:1: on: no such option, given 1"),
        ("1: 2", "1:1: 1: no such option, given 2"),
        ("[a]: 1", "1:1: a key must be a plain word"),
        ("salt: !!python/object:os.system x", "salt: has the tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("salt: !secret x", "1:7: salt: has the tag '!secret': tags are not allowed"),
        ("<<: [1]", "`<<` merges mappings only"),
        ("log_level: !!bool x", "log_level: must be 'debug', 'info', 'warning' or 'error', given 'x'"),
        ('metrics_port: !!int ""', "metrics_port: must be a whole number, given ''"),
        ('metrics_port: !!float ""', "metrics_port: must be a whole number, given ''"),
        ("l1: {size: 1GiB, size: 2GiB}", "1:18: l1.size: is written twice, first in line 1: keep one"),
    ],
)
def test_single_faults(faults, text, says):
    lines = faults(text)
    assert any(says in line for line in lines), lines


DIGITS = "9" * 4000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("l1: {size: 0x" + "f" * 5000 + "}", "(5004 characters) has no known unit of size"),
        (f"chunk_tokens: {DIGITS}", "(4002 characters) is no number of tokens"),
        (f"chunk_tokens: {DIGITS}{DIGITS}", "is no number of tokens"),
        ("chunk_tokens: 2000000", "chunk_tokens: 2000000 tokens are more than 1048576"),
        (f"metrics_port: {DIGITS}", "metrics_port: must be a whole number, given '999"),
        ("l1: {size: 0.0001B}", "l1.size: '0.0001B' is less than one byte"),
        ("l1: {size: 0B}", "l1.size: '0B' is less than 1 MiB"),
        ("l1: {size: 1023KiB}", "l1.size: '1023KiB' is less than 1 MiB: no object would fit"),
        (f"l1: {{size: {DIGITS}GiB}}", "is more than 9223372036854775807 bytes"),
        ("l1: {lease: 1" + "0" * 300 + "s}", "is longer than ten years"),
        (f"lookup_timeout: {DIGITS}d", "is longer than ten years"),
        ("l2: [{storage: memory, serde: [raw, raw, raw, raw, raw, raw, raw, raw, raw]}]",
         "1:31: l2[0].serde: has 9 entries, at most 8 are possible"),
        ('salt: "\\ud800"', "1:7: salt: is not valid Unicode text"),
        ('"\\ud800": 1', "holds a name that is not valid Unicode text"),
        ("keys: " + "x" * 5000, "no keys plugin is named 'xxx"),
    ],
)  # fmt: skip
def test_absurd_values_are_one_short_fault(faults, text, says):
    [line] = faults(text)
    assert says in line
    assert len(line) < 500


def test_as_many_serdes_as_a_frame_holds(load):
    assert (
        len(load("l2: [{storage: memory, serde: [raw, raw, raw, raw, raw, raw, raw, raw]}]").l2[0].serde) == MAX_STAGES
    )


def test_a_policy_inside_a_storage_is_checked_with_the_rest(faults, load):
    text = """\
l2:
  - storage:
      plugin: memory
      capacity: 1GiB
      eviction: {plugin: lru, size: 3}
  - storage: {plugin: memory, eviction: lruu}
  - storage: {plugin: memory, eviction: {size: 3}}
"""
    first, second, third = faults(text)
    assert first == ("kvcore.yaml:5:31: l2[0].storage.eviction.size: no such option: eviction plugin 'lru' has none")
    assert second.startswith(
        "kvcore.yaml:6:41: l2[1].storage.eviction: no eviction plugin is named 'lruu'. Did you mean"
    )
    assert "kvcore.yaml:7:41: l2[2].storage.eviction: {'size': 3} is not an eviction policy" in third
    assert load("l2: [{storage: {plugin: memory, eviction: s3fifo}}]").l2[0].storage.options.eviction.plugin == "s3fifo"
    env = {"KVCORE_L2__0__STORAGE__EVICTION": "lruu"}
    assert "environment KVCORE_L2__0__STORAGE__EVICTION: " in faults("l2: [{storage: memory}]", env=env)[0]


# --- the environment and flags


def test_precedence(load):
    text = "l1: {size: 1GiB, lease: 1s}\nlookup_timeout: 1s\n"
    env = {"KVCORE_L1__SIZE": "2GiB", "KVCORE_LOOKUP_TIMEOUT": "2s"}
    config = load(text, env=env, flags={"l1.size": "3GiB"})
    assert (config.l1.size, config.lookup_timeout, config.l1.lease, config.min_object_size) == (
        3 << 30,
        2.0,
        1.0,
        1 << 20,
    )
    kinds = {row.path: str(row.source) for row in config.rows()}
    assert kinds["l1.size"] == "flag l1.size"
    assert kinds["lookup_timeout"] == "environment KVCORE_LOOKUP_TIMEOUT"
    assert kinds["l1.lease"] == "kvcore.yaml:1:25"
    assert kinds["min_object_size"] == "default"


def test_the_environment_reaches_into_lists_and_plugins(load):
    env = {
        "KVCORE_L2__0__STORAGE__BUCKET": "b",
        "KVCORE_L2__0__STORAGE": "acme",
        "KVCORE_L2__0__STORAGE__RETRIES": "5",
        "KVCORE_L2__1__STORAGE": "memory",
        "KVCORE_SALT": "123",
        "KVCORE_METRICS_PORT": "0",
        "KVCORE_CHUNK_TOKENS": "64",
        "KVCORE_LOG_LEVEL": "info",
        "OTHER_KVCORE": "x",
        "KVCORE_TEST_MODELS": "x",
    }
    config = load("l2: [{storage: memory, timeout: 3s}]\n", env=env)
    assert [t.storage.plugin for t in config.l2] == ["acme", "memory"]
    assert (config.l2[0].storage.options.bucket, config.l2[0].storage.options.retries) == ("b", 5)
    assert config.l2[0].timeout == 3.0
    assert (config.salt, config.metrics_port, config.chunk_tokens, config.log_level) == ("123", 0, 64, "info")


def test_text_for_text_and_numbers_for_numbers(load):
    env = {"KVCORE_L2__0__STORAGE__BUCKET": "007", "KVCORE_L2__0__STORAGE__RETRIES": "007", "KVCORE_SALT": "true"}
    config = load("l2: [{storage: acme}]", env=env)
    assert (config.l2[0].storage.options.bucket, config.l2[0].storage.options.retries) == ("007", 7)
    assert config.salt == "true"


def test_a_number_beyond_its_bound_is_no_text(faults):
    beyond = "must be less than or equal to 1, given 2"
    yaml = "l2: [{storage: {plugin: faulty, storage: memory, error_rate: 2}}]"
    assert [line.endswith(beyond) for line in faults(yaml)] == [True]
    flags = {"l2[0].storage.error_rate": "2"}
    assert faults(yaml.replace("2}}", "0}}"), flags=flags) == [f"flag l2[0].storage.error_rate: {beyond}"]
    assert "must be less than or equal to 65535, given 70000" in faults(env={"KVCORE_METRICS_PORT": "70000"})[0]


def test_flow_lists_and_null_in_the_environment(load):
    config = load(
        "metrics_port: 1", env={"KVCORE_L2": "[{storage: memory, timeout: 1s}]", "KVCORE_METRICS_PORT": "null"}
    )
    assert (config.l2[0].timeout, config.metrics_port) == (1.0, None)


def test_an_option_of_a_plugin_written_as_a_name(load):
    config = load("l2: [{storage: acme}]", env={"KVCORE_L2__0__STORAGE__BUCKET": "b"})
    assert config.l2[0].storage.options.bucket == "b"
    sources = {row.path: str(row.source) for row in config.rows()}
    assert sources["l2[0].storage"] == "kvcore.yaml:1:16"
    assert sources["l2[0].storage.bucket"] == "environment KVCORE_L2__0__STORAGE__BUCKET"


def test_another_plugin_replaces_the_options(load):
    text = "l2: [{storage: {plugin: acme, bucket: b}}]"
    assert load(text, env={"KVCORE_L2__0__STORAGE": "memory"}).l2[0].storage.plugin == "memory"
    assert load(text, flags={"l2[0].storage": {"plugin": "memory"}}).l2[0].storage.plugin == "memory"


def test_nested_flags_are_merged(load):
    config = load("l1: {size: 1GiB, lease: 9s}", flags={"l1": {"size": "2GiB"}, "metrics_port": 9})
    assert (config.l1.size, config.l1.lease, config.metrics_port) == (2 << 30, 9.0, 9)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"KVCORE_L1__SIZ": "1GiB"}, "environment KVCORE_L1__SIZ: l1.siz: no such option"),
        ({"KVCORE_L1__SIZ": "1GiB"}, "; allowed: eviction, lease, size, ttl; did you mean KVCORE_L1__SIZE?"),
        ({"KVCORE_CONFG": "x"}, "did you mean KVCORE_CONFIG?"),
        ({"KVCORE_BLOCK_PLUGIN": "x"}, "did you mean KVCORE_BLOCK_PLUGINS?"),
        ({"KVCORE_L1_SIZE": "1GiB"}, "environment KVCORE_L1_SIZE: l1_size: no such option"),
        ({"KVCORE_L1_SIZE": "1GiB"}, "; did you mean KVCORE_L1__SIZE?"),
        ({"KVCORE_L1_SIZ": "1GiB"}, "; did you mean KVCORE_L1__SIZE?"),
        ({"KVCORE_L2_0_STORAGE_PATH": "/x"}, "; did you mean KVCORE_L2__0__STORAGE__PATH?"),
        ({"KVCORE_L2_QUEUE_SIZE": "1GiB"}, "; did you mean KVCORE_L2__0__QUEUE_SIZE?"),
        ({"KVCORE_L2__" + "9" * 5000: "x"}, "has an index that no list reaches"),
        ({"KVCORE_L1" + "__X" * 3000: "x"}, "is nested deeper than 32 levels"),
        ({"KVCORE_SALT": "\udcff"}, "environment KVCORE_SALT: salt: is not valid Unicode text"),
        ({"KVCORE_L1__": "x"}, "environment KVCORE_L1__: has an empty part between `__`"),
        ({"KVCORE_L1__SIZE": "8"}, "environment KVCORE_L1__SIZE: l1.size: '8' is not a size"),
        ({"KVCORE_L2__1__STORAGE": "memory"}, "l2 has 0 entries: the next index is 0, not 1"),
        ({"KVCORE_HOOKS": "[a"}, "environment KVCORE_HOOKS: hooks: is not YAML"),
        ({"KVCORE_CHUNK_TOKENS": "many"}, "KVCORE_CHUNK_TOKENS: chunk_tokens: 'many' is no number of tokens"),
        ({"KVCORE_L1": "8GiB"}, "environment KVCORE_L1: l1: must be a mapping, given '8GiB'"),
    ],
)  # fmt: skip
def test_faults_of_the_environment(faults, env, says):
    lines = faults("l2: []", env=env)
    assert any(says in line for line in lines), lines


def test_variables_of_kubernetes_services_are_somebody_elses(load, faults):
    """It makes them for a service named `kvcore` or `kvcore-metrics`."""
    env = {
        "KVCORE_SERVICE_HOST": "10.0.0.1",
        "KVCORE_SERVICE_PORT_HTTP": "80",
        "KVCORE_PORT": "tcp://10.0.0.1:80",
        "KVCORE_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVCORE_METRICS_PORT": "tcp://10.0.0.1:80",
    }
    assert load("l2: []", env=env).metrics_port is None
    assert "must be a whole number" in faults("l2: []", env={"KVCORE_METRICS_PORT": "many"})[0]


@pytest.mark.parametrize("token", ["", "a token of a shell that asks"])
def test_a_token_in_the_environment_configures_nothing_by_itself(load, faults, token):
    env = {"KVCORE_SERVER__HTTP__TOKEN": token, "KVCORE_SERVER__TOKEN": token}
    assert load("l2: []", env=env).server is None
    assert load(env=env).server is None
    only_http = {"KVCORE_SERVER__HTTP__TOKEN": token}
    for server in ("unix:///run/x.sock", "{url: unix:///run/x.sock}", "{url: unix:///run/x.sock, http: null}"):
        assert load(f"server: {server}", env=only_http).server.http is None
    assert faults("server: {}", env=only_http)[0].startswith("kvcore.yaml:1:9: server.url: is missing")
    text = "server: {url: unix:///run/x.sock, http: {token: a token of the file}}"
    assert "server.http.listen: is missing" in faults(text, env={})[0]


def itself() -> dict:
    value: dict = {}
    value["size"] = value
    return value


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"l1": itself()}, "flag l1: is nested deeper than 32 levels, or holds itself"),
        ({"l2": [itself()]}, "flag l2: is nested deeper than 32 levels, or holds itself"),
        ({"l2": [{"x": [0] * 20_000}]}, "flag l2: holds more than 10000 values"),
        ({"chunk_tokens": 10**5000}, "flag chunk_tokens: is a number of more than 64 bits"),
        ({"metrics_port": float("nan")}, "metrics_port: must be a whole number, given nan"),
        ({"l1" + ".x" * 5000: 1}, "(10002 characters): is nested deeper than 32 levels"),
        ({"l2[" + "9" * 5000 + "]": 1}, "is no path: write it like"),
        ({5: 1}, "flag 5: 5 is no path: write it like"),
        ({"salt": "\ud800"}, "flag salt: is not valid Unicode text"),
        ({"l2": [{"name": "\ud800"}]}, "flag l2: holds text that is not valid Unicode text"),
    ],
)
def test_what_python_code_may_give_as_flags(faults, flags, says):
    [line] = faults(flags=flags)
    assert says in line
    assert len(line) < 500


def test_a_very_long_path_of_a_file(registry):
    for path in ("/" + "a" * 5000, "a/" * 5000):
        with pytest.raises(ConfigError, match=r"\.\.\. \(\d+ characters\): (cannot be read|does not exist)"):
            load_config(path, env={}, registry=registry)


def test_faults_of_flags(faults):
    assert faults(flags={"l1..size": "1GiB"}) == [
        "flag l1..size: 'l1..size' is no path: write it like l1.size or l2[0].storage.path"
    ]
    assert "flag l1.size: 7 is not a size" in faults(flags={"l1.size": 7})[0]
    assert faults(flags={"l1.sise": 7})[0].startswith("flag l1.sise: no such option, given 7; allowed: ")
    assert "keys is no list, so it has no entry 0" in faults("keys: {plugin: engine}", flags={"keys[0]": "x"})[0]


def test_the_file_named_by_the_environment(load, tmp_path):
    (tmp_path / "named.yaml").write_text("salt: x")
    config = load(env={"KVCORE_CONFIG": str(tmp_path / "named.yaml")})
    assert (config.salt, config.file) == ("x", str(tmp_path / "named.yaml"))
    assert load(env={"KVCORE_CONFIG": ""}).file is None


# --- secrets


def test_secrets_are_masked_everywhere(load, faults):
    text = "l2: [{storage: {plugin: acme, bucket: b, secret_key: hunter2}}]"
    config = load(text)
    assert config.l2[0].storage.options.secret_key.get_secret_value() == "hunter2"
    shown = {row.path: row.value for row in config.rows()}
    assert shown["l2[0].storage.secret_key"] == "**********"
    assert "hunter2" not in repr(config) + str(config.rows())
    for wrong in ("secret_kye: hunter2", "secret_key: [hunter2]", "secret_key: {a: hunter2}", "password: hunter2"):
        lines = faults(text.replace("secret_key: hunter2", wrong))
        assert "hunter2" not in "\n".join(lines)
        assert len(lines) == 1
    assert "hunter2" not in "\n".join(faults(text, env={"KVCORE_L2__0__STORAGE__SECRT_KEY": "hunter2"}))


def test_rows_show_units(load):
    shown = {r.path: r.value for r in load("l1: {size: 1536MiB}\nl2: [{storage: {plugin: acme, bucket: b}}]").rows()}
    assert shown["l1.size"] == "1.5GiB"
    assert shown["lookup_timeout"] == "2s"
    assert shown["l2[0].storage.part"] == "8MiB"
    assert shown["l2[0].queue_size"] == "1GiB"
    assert shown["hooks"] == []
