"""`kvcore config from-lmcache`: nothing is lost without a word, and what comes out is accepted."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmcache_examples import FLAGS, YAML

from kvcore.cli.app import run
from kvcore.config import load_config
from kvcore.plugins import Registry

Lines = list[dict[str, str]]


@pytest.fixture(autouse=True)
def no_lmcache_here(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("LMCACHE_"):
            monkeypatch.delenv(name)


def converted(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], Lines]:
    """The configuration, accepted by kvcore, and the lines."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    assert run(["config", "from-lmcache", *words[:at], "--json", *words[at:]]) == 0
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
    assert run(["config", "from-lmcache", str(file), "--out", str(out)]) == 0
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
    assert run(["config", "from-lmcache", str(file)]) == 0
    shown = capsys.readouterr()
    assert "\nwarning: no tier is left of remote_url" in shown.err
    assert yaml.safe_load(shown.out) == {"l1": {"size": "5GiB"}, "chunk_tokens": 256}
    assert "chunk_size: 256 -> chunk_tokens: 256" in shown.err


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("apiVersion: apps/v1\nkind: DaemonSet\n", (), "Kubernetes manifest (DaemonSet)"),
        ("- a\n", (), "must be a mapping"),
        ("a: [\n", (), "is not YAML"),
        ("chunk_size: 1\n", ("--out", "{file}"), "exists: give another --out"),
        (None, (), "does not exist"),
        (None, ("--", "lmcache", "server"), "no flag in"),
        (None, ("--", "lmcache", "server", "--l2-adapter", '{"password": "hunter2"'), "--l2-adapter is no JSON"),
        (None, ("--env", "--", "lmcache", "server", "--port", "1"), "Leave --env out"),
    ],
)
def test_what_is_refused(
    text: str | None, arguments: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lmcache.yaml"
    if text is not None:
        file.write_text(text)
    words = [] if "--" in arguments else [str(file)]
    assert run(["config", "from-lmcache", *words, *(a.replace("{file}", str(file)) for a in arguments)]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert "hunter2" not in error


def test_nothing_to_convert(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "from-lmcache"]) == 1
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
    assert run(["config", "from-lmcache", str(file), "--out", str(tmp_path / "kvcore.yaml")]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    expected = [f"warning: no tier is left of {named}: what leaves L1 is lost. Add one to `l2` (docs/plugins.md)"]
    assert found == (expected if named else [])
