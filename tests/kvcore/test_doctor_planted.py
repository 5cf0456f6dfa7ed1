"""Mistakes that people make, planted one by one: `kvcore doctor` finds each and names its remedy.

docs/operations.md lists them in the same words.
"""

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from kvcore.cli import main
from kvcore.cli.child import Outcome
from kvcore.cli.doctor import mounts
from kvcore.cli.doctor import server as server_checks
from kvcore.testing import dist
from kvcore.testing.servers import free_port
from kvcore.testing.servers.kvcore import KVCoreServer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
TOKEN, OTHER = "a token of sixteen or more", "quite another token as long"


class Ground(NamedTuple):
    """Where a mistake is planted: an empty working folder, and the machine around it."""

    folder: Path
    site: Path
    patch: pytest.MonkeyPatch
    keep: Callable[[Any], Any]
    """Keeps something open until the test has ended."""

    def config(self, text: str, name: str = "kvcore.yaml") -> str:
        """Write the file and give its name."""
        small = "" if text.startswith("l1:") else "l1: {size: 64MiB}\n"
        (self.folder / name).write_text(small + text)
        return name


class Mistake(NamedTuple):
    """What `plant` does to the ground and gives to doctor, and what doctor must say."""

    plant: Callable[[Ground], list[str]]
    level: str
    subject: str
    says: str
    remedy: str


MISTAKES: dict[str, Mistake] = {}


def mistake(name: str, level: str, subject: str, says: str, remedy: str) -> Any:
    def register(plant: Callable[[Ground], list[str]]) -> Callable[[Ground], list[str]]:
        MISTAKES[name] = Mistake(plant, level, subject, says, remedy)
        return plant

    return register


# -- the file ----------------------------------------------------------------------------------------------------------


@mistake("no file is named", "warning", "config", "not the kvcore.yaml of this directory", "export KVCORE_CONFIG=")
def no_file(ground: Ground) -> list[str]:
    ground.config("l2: []\n")
    return []


@mistake(
    "a variable takes the place of the file's value", "note", "config",
    r"environment KVCORE_LOOKUP_TIMEOUT has lookup_timeout be 5s, and not 2s, as kvcore.yaml:3", "unset the variable",
)  # fmt: skip
def overridden(ground: Ground) -> list[str]:
    ground.patch.setenv("KVCORE_LOOKUP_TIMEOUT", "5s")
    return [ground.config("l2: []\nlookup_timeout: 2s\n")]


@mistake("a variable is written wrong", "error", "config", "KVCORE_L1_SIZE", "docs/configuration.md")
def misspelt_variable(ground: Ground) -> list[str]:
    ground.patch.setenv("KVCORE_L1_SIZE", "8GiB")
    return [ground.config("l2: []\n")]


@mistake("a size has no unit", "error", "config", r"kvcore.yaml:1:12: l1.size: .*8.* is not a size", "configuration.md")
def no_unit(ground: Ground) -> list[str]:
    return [ground.config("l1: {size: 8}\nl2: []\n")]


@mistake("a plugin's name is wrong, or its package is not installed", "error", "config", "dsik.*disk", "kvcore plugins")
def misspelt_plugin(ground: Ground) -> list[str]:
    return [ground.config("l2: [{storage: dsik}]\n")]


@mistake("a path is relative", "note", "config", "begins at the working directory of each process", "correct the line")
def relative_path(ground: Ground) -> list[str]:
    return [ground.config("l2: [{storage: {plugin: disk, path: cache}}]\n")]


# -- sizes -------------------------------------------------------------------------------------------------------------


@mistake("L1 is larger than the memory there is", "error", "l1", "but .* are available", "lower l1.size")
def too_large(ground: Ground) -> list[str]:
    return [ground.config("l1: {size: 900TiB}\nl2: []\n")]


@mistake("objects are too large for L1", "warning", "l1", "has room for 4 such objects", "raise l1.size")
def large_objects(ground: Ground) -> list[str]:
    return [ground.config("min_object_size: 16MiB\nl2: []\n")]


@mistake(
    "a tier's capacity is more than its file system has", "warning", "tier disk", "900 TiB, but", "lower its capacity"
)
def capacity(ground: Ground) -> list[str]:
    return [ground.config(f"l2: [{{storage: {{plugin: disk, path: {ground.folder}/x, capacity: 900TiB}}}}]\n")]


@mistake(
    "a tier in memory has no capacity", "warning", "tier memory", "grows until memory is full", "give it a capacity"
)
def no_capacity(ground: Ground) -> list[str]:
    return [ground.config("l2: [{storage: memory}]\n")]


