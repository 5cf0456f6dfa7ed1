"""Mooncake: its master, and holders that give memory to the pool. Both come in the wheel of its client library.

Holders, like all of Mooncake's clients, listen on every address: run them in a `PrivateNetwork`.
"""

import ctypes
import importlib.util
from pathlib import Path
from urllib.request import urlopen

from kvcore.testing.servers.process import Server, ServerError, free_port, listens


class MooncakeMaster(Server):
    """A master. It holds nothing itself, and knows of nothing when it is started anew.

    Args:
        folder: for its log.
        name: for messages and the log's file name.
        lease_ms: for how long a question or a load keeps an object from being evicted or removed.
        client_ttl_s: after so much silence a holder and its objects are forgotten.
    """

    def __init__(
        self, folder: Path, name: str = "mooncake-master", *, lease_ms: int = 2000, client_ttl_s: int = 5
    ) -> None:
        self.port = free_port()
        self._admin_port = free_port()
        command = [
            str(mooncake_binary("mooncake_master")),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._admin_port}",
            "--rpc_thread_num=2",
            "--logtostderr=true",
            f"--default_kv_lease_ttl={lease_ms}",
            f"--client_ttl={client_ttl_s}",
        ]
        super().__init__(name, command, ready=lambda: listens(self.port) and listens(self._admin_port), folder=folder)

    @property
    def address(self) -> str:
        """For clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def admin_address(self) -> str:
        """Its HTTP port."""
        return f"127.0.0.1:{self._admin_port}"

    def segments(self) -> list[str]:
        """The names of the segments that it knows. Raises `OSError` when it does not answer."""
        with urlopen(f"http://{self.admin_address}/get_all_segments", timeout=5) as answer:
            text: str = answer.read().decode()
        return text.split()


class MooncakeHolder(Server):
    """A process that gives memory to a pool. The master must run when it is started.

    Args:
        folder: for its log.
        master: the address of the pool's master.
        nbytes: how much memory it gives.
        name: for messages and the log's file name.
    """

    def __init__(self, folder: Path, master: str, nbytes: int, name: str = "mooncake-holder") -> None:
        port = free_port()
        command = [
            str(mooncake_binary("mooncake_client")),
            "--host=127.0.0.1",
            f"--port={port}",
            f"--global_segment_size={nbytes}",
            "--local_buffer_size=0",
            f"--master_server_address={master}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            "--logtostderr=true",
        ]
        once = {"MC_STORE_CLIENT_SETUP_RETRIES": "1"}
        super().__init__(name, command, ready=lambda: listens(port), folder=folder, env=once)


def mooncake_binary(name: str) -> Path:
    """An executable of the wheel. Raises `ServerError` when it, or the library it needs, is not there."""
    remedy = "pip install mooncake-transfer-engine-non-cuda"
    package = importlib.util.find_spec("mooncake")
    if package is None or package.origin is None:
        raise ServerError(f"{name} is not installed: {remedy}")
    binary = Path(package.origin).parent / name
    if not binary.exists():
        raise ServerError(f"{binary} does not exist: {remedy}, 0.3.13 or newer")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        raise ServerError(
            f"{name} needs the system's libibverbs: apt-get install --no-install-recommends libibverbs1"
        ) from None
    return binary
