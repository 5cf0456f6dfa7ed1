"""`kvcore from-lmcache`: nothing is lost without a word, and what comes out is accepted."""

import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmcache_examples import FLAGS, YAML

from kvcore.cli.app import run
from kvcore.config import load_config
from kvcore.plugins import Registry

Lines = list[dict[str, str]]
DEEP = "[" * 3000 + "]" * 3000
PAGES = yaml.safe_load((Path(__file__).parent / "lmcache_pages.yaml").read_text())
"""What stands in LMCache's documentation."""


@pytest.fixture(autouse=True)
def no_lmcache_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LMCACHE_"):
            monkeypatch.delenv(name)


def converted(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], Lines]:
    """The configuration, accepted by kvcore, and the lines."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    assert run(["from-lmcache", *words[:at], "--json", *words[at:]]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    report = json.loads(out)
    return report["config"], report["lines"]


def accepted(config: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvcore config check` finds nothing wrong with it."""
    path = folder / "kvcore.yaml"
    path.write_text(yaml.safe_dump(config))
    status = run(["config", "check", str(path)])
    assert status == 0, capsys.readouterr().out
    capsys.readouterr()


def names(lines: Lines, verdict: str) -> set[str]:
    return {line["setting"].partition(": ")[0] for line in lines if line["verdict"] == verdict}