@mistake("quotas are more than there is", "warning", "tenants", "80 MiB together, and it has 64 MiB", "raise l1.size")
def quotas(ground: Ground) -> list[str]:
    return [ground.config("tenants: {alice: {l1: 40MiB}, bob: {l1: 40MiB}}\nl2: []\n")]


# -- where a tier lies -------------------------------------------------------------------------------------------------


@mistake("a tier lies in memory", "warning", "tier disk", r"/dev/shm/\S+ lies in memory \(tmpfs\)", "a path on a disk")
def in_memory(ground: Ground) -> list[str]:
    if mounts.file_system(Path("/dev/shm")) != "tmpfs":  # a machine without: as one with it says
        planted(ground, "/dev/shm", "tmpfs")
    path = ground.keep(TemporaryDirectory(dir="/dev/shm"))
    return [ground.config(f"l2: [{{storage: {{plugin: disk, path: {path}}}}}]\n")]


@mistake("a disk tier lies on a network file system", "warning", "tier disk", r"\(nfs4\), which may hang", "local disk")
def network(ground: Ground) -> list[str]:
    planted(ground, str(ground.folder), "nfs4")
    return [ground.config(f"l2: [{{storage: {{plugin: disk, path: {ground.folder}/x}}}}]\n")]


@mistake("a tier lies in the container's own layer", "note", "tier disk", "gone with the container", "mount a volume")
def container(ground: Ground) -> list[str]:
    planted(ground, "/", "overlay")
    return [ground.config(f"l2: [{{storage: {{plugin: disk, path: {ground.folder}/x}}}}]\n")]


@mistake("two tiers have one path", "warning", "tier disk-2", "as tier disk does", "a path of its own")
def one_path(ground: Ground) -> list[str]:
    tier = f"{{storage: {{plugin: disk, path: {ground.folder}/x}}}}"
    return [ground.config(f"l2: [{tier}, {tier}]\n")]


@mistake("a tier's path cannot be made", "error", "tier disk", "cannot be used|read and write", "correct its options")
def in_the_way(ground: Ground) -> list[str]:
    (ground.folder / "file").write_text("")
    return [ground.config(f"l2: [{{storage: {{plugin: disk, path: {ground.folder}/file/x}}}}]\n")]


# -- stores ------------------------------------------------------------------------------------------------------------


@mistake("a store is not there", "error", "tier redis", "refused", "check host, port and firewall")
def away(ground: Ground) -> list[str]:
    return [ground.config(f"l2: [{{storage: {{plugin: redis, url: 'redis://127.0.0.1:{free_port()}'}}}}]\n")]


SLOW = """
import time
from kvcore.api import *
from kvcore.builtin.memory import MemoryStorage
class Slow(MemoryStorage):
    preferred_concurrency = 1
    def load(self, items):
        time.sleep(0.04)
        return super().load(items)
@hookimpl
def kvcore_storage():
    return Component(api=ApiVersion(1, 0), factory=Slow, config=MemoryConfig)
from kvcore.builtin.memory_config import MemoryConfig
"""


@mistake(
    "a tier is too slow for `lookup_timeout`", "warning", "tier slow", r"within lookup_timeout \(0.02 s\)",
    "raise lookup_timeout",
)  # fmt: skip
def slow(ground: Ground) -> list[str]:
    dist(ground.site, "acme-slow", {"kvcore.storage": {"slow": "fake_slow"}}, {"fake_slow": SLOW})
    return [ground.config("l2: [{storage: {plugin: slow, capacity: 1GiB}}]\nlookup_timeout: 20ms\n")]


@mistake("a tier is too slow for its `timeout`", "error", "tier slow2", "it counts as failed", "raise its timeout")
def slower(ground: Ground) -> list[str]:
    dist(ground.site, "acme-slow", {"kvcore.storage": {"slow2": "fake_slow2"}}, {"fake_slow2": SLOW})
    return [ground.config("l2: [{storage: {plugin: slow2, capacity: 1GiB}, timeout: 5ms}]\n")]


# -- servers, ports and engines ----------------------------------------------------------------------------------------


@mistake("there is no folder for the server's socket", "warning", "server unix://", "there is no .*/run", "mkdir -p")
def no_folder(ground: Ground) -> list[str]:
    return [ground.config(f"server: unix://{ground.folder}/run/kvcore.sock\nl2: []\n")]


