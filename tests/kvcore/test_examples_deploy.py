"""The examples for systemd, Compose and Kubernetes: checked by schema tools, and their server is started."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from docs_blocks import ROOT, lines
from kvcore.config import load_config
from kvcore.plugins import Registry
from kvcore.testing.servers.process import Server, free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COMPOSE, KUBERNETES, SYSTEMD = EXAMPLES / "compose", EXAMPLES / "kubernetes", EXAMPLES / "systemd"
MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))
VERSION = "1.29"
"""The oldest Kubernetes with sidecars."""
UNITS = sorted(SYSTEMD.glob("*.service"))
PLACE = "http://127.0.0.1:7601"


def documents(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def pods(path: Path) -> list[dict[str, Any]]:
    return [d["spec"]["template"]["spec"] for d in documents(path) if "template" in d.get("spec", {})]


def containers(path: Path) -> Iterator[dict[str, Any]]:
    for pod in pods(path):
        yield from (*pod.get("initContainers", ()), *pod["containers"])


def configurations() -> dict[str, str]:
    """Every kvcore.yaml of the examples, by where it stands."""
    found = {str(p.relative_to(EXAMPLES)): p.read_text() for p in (COMPOSE / "kvcore.yaml", SYSTEMD / "kvcore.yaml")}
    for path in MANIFESTS:
        for d in documents(path):
            if d["kind"] == "ConfigMap":
                found[str(path.relative_to(EXAMPLES))] = d["data"]["kvcore.yaml"]
    return found


# -- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where", ["compose/kvcore.yaml", "kubernetes/server.yaml", "kubernetes/sidecar.yaml", "systemd/kvcore.yaml"]
)
def test_the_configuration_is_valid_for_server_and_engines(where: str, tmp_path: Path) -> None:
    """Engines read it without the server's secrets."""
    assert where in configurations()
    path = tmp_path / "kvcore.yaml"
    path.write_text(configurations()[where])
    config = load_config(str(path), env={}, registry=Registry())
    assert config.server is not None
    assert [str(url) for url in config.server.url] == ["unix:///run/kvcore/kvcore.sock"]


def serve_words() -> dict[str, list[str]]:
    """What follows `kvcore` in every example's server."""
    unit = re.search(r"^ExecStart=\S*/kvcore (serve .*)$", (SYSTEMD / "kvcore.service").read_text(), re.M)
    assert unit
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["kvcore"]["command"]
    words = {"systemd/kvcore.yaml": shlex.split(unit[1]), "compose/kvcore.yaml": compose}
    for path in MANIFESTS:
        for container in containers(path):
            if container["name"] == "kvcore":
                words[str(path.relative_to(EXAMPLES))] = container["args"]
    return words


