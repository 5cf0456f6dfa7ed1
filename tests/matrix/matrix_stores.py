"""Every storage with its real server, and the one YAML file with which all engines use it."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvcore.testing.servers import ServerError
from kvcore.testing.servers.mooncake import MooncakeHolder, MooncakeMaster, mooncake_binary
from kvcore.testing.servers.network import PrivateNetwork
from kvcore.testing.servers.redis import RedisServer, server_binary
from kvcore.testing.servers.s3 import ACCESS_KEY, SECRET_KEY, JuiceFS

ROOM_BYTES = 256 << 20
MADE = "shelf"
"""The storage that `kvcore new-plugin` makes."""
Started = tuple[dict[str, Any], dict[str, str]]
"""The storage as it stands in YAML, and what serves it: name -> version. Empty versions are known to the drivers."""


def disk(stack: ExitStack, folder: Path) -> Started:
    return {"plugin": "disk", "path": str(folder / "kv")}, {}


def redis(stack: ExitStack, folder: Path) -> Started:
    server = stack.enter_context(RedisServer(folder))
    name, said = _version(str(server_binary()), "--version").partition(" server v=")[::2]
    return {"plugin": "redis", "url": server.url}, {name: said.partition(" ")[0]}


def s3(stack: ExitStack, folder: Path) -> Started:
    endpoint = stack.enter_context(JuiceFS(folder)).endpoint
    keys = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY, "region": "us-east-1"}
    program = str(Path(sys.executable).with_name("juicefs"))
    gateway = _version(program, "--version").removeprefix("juicefs version ").partition("+")[0]
    storage = {"plugin": "s3", "bucket": "kvcore", "create_bucket": True, "endpoint": endpoint, **keys}
    return storage, {"JuiceFS": gateway, "boto3": ""}


def mooncake(stack: ExitStack, folder: Path) -> Started:
    master = stack.enter_context(MooncakeMaster(folder))
    stack.enter_context(MooncakeHolder(folder, master.address, ROOM_BYTES))
    return {"plugin": "mooncake", "master_server_address": master.address}, {"mooncake-transfer-engine-non-cuda": ""}


def nixl(stack: ExitStack, folder: Path) -> Started:
    return {"plugin": "nixl", "backend": "posix", "path": str(folder / "kv")}, {"nixl-cu12": ""}


def made(stack: ExitStack, folder: Path) -> Started:
    """A package made outside the repository, as it comes from `kvcore new-plugin`; its folder goes into the path of all
    engines."""
    site = folder / "site"
    subprocess.run([sys.executable, "-m", "kvcore", "new-plugin", "storage", MADE, "--path", folder], check=True)
    (package,) = (found.parent for found in folder.glob("*/pyproject.toml"))
    install = ["install", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([sys.executable, "-m", "pip", *install, package], check=True)
    return {"plugin": MADE, "path": str(folder / "kv")}, {}


STORAGES: dict[str, Callable[[ExitStack, Path], Started]] = {
    "disk": disk,
    "redis": redis,
    "s3": s3,
    "mooncake": mooncake,
    "nixl": nixl,
    MADE: made,
}


@dataclass
class Stores:
    """The running stores.

    Attributes:
        files: storage -> its YAML file.
        versions: storage -> what serves it.
        missing: storage -> why it cannot run here.
        site: a folder for the path of Python, with the package that was made.
    """

    site: Path
    files: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def digest(self, storage: str) -> str:
        """Of the file that every engine had."""
        return hashlib.sha256(self.files[storage].read_bytes()).hexdigest()


@contextmanager
def stores(folder: Path) -> Iterator[Stores]:
    """Start them all. Mooncake's clients listen on every address, so all of it, engines included, is in a network of
    its own; without the right to make one there is no Mooncake."""
    running = Stores(folder / MADE / "site")
    network: Any = nullcontext()
    try:
        mooncake_binary("mooncake_master")
        network = PrivateNetwork()
    except ServerError as error:
        running.missing["mooncake"] = str(error)
    with network, ExitStack() as stack:
        for name, start in STORAGES.items():
            if name in running.missing:
                continue
            (place := folder / name).mkdir()
            storage, running.versions[name] = start(stack, place)
            running.files[name] = folder / f"{name}.yaml"
            running.files[name].write_text(_configuration(storage))
        yield running


def _configuration(storage: dict[str, Any]) -> str:
    """Patient, because a busy machine is no fault of the store, and `read: always`, because models this small are often
    computed sooner than a store answers."""
    tier = {"name": "store", "read": "always", "timeout": "60s", "storage": storage}
    values = {"l1": {"size": "256MiB"}, "min_object_size": "64KiB", "lookup_timeout": "20s", "l2": [tier]}
    return yaml.safe_dump(values, sort_keys=False)


def _version(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