@mistake("the server is not running", "warning", "server unix://", "nobody answers", "start it: kvcore serve")
def not_running(ground: Ground) -> list[str]:
    return [ground.config(f"server: unix://{ground.folder}/kvcore.sock\nl2: []\n")]


@mistake("the server has another token", "error", "server tcp://", "it refuses us", "the same `server.token`")
def token(ground: Ground) -> list[str]:
    url = f"tcp://127.0.0.1:{free_port()}"
    config = {"l1": {"size": "16MiB"}, "l2": [], "server": {"url": url, "token": TOKEN}}
    ground.keep(KVCoreServer(ground.folder / "served", config))
    return [ground.config(f"server: {{url: '{url}', token: {OTHER}}}\nl2: []\n")]


@mistake("HTTP's port is taken", "error", "http", "cannot be listened on: Address already in use", "a free port")
def http_port(ground: Ground) -> list[str]:
    port = taken(ground)
    return [ground.config(f"server: {{url: 'unix://{ground.folder}/k.sock', http: '127.0.0.1:{port}'}}\nl2: []\n")]


@mistake("the port of the metrics is taken", "warning", "metrics", "Address already in use", "give another port")
def metrics_port(ground: Ground) -> list[str]:
    return [ground.config(f"metrics_port: {taken(ground)}\nl2: []\n")]


@mistake("`VLLM_PLUGINS` keeps vLLM from kvcore", "error", "vllm connector", "VLLM_PLUGINS=other", "add kvcore")
def vllm_plugins(ground: Ground) -> list[str]:
    from kvcore.cli.doctor import command as doctor
    from kvcore_vllm.integration import VllmIntegration

    ground.patch.setenv("VLLM_PLUGINS", "other")
    ground.patch.setattr(doctor, "_engines", lambda registry: iter(VllmIntegration(None, None).check()))
    return [ground.config("l2: []\n")]


def planted(ground: Ground, point: str, kind: str) -> None:
    """Have the machine say that a file system of this kind is mounted there."""
    table = ground.folder / "mountinfo"
    point = point.replace(" ", "\\040")
    table.write_text(
        f"22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n29 22 0:26 / {point} rw,relatime shared:5 - {kind} from rw\n"
    )
    ground.patch.setattr(mounts, "MOUNTS", table)


