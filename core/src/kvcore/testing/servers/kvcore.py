"""`kvcore serve` as a process: one cache that several engines of a test share."""

import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvcore import __version__
from kvcore.config.address import parse_address
from kvcore.service import wire
from kvcore.service.address import connect
from kvcore.testing.servers.process import Server, free_port


class KVCoreServer(Server):
    """A server on a Unix socket, with metrics on a port of its own.

    Args:
        folder: for its configuration, its log and its socket; a short path, because a socket's has at most 107 bytes.
        config: the configuration's other values, such as `{"l1": {"size": "256MiB"}, "l2": []}`.
        name: for messages and file names; another one for each server in a folder.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], name: str = "kvcore") -> None:
        self.socket = folder / f"{name}.sock"
        self.url = f"unix://{self.socket}"
        self.config = folder / f"{name}.yaml"
        self._metrics_port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        values = {"server": self.url, "metrics_port": self._metrics_port, "log_level": "info", **config}
        url = values["server"]["url"] if isinstance(values["server"], dict) else values["server"]
        self._address = parse_address(url)
        self.config.write_text(yaml.safe_dump(values, sort_keys=False))
        command: list[str | Path] = [sys.executable, "-m", "kvcore", "serve", "--config", self.config]
        super().__init__(name, command, ready=self._serves, folder=folder)

    def metrics(self) -> dict[str, float]:
        """All its metrics, labels in the name: `kvcore_l1_bytes{state="free"}`. Raises `OSError` when it is away."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if x and x[0] != "#")}

    def _serves(self) -> bool:
        """It listens before it can serve: whether it answers."""
        with connect(self._address, 1.0) as probe:
            probe.sendall(wire.frame(wire.Hello(wire.PROTOCOL, __version__, "ready?")))
            probe.settimeout(1.0)
            return bool(probe.recv(1))