@pytest.mark.parametrize("where", ["kubernetes/server.yaml", "kubernetes/sidecar.yaml", "systemd/kvcore.yaml"])
def test_its_server_starts_and_is_ready(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own words and file: only paths, sizes and the port are other ones, and S3 is a disk."""
    words, text, port = serve_words()[where], configurations()[where], free_port()
    with tempfile.TemporaryDirectory(prefix="kv") as short:
        values = yaml.safe_load(text)
        values["l1"]["size"] = "64MiB"
        for tier in values["l2"]:
            storage = tier["storage"]
            tier["storage"] = {"plugin": "disk", "path": f"{short}/disk", "capacity": "64MiB"} | (
                {} if storage["plugin"] == "s3" else {"plugin": storage["plugin"]}
            )
        changed = yaml.safe_dump(values).replace("/run/kvcore", short).replace("127.0.0.1:7601", f"127.0.0.1:{port}")
        (Path(short) / "kvcore.yaml").write_text(changed)
        words = [re.sub(r"^/etc/(kvcore/)?kvcore.yaml$", f"{short}/kvcore.yaml", w) for w in words]
        words = [w.replace(":7601", f":{port}") for w in words]
        assert f"{short}/kvcore.yaml" in words
        http = "--http" in words or "http" in changed
        if http:
            (export,) = lines("examples/compose/README.md", "export KVCORE_HTTP_TOKEN")
            token = shell(f'{export}; printf %s "$KVCORE_HTTP_TOKEN"')
            assert len(token) == 48
            monkeypatch.setenv("KVCORE_SERVER__HTTP__TOKEN", token)

        def ready() -> bool:
            if not http:
                return (Path(short) / "kvcore.sock").is_socket()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                return bool(json.load(answer))

        with Server("kvcore", [sys.executable, "-m", "kvcore", *words], ready=ready, folder=Path(short)):
            assert (Path(short) / "kvcore.sock").is_socket()
            if http:
                (curl,) = lines("examples/compose/README.md", "curl")
                assert json.loads(shell(curl.replace(PLACE, f"http://127.0.0.1:{port}")))


def shell(line: str) -> str:
    """What a line prints."""
    done = subprocess.run(["sh", "-ec", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_composes_server_is_the_daemonsets() -> None:
    """So it need not be started once more: the file differs in sizes alone."""
    assert serve_words()["compose/kvcore.yaml"] == serve_words()["kubernetes/server.yaml"]
    one, other = (yaml.safe_load(configurations()[w]) for w in ("compose/kvcore.yaml", "kubernetes/server.yaml"))
    for values in (one, other):
        values["l1"]["size"] = values["l2"][0]["storage"]["capacity"] = ""
    assert one == other


# -- Compose ---------------------------------------------------------------------------------------------------------


def compose_faults(path: Path) -> str:
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_compose_file_is_one(tmp_path: Path) -> None:
    assert compose_faults(COMPOSE / "compose.yaml") == ""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((COMPOSE / "compose.yaml").read_text().replace("mem_limit:", "memory_limit:"))
    assert "memory_limit" in compose_faults(wrong)


def test_the_dockerfile_copies_and_installs_what_is_there() -> None:
    text = (COMPOSE / "Dockerfile").read_text().replace("\\\n", " ")
    root = EXAMPLES.parent
    copied = re.findall(r"^COPY (?!--from)(\S+) (\S+)$", text, re.M)
    assert copied
    (wheels,) = re.findall(r"pip wheel (.*)", text)
    built = set()
    for source in re.findall(r"/src/(\S+)", wheels):
        assert (root / source / "pyproject.toml").is_file(), source
        assert any(source.startswith(folder) for folder, _ in copied)
        built.add(re.search(r'^name = "(.*)"', (root / source / "pyproject.toml").read_text(), re.M)[1])  # type: ignore[index]
    for line in re.findall(r"pip install (.*?)&&", text):
        wanted = {re.sub(r"\[.*\]", "", w.strip("'")) for w in line.split() if "kvcore" in w}
        assert wanted <= built, "it installs a package that it has not built"
        needed = {"kvcore-disk", "kvcore-zstd"}
        assert needed <= wanted, "a package that the configuration names is not installed"
    targets = set(re.findall(r" AS (\w+)$", text, re.M))
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert service["build"]["target"] in targets
        assert (COMPOSE / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    ignored = (COMPOSE / "Dockerfile.dockerignore").read_text()
    assert all(f"!{folder}" in ignored for folder, _ in copied)


def test_all_run_as_one_user() -> None:
    """The socket is its user's alone."""
    users = set(re.findall(r"useradd --uid (\d+)", (COMPOSE / "Dockerfile").read_text()))
    for path in MANIFESTS:
        for pod in pods(path):
            users.add(str(pod["securityContext"]["runAsUser"]))
    volume = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"]["run"]["driver_opts"]["o"]
    users.add(re.search(r"uid=(\d+)", volume)[1])  # type: ignore[index]
    assert users == {"10001"}
    assert {re.search(r"^User=(.*)$", u.read_text(), re.M)[1] for u in UNITS} == {"kvcore"}  # type: ignore[index]


# -- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_manifests_are_as_kubernetes_wants_them(path: Path) -> None:
    found = documents(path)
    assert found
    for document in found:
        for version in (VERSION, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_finds_a_wrong_field() -> None:
    (daemon,) = (d for d in documents(KUBERNETES / "server.yaml") if d["kind"] == "DaemonSet")
    daemon["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(daemon, VERSION, strict=True)


def test_memory_holds_l1_and_what_is_mounted_exists() -> None:
    for path in MANIFESTS:
        config = {d["metadata"]["name"]: d["data"] for d in documents(path) if d["kind"] == "ConfigMap"}
        for pod in pods(path):
            volumes = {v["name"] for v in pod["volumes"]}
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                assert {m["name"] for m in container["volumeMounts"]} <= volumes, container["name"]
                if container["name"] == "kvcore":
                    (values,) = map(yaml.safe_load, (d["kvcore.yaml"] for d in config.values()))
                    l1 = int(values["l1"]["size"].removesuffix("GiB"))
                    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) >= l1 + 2


# -- systemd ---------------------------------------------------------------------------------------------------------


def unit_faults(text: str, name: str, folder: Path) -> str:
    """What `systemd-analyze verify` says, where the programs of the unit are there."""
    tool = shutil.which("systemd-analyze")
    assert tool, "systemd-analyze is not installed: apt-get install systemd"
    program = folder / "kvcore"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (folder / name).write_text(re.sub(r"/opt/\w+/bin/kvcore", str(program), text))
    done = subprocess.run(
        [tool, "verify", "--man=no", str(folder / name)], capture_output=True, text=True, check=False, timeout=60
    )
    return "" if done.returncode == 0 and not done.stderr.strip() else done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.name)
def test_units_are_as_systemd_wants_them(unit: Path, tmp_path: Path) -> None:
    assert unit_faults(unit.read_text(), unit.name, tmp_path) == ""


def test_the_readmes_files_come_to_their_places(tmp_path: Path) -> None:
    """What examples/systemd/README.md copies and writes; the unit finds its model there."""
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    found = lines("examples/systemd/README.md", "cp ", "printf ")
    assert len(found) == 3
    for line in found:
        shell(line.replace(" /etc/", f" {tmp_path}/etc/"))
    there = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    units = {f"etc/systemd/system/{unit.name}" for unit in UNITS}
    assert there == {"etc/kvcore.yaml", "etc/vllm-8000.env", *units}
    given = dict(x.split("=") for x in (tmp_path / "etc/vllm-8000.env").read_text().splitlines())
    unit = (SYSTEMD / "vllm@.service").read_text()
    assert "EnvironmentFile=/etc/vllm-%i.env" in unit
    assert "${MODEL}" in unit
    assert "KillMode=mixed" in unit.splitlines()  # vLLM's main process alone, as the package's README says
    assert given.keys() == {"MODEL", "CUDA_VISIBLE_DEVICES"}


def test_a_wrong_unit_is_found(tmp_path: Path) -> None:
    text = (SYSTEMD / "kvcore.service").read_text()
    assert "Restrat" in unit_faults(text.replace("Restart=", "Restrat="), "kvcore.service", tmp_path)


def test_the_guides_unit_is_the_examples() -> None:
    """docs/server.md shows the lines that matter."""
    (shown,) = re.findall(r"^```ini\n(.*?)^```$", (EXAMPLES.parent / "docs/server.md").read_text(), re.S | re.M)
    unit = (SYSTEMD / "kvcore.service").read_text().splitlines()
    for line in shown.splitlines():
        assert line in unit, line