@pytest.mark.parametrize(("text", "config", "left"), [e[1:] for e in YAML], ids=[e[0] for e in YAML])
def test_files(
    text: str, config: dict[str, Any], left: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    got, lines = converted(capsys, str(file))
    assert got == config
    assert names(lines, "left out") == left
    told = {int(line["place"].rpartition(":")[2]) for line in lines if line["place"] != "default"}
    assert told == values_at(text), "a line of the file is not told of"
    assert all(line["why"] for line in lines if line["verdict"] != "kept")
    accepted(got, tmp_path, capsys)


def values_at(text: str) -> set[int]:
    """The lines of a file on which settings stand, by a reading of its own."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    found = set()
    for key, value in root.value:
        inner = value.value if isinstance(value, yaml.MappingNode) else [(key, value)]
        found |= {name.start_mark.line + 1 for name, _ in inner}
    return found


@pytest.mark.parametrize(("words", "config", "left"), [e[1:] for e in FLAGS], ids=[e[0] for e in FLAGS])
def test_flags(
    words: list[str], config: dict[str, Any], left: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got, lines = converted(capsys, "--", *words)
    assert got == config
    assert names(lines, "left out") == left
    told = {line["place"].partition("[")[0] for line in lines} - {"default"}
    assert told == {w.partition("=")[0] for w in words if w.startswith("--")}, "a flag is not told of"
    accepted(got, tmp_path, capsys)


@pytest.mark.parametrize("page", PAGES, ids=[page["page"] for page in PAGES])
def test_the_pages_of_the_documentation(
    page: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is converted to something that kvcore accepts, and each of its settings is told of, with a reason."""
    for program in ("a.py", "b.sh"):
        (tmp_path / program).touch()
    text = str(page.get("file") or page["command"]).replace("{folder}", str(tmp_path))
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    words = shlex.split(text) if "command" in page else []
    config, lines = converted(capsys, *(("--", *words) if words else (str(file),)))
    given = [line for line in lines if line["place"] != "default"]
    assert [tier["storage"]["plugin"] for tier in config.get("l2", [])] == page.get("tiers", [])
    assert (names(given, "kept") | names(given, "changed")) == set(page.get("carried", []))
    assert unknown(lines) == set(page.get("unknown", []))
    assert all(line["why"] for line in lines if line["verdict"] != "kept")
    told = {line["setting"].partition(": ")[0] for line in lines}
    if words:
        last = {name.rpartition(".")[2] for name in told} | told
        assert set(keys_of(words)) - {"kv_connector_extra_config", "connectors", "backend_params"} <= last
    elif "apiVersion" not in text and "lmcacheConfig" not in text:
        assert {int(line["place"].rpartition(":")[2]) for line in given} == values_at(text)
    elif "lmcache.ai" in text:
        of_spec = yaml.safe_load(text)["spec"]
        places = {int(line["place"].rpartition(":")[2]) for line in given}
        for key, begin, end in spans(text):
            assert any(begin <= place <= end for place in places), f"spec.{key} is not told of: {of_spec[key]}"
    accepted(config, tmp_path, capsys)


def unknown(lines: Lines) -> set[str]:
    """What is said to be no setting of LMCache's."""
    return {line["setting"].partition(": ")[0] for line in lines if line["why"].startswith("LMCache 0.5.6 has no such")}


def keys_of(words: list[str]) -> list[str]:
    """The names in a command: flags of LMCache's server, its variables, and keys of JSON."""
    found: list[str] = []
    server = any("lmcache" in word and not word.startswith(("{", "--", "LMCACHE_")) for word in words)
    for i, word in enumerate(words):
        if word.startswith("--") and server and any(w == "server" or "multiprocess" in w for w in words[:i]):
            found += [] if word in ("--l2-adapter", "--l1-manager") else [word[2:].removeprefix("no-")]
        elif word.startswith("LMCACHE_"):
            name = word.partition("=")[0].removeprefix("LMCACHE_").lower()
            found.append(name)
        elif word.startswith("{") and words[i - 1] not in ("--runtime-plugin-config", "--server-module"):
            found += _keys(json.loads(word))
    return [name for name in found if name != "lmcache.mp.autostart.server_args"]


def _keys(value: dict[str, Any]) -> list[str]:
    inner = [value.get("kv_connector_extra_config", {}), *value.get("connectors", []), value.get("backend_params", {})]
    return [*value, *(key for mapping in inner if mapping for key in _keys(mapping))]


def spans(text: str) -> list[tuple[str, int, int]]:
    """The settings in a manifest's `spec`: first and last line of each."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    (spec,) = (value for key, value in root.value if key.value == "spec")
    return [(key.value, key.start_mark.line + 1, max(key.start_mark.line, value.end_mark.line) + 1)
            for key, value in spec.value]  # fmt: skip


def test_every_option_of_an_adapter_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    for _, words, _, _ in FLAGS:
        _, lines = converted(capsys, "--", *words)
        for word in words:
            if word.startswith("{"):
                told = {line["setting"].partition(": ")[0].partition(".")[2] or line["setting"].partition(": ")[0]
                        for line in lines if line["place"].startswith("--l2-adapter")}  # fmt: skip
                assert set(json.loads(word)) - {"backend_params"} <= told


def test_the_environment_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    monkeypatch.setenv("LMCACHE_LOCAL_DISK", "file:///cache/")
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_DISK_SIZE", "1.5")
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", '{"use_odirect": false}')
    monkeypatch.setenv("LMCACHE_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    got, lines = converted(capsys, "--env")
    assert got == {
        "l1": {"size": "5GiB"},
        "chunk_tokens": 256,
        "l2": [{"storage": {"plugin": "disk", "path": "/cache/", "direct": "off", "capacity": "1536MiB"}}],
        "log_level": "warning",
    }
    assert names(lines, "left out") == {"track_usage"}


def test_the_environment_wins_over_the_file_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in LMCache."""
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 256\nmax_local_cpu_size: 2\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "128")
    got, lines = converted(capsys, "--env")
    assert got == {"l1": {"size": "2GiB"}, "chunk_tokens": 128}
    (lost,) = [line for line in lines if line["verdict"] == "left out"]
    assert (lost["setting"], lost["why"]) == ("chunk_size: 256", "the environment says otherwise")


