"""The options of the Mooncake storage, and Mooncake's own JSON file beneath them.

Names are those of Mooncake's JSON configuration. An option set in YAML wins over the file, and the file over the
defaults. The file is `config_path`, or else what the environment variable `MOONCAKE_CONFIG_PATH` names.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from kvcore.api import StorageError
from kvcore.api.config import Duration, PluginConfig, Size

CONFIG_PATH = "MOONCAKE_CONFIG_PATH"
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_FILE_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?")


def host_and_port(address: str) -> tuple[str, int] | None:
    """The two parts of `HOST:PORT` (an IPv6 address in brackets); None for anything else."""
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        return None
    return match["host"].strip("[]"), int(match["port"])


def _check_master(value: str) -> str:
    if value and "://" not in value and host_and_port(value) is None:
        raise ValueError(
            f"{value!r} is not the address of a master: write HOST:PORT, such as 10.0.0.1:50051, or the address of "
            "what elects the master, such as etcd://10.0.0.1:2379"
        )
    return value


def _check_admin(value: str) -> str:
    if value and host_and_port(value) is None:
        raise ValueError(f"{value!r} is not the master's HTTP port: write HOST:PORT, such as 10.0.0.1:9003")
    return value


def _check_protocol(value: str) -> str:
    if not re.fullmatch("[a-z_]+", value.lower()):
        raise ValueError(f"{value!r} is not a protocol of Mooncake: write tcp, rdma, or another that your build has")
    return value.lower()


def _check_prefix(value: str) -> str:
    if len(value) > 200 or not re.fullmatch(r"[A-Za-z0-9._:/@+=-]*", value):
        raise ValueError(f"{value!r} is not a key prefix: up to 200 letters, digits and . _ : / @ + = - are")
    return value


class MooncakeConfig(PluginConfig):
    """Options of `storage: mooncake`."""

    master_server_address: Annotated[str, AfterValidator(_check_master)] = ""
    """The master, `HOST:PORT`. Needed here or in the file."""

    admin_address: Annotated[str, AfterValidator(_check_admin)] = ""
    """The master's HTTP port (its `--metrics_port`, 9003 by default), `HOST:PORT`. With it `kvcore store` can list the
    objects, and the pool's usage is known."""

    config_path: Path | None = None
    """A JSON configuration of Mooncake's for whatever is not set here. Without it, the file that the environment
    variable `MOONCAKE_CONFIG_PATH` names, if that is set."""

    metadata_server: Annotated[str, Field(min_length=1)] = "P2PHANDSHAKE"
    """Where clients find each other: `P2PHANDSHAKE` (no server), `http://HOST:PORT/metadata`, `etcd://HOST:PORT`."""

    protocol: Annotated[str, AfterValidator(_check_protocol)] = "tcp"
    """`tcp`, `rdma`, or another protocol that the installed library was built with."""

    device_name: str = ""
    """The RDMA devices, separated by commas (`mlx5_0,mlx5_1`)."""

    local_hostname: str = ""
    """The name or address, and optionally `:PORT`, under which other machines reach this one. Empty: the address
    from which this machine reaches the master."""

    global_segment_size: Size = 0
    """Memory that this process gives to the pool. 0: none, it only uses the pool. What it gives is lost with it."""

    local_buffer_size: Size = 0
    """Memory for Mooncake's copying calls. kvcore does not use them: more than 0 is wasted."""

    replica_num: Annotated[int, Field(ge=1, le=64)] = 1
    """Copies of each object, in as many segments. With fewer segments Mooncake keeps fewer, without an error."""

    preferred_segment: str = ""
    """The segment (`HOST:PORT`, as the master lists it) to put objects in while it has room. Empty: any."""

    pin: Literal["none", "soft", "hard"] = "none"
    """`soft`: evicted last. `hard`: never evicted; a full pool then refuses stores."""

    key_prefix: Annotated[str, AfterValidator(_check_prefix)] = "kvcore/"
    """In front of every key: sets kvcore's objects apart from others' in the pool."""

    staging_size: Annotated[Size, Field(ge=1 << 20)] = 256 << 20
    """The most registered memory for what does not lie in the arena: frame headers; with a serde, or without L1, whole
    objects. Taken as needed; an object larger than it is refused."""

    rpc_timeout: Annotated[Duration, Field(gt=0)] = 2.0
    """How long the master may take to answer a call."""

    transfer_timeout: Annotated[Duration, Field(ge=1)] = 2.0
    """How long a transfer over TCP may stand still, in whole seconds (rounded up)."""


def resolve(config: MooncakeConfig, environ: Mapping[str, str], warn: Callable[[str], None]) -> MooncakeConfig:
    """`config` with the file's values for what YAML does not set.

    Raises `StorageError` when the file cannot be used, or when no master is named anywhere. `warn` hears of settings
    of the file that have no effect here.
    """
    path, source = config.config_path, "`config_path`"
    if path is None and environ.get(CONFIG_PATH):
        path, source = Path(environ[CONFIG_PATH]), f"the environment variable {CONFIG_PATH}"
    if path is not None:
        found = _read(path.expanduser(), source)
        for name in ("enable_ssd_offload", "tenant_id"):
            if found.get(name) not in (None, False, "", "false", "default"):
                warn(f"{path}: {name} is {found[name]!r}, which kvcore-mooncake does not support: it is ignored")
        wanted = {n: v for n, v in found.items() if n in _OF_FILE and n not in config.model_fields_set}
        values = {n: _OF_FILE[n](v, f"{path}: {n}") for n, v in wanted.items() if v is not None}
        config = config.model_copy(update=values)
    if not config.master_server_address:
        raise StorageError(
            "no master is named: set `master_server_address: HOST:PORT`, or name a Mooncake configuration with "
            f"`config_path` or the environment variable {CONFIG_PATH}"
        )
    return config


def _read(path: Path, source: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise StorageError(f"{path}, named by {source}, cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StorageError(f"{path}, named by {source}, is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise StorageError(f"{path}, named by {source}, is not a JSON object with Mooncake's settings")
    return found


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise StorageError(f"{where} is {value!r}: a string is needed")
    return value


def _checked(check: Callable[[str], str]) -> Callable[[Any, str], str]:
    def parse(value: Any, where: str) -> str:
        try:
            return check(_text(value, where))
        except ValueError as error:
            raise StorageError(f"{where}: {error}") from None

    return parse


def _nbytes(value: Any, where: str) -> int:
    """Mooncake writes sizes as numbers of bytes, or with a binary unit (`3gb` is 3 GiB)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _FILE_SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None:
        raise StorageError(f"{where} is {value!r}: a number of bytes is needed, or a size such as 16gb")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


_OF_FILE: Mapping[str, Callable[[Any, str], Any]] = {
    "master_server_address": _checked(_check_master),
    "metadata_server": _text,
    "protocol": _checked(_check_protocol),
    "device_name": _text,
    "local_hostname": _text,
    "global_segment_size": _nbytes,
    "local_buffer_size": _nbytes,
}
"""What is taken from the file, and how it is read."""