def taken(ground: Ground) -> int:
    """A port on which somebody listens."""
    listener = ground.keep(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return int(listener.getsockname()[1])


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ground(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    from contextlib import ExitStack

    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    allowed = "kvcore,kvcore-disk,kvcore-redis,acme-slow"
    monkeypatch.setenv("KVCORE_ALLOW_PLUGINS", allowed)
    monkeypatch.setattr("kvcore.cli.doctor.command.call", lambda *words, timeout_s: Outcome(True, "", 0.0, []))
    monkeypatch.setattr("kvcore.cli.doctor.command._torch", lambda: iter(()))
    monkeypatch.setattr("kvcore.cli.doctor.speed.OBJECT_BYTES", 1 << 20)  # what is measured is not the point here
    with ExitStack() as stack:
        yield Ground(folder, site, monkeypatch, stack.enter_context)


def found(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    main(["doctor", "--json", *words])
    findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return findings


@pytest.mark.parametrize("name", list(MISTAKES))
def test_doctor_finds_a_planted_mistake_and_names_its_remedy(
    ground: Ground, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    planted = MISTAKES[name]
    findings = found(capsys, *planted.plant(ground))
    said = [f for f in findings if f["subject"].startswith(planted.subject) and re.search(planted.says, f["text"])]
    assert len(said) == 1, [f"{f['subject']}: {f['text']}" for f in findings if "blocked" not in f["text"]]
    assert said[0]["level"] == planted.level
    assert planted.remedy in said[0]["remedy"]


@pytest.mark.parametrize("storage", ["memory", "disk, path: x"])
def test_doctor_probes_a_small_tier_with_what_fits(
    ground: Ground, capsys: pytest.CaptureFixture[str], storage: str
) -> None:
    file = ground.config(f"l2: [{{storage: {{plugin: {storage}, capacity: 16MiB}}}}]\n")
    said = [f["text"] for f in found(capsys, file) if f["subject"].startswith("tier") and "answers" in f["text"]]
    assert len(said) == 1
    assert "(16 objects of 508 KiB); holds 0 objects, 0 B of 16 MiB" in said[0]


LISTS = """
from kvcore.api import *
from kvcore.builtin.memory import MemoryStorage
from kvcore.builtin.memory_config import MemoryConfig
class Config(PluginConfig):
    junk: bool
class Store(MemoryStorage):
    persistent = True
    def __init__(self, config, context):
        self.junk = config.junk
        super().__init__(MemoryConfig(), context)
    def list(self):
        if self.junk: raise ValueError("junk.zip")
        return super().list()
    def usage(self): return None
@hookimpl
def kvcore_storage(): return Component(api=ApiVersion(1, 0), factory=Store, config=Config)
"""


@pytest.mark.parametrize("junk", [False, True])
def test_doctor_says_what_a_tier_with_kvcores_capacity_holds_or_that_it_cannot(
    ground: Ground, capsys: pytest.CaptureFixture[str], junk: bool
) -> None:
    ground.patch.setenv("KVCORE_ALLOW_PLUGINS", "kvcore,acme-lists")
    dist(ground.site, "acme-lists", {"kvcore.storage": {"lists": "fake_lists"}}, {"fake_lists": LISTS})
    file = ground.config(f"l2: [{{storage: {{plugin: lists, junk: {junk}}}, capacity: 20MiB}}]\n")
    said = [f for f in found(capsys, file) if f["subject"] == "tier lists"]
    assert ["; holds 0 objects, 0 B of 20 MiB" in f["text"] for f in said] == [not junk] + [False] * junk
    problems = [f["text"] for f in said if f["level"] == "warning" and "cannot be told" in f["text"]]
    assert problems == ["what it holds cannot be told: tier lists: list: ValueError: junk.zip"] * junk
    if not junk:
        assert main(["store", "stat", "--config", file, "--json"]) == 0
        (stat,) = json.loads(capsys.readouterr().out)["tiers"]
        assert (stat["bytes"], stat["capacity_bytes"]) == (0, 20 << 20)


def test_doctor_has_nothing_to_say_of_a_sound_configuration(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    planted(ground, "/elsewhere", "nfs")  # an ordinary file system here
    ground.patch.setenv("KVCORE_L1__SIZE", "64MiB")  # the same value as the file's
    file = ground.config(f"l2: [{{storage: {{plugin: disk, path: {ground.folder}/x, capacity: 1GiB}}}}]\n")
    about = [f for f in found(capsys, file) if f["subject"].split()[0] in ("config", "l1", "tier", "server", "http")]
    slow = "faster"  # a machine may be too slow
    assert [f for f in about if f["level"] != "ok" and slow not in f["remedy"]] == []
    assert len(about) >= 3


def test_every_mistake_is_listed_in_the_documentation() -> None:
    section = PAGE.partition("## Mistakes that doctor finds")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([^|]+?) \| ", section, re.M)[1:] == list(MISTAKES)
    assert len(MISTAKES) >= 10


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("ramfs", "warning"),
        ("fuse.sshfs", "warning"),
        ("cifs", "warning"),
        ("ext4", None),
        ("xfs", None),
        ("fuseblk", None),
    ],
)
def test_kinds_of_file_systems(ground: Ground, kind: str, level: str | None) -> None:
    odd = ground.folder / "with space" / "inner"
    odd.mkdir(parents=True)
    planted(ground, str(odd.parent), kind)
    assert mounts.file_system(odd / "not" / "yet") == kind
    assert [f.level for f in mounts.place("t", odd)] == ([level] if level else [])
    assert mounts.file_system(ground.folder) == "ext4"


def test_a_servers_memory_that_cannot_be_reached() -> None:
    """Another PID namespace: its process is not there under that number."""
    (said,) = server_checks._arena("server", {"pid": 1 << 30, "fd": 3})
    assert said.level == "error"
    assert "in its PID namespace" in said.text
    assert "shareProcessNamespace" in said.remedy


def test_a_server_of_another_user(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("it is run by user 1000, this by user 0: run both as one user")

    ground.patch.setattr("kvcore.service.greeting.ask", refuse)
    findings = found(capsys, ground.config(f"server: unix://{ground.folder}/k.sock\nl2: []\n"))
    (said,) = [f for f in findings if f["subject"].startswith("server ")]
    assert (said["level"], said["remedy"]) == ("error", "run the server and its engines as one user")


def test_http_without_its_extra(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    ground.patch.setattr("kvcore.cli.doctor.server.find_spec", lambda name: None)
    text = f"server: {{url: 'unix://{ground.folder}/k.sock', http: '127.0.0.1:0'}}\nl2: []\n"
    (said,) = [f for f in found(capsys, ground.config(text)) if f["subject"] == "http"]
    assert "pip install 'kvcore[http]'" in said["remedy"]