def test_what_people_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "lmcache.yaml", tmp_path / "kvcore.yaml"
    file.write_text("max_local_cpu_size: 2\nremote_url: redis://me:hunter2@host:6379\nenable_blending: true\n")
    assert run(["from-lmcache", str(file), "--out", str(out)]) == 0
    kept, changed, user, left, summary = capsys.readouterr().out.splitlines()
    assert kept.startswith(f"kept      {file}:1  max_local_cpu_size: 2 -> l1.size: 2GiB")
    assert changed.startswith(
        f"changed   {file}:2  remote_url: redis://me:***@host:6379 -> l2[0].storage.url: redis://host:6379"
    )
    assert "REDIS_PASSWORD" in changed
    assert user.endswith("l2[0].storage.username: me")
    assert left.startswith(f"left out  {file}:3  enable_blending: True")
    assert summary == f"2 kept, 1 changed, 1 left out. Next: pip install kvcore-redis; kvcore config check {out}"
    config = load_config(str(out), env={}, registry=Registry())
    assert config.l1.size == 2 << 30
    assert "hunter2" not in out.read_text()


def test_on_stdout_the_yaml_is_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 256\nremote_url: nonsense\n")
    assert run(["from-lmcache", str(file)]) == 0
    shown = capsys.readouterr()
    assert "\nwarning: no tier is left of remote_url" in shown.err
    assert yaml.safe_load(shown.out) == {"l1": {"size": "5GiB"}, "chunk_tokens": 256}
    assert "chunk_size: 256 -> chunk_tokens: 256" in shown.err


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("apiVersion: apps/v1\nkind: DaemonSet\n", (), "Kubernetes manifest (DaemonSet) and starts no LMCache"),
        (None, ("--", "lmcache", "coordinator", "--port", "9300"), "kvcore has no coordinator"),
        (None, ("--", "lmcache_controller", "--port", "9000"), "kvcore has no controller"),
        (None, ("--", "lmcache_server", "localhost", "65432"), "`kvcore serve` is that"),
        (None, ("--", "vllm", "serve", "M", "--kv-transfer-config", "{'a"), "--kv-transfer-config is no JSON"),
        (None, ("--", "LMCACHE_CONFIG_FILE=/nowhere.yaml", "vllm", "serve", "M"), "/nowhere.yaml: does not exist"),
        (None, ("--", "vllm", "serve", "M"), "no flag in"),
        ("- a\n", (), "must be a mapping"),
        ("a: [\n", (), "is not YAML"),
        ("chunk_size: 1\n", ("--out", "{file}"), "exists: give another --out"),
        (None, (), "does not exist"),
        (None, ("--", "lmcache", "server"), "no flag in"),
        (None, ("--", "lmcache", "server", "--l2-adapter", '{"password": "hunter2"'), "--l2-adapter is no JSON"),
        (None, ("--env", "--", "lmcache", "server", "--port", "1"), "Leave --env out"),
        (None, ("--", "lmcache", "server", "--l2-adapter", DEEP), "--l2-adapter is nested deeper than 32 levels"),
        (None, ("--", "lmcache", "server", "--l2-adapter", DEEP[2950:3050]), "--l2-adapter is nested deeper than 32"),
        (None, ("--", "vllm", "serve", "M", "--kv-transfer-config", DEEP), "--kv-transfer-config is nested deeper"),
        (None, ("--", "TOKEN=hunter2", "vllm", "serve", "M"), "no flag in this command line"),
    ],
)
def test_what_is_refused(
    text: str | None, arguments: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lmcache.yaml"
    if text is not None:
        file.write_text(text)
    words = [] if "--" in arguments else [str(file)]
    assert run(["from-lmcache", *words, *(a.replace("{file}", str(file)) for a in arguments)]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert "hunter2" not in error


def test_nothing_to_convert(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["from-lmcache"]) == 1
    assert "give LMCache's YAML file, or --env" in capsys.readouterr().err


def test_what_is_not_in_the_file_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("save_decode_cache: true\nremote_url: redis://host:6379\nremote_serde: naive\n")
    config, lines = converted(capsys, str(file))
    told = {line["setting"].partition(":")[0]: line for line in lines}
    assert "serde" not in config["l2"][0]
    for name in ("save_decode_cache", "remote_serde"):
        assert told[name]["verdict"] == "kept"
        assert told[name]["why"].startswith("the default")


def test_how_generated_tokens_are_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By words behind kvcore run's `--`, which say them in full and are what the connector reads."""
    file = tmp_path / "lmcache.yaml"
    file.write_text("save_decode_cache: false\n")
    _, lines = converted(capsys, str(file))
    (told,) = [line for line in lines if line["setting"].startswith("save_decode_cache")]
    _, flag, value = told["why"].rpartition("--kv-transfer-config ")
    assert told["verdict"] == "changed"
    assert flag
    assert json.loads(value.strip("'")) == {"kv_connector_extra_config": {"kvcore.save_decode": False}}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("remote_url: nonsense\nlocal_disk: ''\n", "remote_url"),
        ("remote_storage_plugins: [redis]\nremote_url: 7\n", "remote_storage_plugins, remote_url"),
        ("max_local_cpu_size: 2\n", None),
        ("remote_url: nonsense\nlocal_disk: /cache\n", None),
    ],
)
def test_that_no_tier_is_left(text: str, named: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    assert run(["from-lmcache", str(file), "--out", str(tmp_path / "kvcore.yaml")]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    expected = [f"warning: no tier is left of {named}: what leaves L1 is lost. Add one to `l2` (docs/plugins.md)"]
    assert found == (expected if named else [])


def test_an_engines_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its file, over that its variables, over those its flags, as in LMCache; and the command to start instead."""
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\nmax_local_cpu_size: 2\nlog_level: error\n")
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    extra = {"kv_connector_extra_config": {"lmcache.chunk_size": 128}}
    out = tmp_path / "kvcore.yaml"
    words = ["vllm", "serve", "MODEL", "--port", "8000", "--kv-transfer-config", json.dumps(transfer | extra)]
    env = [f"LMCACHE_CONFIG_FILE={file}", "LMCACHE_CHUNK_SIZE=256", "LMCACHE_LOG_LEVEL=DEBUG"]
    assert run(["from-lmcache", "--out", str(out), "--", *env, *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"Then: kvcore run vllm --config {out} -- serve MODEL --port 8000"
    assert yaml.safe_load(out.read_text()) == {"l1": {"size": "2GiB"}, "chunk_tokens": 128, "log_level": "debug"}
    lost = [line for line in said if "otherwise" in line]
    assert [line.split()[2] for line in lost] == [f"{file}:1", f"{file}:3", "LMCACHE_CHUNK_SIZE"]


def test_the_start_of_an_sglang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("local_cpu: true\n")
    words = ["python", "-m", "sglang.launch_server", "--model-path", "M", "--enable-lmcache", "--lmcache-config-file"]
    assert run(["from-lmcache", "--json", "--", *words, str(file), "--port", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["start"] == ["kvcore", "run", "sglang", "--", "--model-path", "M", "--port", "1"]
    assert report["config"] == {"l1": {"size": "5GiB"}}


def test_programs_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LMCache's `runtime_plugin_locations`, as it finds them."""
    folder = tmp_path / "plugins"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.sh", "a.py", "deep/c.py", "README.md"):
        (folder / name).touch()
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"plugin_locations: [{folder}, /not/here]\n")
    config, lines = converted(capsys, str(file))
    entries = [{"path": f"{folder}/{name}", "restart": "never"} for name in ("a.py", "b.sh", "deep/c.py")]
    assert config["plugins"] == {"run": entries}
    assert {line["verdict"] for line in lines if line["place"] != "default"} == {"changed", "left out"}
    (left,) = [line for line in lines if line["verdict"] == "left out"]
    assert "/not/here is no folder here" in left["why"]
    accepted(config, tmp_path, capsys)


def test_a_manifest_with_json_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell may fill in something yet; what is in it may be a secret, and `converted` looks for that."""
    file = tmp_path / "pod.yaml"
    adapter = """'{"type": "resp", "password": "hunter2", "port": $PORT}'"""
    file.write_text(f"apiVersion: v1\nkind: Pod\nspec:\n  args: [lmcache, server, --l2-adapter, {adapter}]\n")
    _, lines = converted(capsys, str(file))
    (left,) = [line for line in lines if line["verdict"] == "left out"]
    assert (left["setting"], left["why"]) == ("l2-adapter: ...", "no JSON object with a `type`")


def test_too_many_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(40):
        (tmp_path / f"p{i:02}.py").touch()
    config, lines = converted(capsys, "--", "lmcache", "server", "--runtime-plugin-locations", str(tmp_path))
    assert len(config["plugins"]["run"]) == 32
    (left,) = [line for line in lines if line["verdict"] == "left out"]
    assert f"{tmp_path}/p39.py" in left["why"]


def test_a_file_that_is_not_lmcaches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("replicas: 1\nwebhook:\n  enabled: true\n")
    assert run(["from-lmcache", str(file), "--out", str(tmp_path / "kvcore.yaml")]) == 0
    assert "warning: not one of these is a setting of LMCache: is it the right file?" in capsys.readouterr().out


def test_two_engines_in_one_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first is converted; what another says otherwise is told of, not mixed in."""
    container = "    - {name: c, args: [--kv-transfer-config, '%s'], env: [{name: LMCACHE_CHUNK_SIZE, value: '%d'}]}\n"
    transfer = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
    file = tmp_path / "pods.yaml"
    file.write_text(
        "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n" + container % (transfer, 64) + container % (transfer, 128)
    )
    config, lines = converted(capsys, str(file))
    assert config["chunk_tokens"] == 64
    other = [line for line in lines if line["place"].endswith(":6")]
    assert {line["setting"].partition(":")[0]: line["why"] for line in other} == {
        "chunk_size": "another LMCache's: convert it by itself",
        "kv_connector": "the same again",
        "kv_role": "the same again",
    }


def test_whatever_stands_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of another kind than LMCache takes are told of, too: nothing raises, and no setting is lost."""
    dice = random.Random(1)
    odd = [None, True, 0, -1, 1.5, "", "x", "a,b", [1, "b"], {"a": 1}, [{}], "redis://", "s3://", "://", "inf", 10**30]
    texts = [page["file"].replace("{folder}", "/folder") for page in PAGES if "file" in page]
    files = [yaml.safe_load(text) for text in texts if "apiVersion" not in text and "lmcacheConfig" not in text]
    commands = [shlex.split(page["command"]) for page in PAGES if "--l2-adapter" in page.get("command", "")]
    specs = [json.loads(words[i + 1]) for words in commands for i, word in enumerate(words) if word == "--l2-adapter"]
    for number in range(300):
        tree = dict(dice.choice(files))
        for name, value in list(tree.items()):
            if isinstance(value, dict):
                tree[name] = {key: dice.choice(odd) if dice.random() < 0.5 else v for key, v in value.items()}
            elif dice.random() < 0.5:
                tree[name] = dice.choice(odd)
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(tree))
        _, lines = converted(capsys, str(file))
        assert {int(p.rpartition(":")[2]) for p in places(lines)} == values_at(file.read_text()), tree
        spec = {key: dice.choice(odd) if dice.random() < 0.4 else value for key, value in dice.choice(specs).items()}
        _, lines = converted(capsys, "--", "lmcache", "server", "--l1-size-gb", "inf", "--l2-adapter", json.dumps(spec))
        told = {line["setting"].partition(": ")[0].rpartition(".")[2] for line in lines}
        assert {k for k, v in spec.items() if k != "backend_params" or not isinstance(v, dict)} <= told, spec


def places(lines: Lines) -> set[str]:
    return {line["place"] for line in lines if line["place"] != "default"}


def test_what_to_start_for_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kvcore.yaml"
    assert run(["from-lmcache", "--out", str(out), "--", "lmcache", "server", "--l1-size-gb", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Then: kvcore serve --config {out}"
    transfer = json.dumps({"kv_connector": "LMCacheMPConnector", "kv_role": "kv_consumer"})
    out.unlink()
    words = ["vllm", "serve", "M", f"--kv-transfer-config={transfer}"]
    assert run(["from-lmcache", "--out", str(out), "--", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"Then: kvcore serve --config {out}",
        f"Then: kvcore run vllm --config {out} --role decode -- serve M",
    ]


@pytest.mark.parametrize("number", ["1e308", "1e30"])
def test_a_size_that_no_machine_has(number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"max_local_cpu_size: {number}\nlocal_disk: /cache\nmax_local_disk_size: {number}\n")
    for words in ([str(file)], ["--", "lmcache", "server", "--l1-size-gb", number]):
        config, lines = converted(capsys, *words)
        assert config["l1"] == {"size": "auto"}
        (told,) = [line for line in lines if "l1.size" in line["became"]]
        assert (told["verdict"], told["why"]) == ("changed", "not a size above 0 that kvcore takes")
        accepted(config, tmp_path, capsys)


@pytest.mark.parametrize(
    ("url", "storage"),
    [
        ("redis-sentinel://user:hunter2@a:1,b:2/mymaster?password=hunter2",
         {"url": "redis://a:1,b:2", "password_env": "REDIS_PASSWORD", "username": "user",
          "sentinel_master": "mymaster"}),
        ("redis://a:1/2?password=hunter2", {"url": "redis://a:1/2"}),
        ("rediss://a/x#hunter2", {"url": "rediss://a"}),
        ("unix:///run/a.sock?password=hunter2", {"url": "unix:///run/a.sock"}),
        ("redis://[::1]:1?password=hunter2@hunter2", {"url": "redis://HOST:6379"}),  # or is it a password with a `?`
        ("redis://me:1?hunter2@a", {"url": "redis://HOST:6379"}),
        ("redis://", {"url": "redis://HOST:6379"}),
    ],
)  # fmt: skip
def test_a_url_of_redis(url: str, storage: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is behind its servers may be a password: it gets into neither the report nor the file (`converted`)."""
    file = tmp_path / "lmcache.yaml"
    file.write_text(f'remote_url: "{url}"\n')
    config, lines = converted(capsys, str(file))
    assert config["l2"] == [{"storage": {"plugin": "redis", **storage}}]
    assert any("password_env" in line["why"] for line in lines if line["verdict"] == "left out") == ("hunter2" in url)
    accepted(config, tmp_path, capsys)


@pytest.mark.parametrize(
    "text",
    [
        "extra_config: {encryption_key: hunter2, list: [{secret: hunter2}], deep: {authToken: {a: hunter2}}}",
        'extra_config: {redis_pass: hunter2, x: \'{"api-key": "hunter2"}\', y: \'a={"b": hunter2\'}',
        "extra_config: 'password: hunter2'",
        "remote_url: s3://me:hunter2@bucket",
        "remote_url: azure://host/?sig=hunter2",
        "extra_config: {enable_nixl_storage: true, nixl_backend: OBJ, nixl_backend_params: {bucket: b, "
        "endpoint_override: 'https://me:hunter2@host', session_token: hunter2}}",
        "apiVersion: lmcache.lmcache.ai/v1alpha1\nkind: LMCacheEngine\nspec: {env: [{name: HF_TOKEN, value: hunter2}]}",
    ],
)
def test_secrets(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`converted` looks for them; what is none is shown."""
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    config, _ = converted(capsys, str(file))
    accepted(config, tmp_path, capsys)


def test_secrets_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    adapter = '{"type": "unheard", "auth": "Bearer hunter2", "key_prefix": "kv", "tokens": 7}'
    plugin = ["--runtime-plugin-config", '{"token": "hunter2"}']
    _, lines = converted(capsys, "--", "lmcache", "server", "--l2-adapter", adapter, *plugin)
    shown = {line["setting"] for line in lines}
    assert {"auth: ***", "key_prefix: kv", "runtime-plugin-config: {'token': '***'}"} <= shown


def test_secrets_of_the_command_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "M", "--api-key", "hunter2", "hunter22", "--port", "1", "--hf-token=hunter2", "--seed", "4"]
    transfer = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
    words = ["from-lmcache", "--", "vllm", *words, "--kv-transfer-config", transfer]
    shown = ["serve", "M", "--api-key", "***", "***", "--port", "1", "--hf-token=***", "--seed", "4"]
    assert run(words) == 0
    out, said = capsys.readouterr()
    assert said.splitlines()[-1] == f"Then: kvcore run vllm --config kvcore.yaml -- {shlex.join(shown)}"
    assert run([*words[:1], "--json", *words[1:]]) == 0
    assert json.loads(capsys.readouterr().out)["start"] == ["kvcore", "run", "vllm", "--", *shown]
    assert "hunter2" not in out + said


def test_an_extra_config_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", '{"password":"hunter2"')
    _, lines = converted(capsys, "--env")
    (left,) = [line for line in lines if line["verdict"] == "left out"]
    assert (left["setting"], left["why"]) == ("extra_config: ...", "no mapping that can be read")


def test_files_that_may_have_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But what a shell's `|` and `<()` hand over is read."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero"):
        assert run(["from-lmcache", path]) == 1
        assert f"{path} is no regular file" in capsys.readouterr().err
    end, start = os.pipe()
    with open(start, "w") as out:
        out.write("chunk_size: 256\n")
    config, _ = converted(capsys, f"/dev/fd/{end}")
    os.close(end)
    assert config["chunk_tokens"] == 256


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (["lmcache", "server", "--l1-size-gb", "4"], "a server's flags"),
        (["vllm", "serve", "M", "--kv-transfer-config", '{"kv_connector": "LMCacheMPConnector"}'],
         "an engine's command line"),
        (["LMCACHE_REMOTE_URL=redis://:hunter2@a", "vllm", "serve"], "an engine's command line"),
    ],
)  # fmt: skip
def test_what_a_file_is_made_from(words: list[str], source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["from-lmcache", "--", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"# Made by `kvcore from-lmcache` from {source}.\n")
    assert "hunter2" not in out


def test_from_standard_input_and_for_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'local_cpu: true\nmax_local_cpu_size: 5\nlocal_disk: "/x\\e[31m"\n'
    words = [sys.executable, "-m", "kvcore", "from-lmcache", "-", "--out", str(tmp_path / "kvcore.yaml")]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "/dev/stdin:3" in done.stdout
    assert "\x1b" not in done.stdout
    monkeypatch.chdir(tmp_path)
    Path("lmcache.yaml").write_text("local_cpu: true\nmax_local_cpu_size: 5\n")
    assert run(["from-lmcache", "lmcache.yaml", "--out", "-"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["l1"]["size"] == "5GiB"
    assert run(["from-lmcache", "a.yaml", "b.yaml"]) == 1
    assert "or one file" in capsys.readouterr().err


def test_on_a_full_disk_nothing_is_left(tmp_path: Path) -> None:
    """An empty file would be a configuration, and in the way of the next."""
    out = tmp_path / "kvcore.yaml"
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8)); import signal; "
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from kvcore.cli import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "lmcache.yaml").write_text("local_cpu: true\nmax_local_cpu_size: 5\n")
    words = [sys.executable, "-B", "-c", code, "from-lmcache", str(tmp_path / "lmcache.yaml"), "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, f"kvcore: {out}: File too large\n")
    assert not out.exists()
