"""Where a server listens: `unix:///run/kvcore/kvcore.sock`, or `tcp://127.0.0.1:7600`."""

import re
from typing import NamedTuple

from kvcore.api.units import brief

MAX_PATH_BYTES = 107
"""The system's limit for the path of a socket."""
_ALLOWED = "write unix:///run/kvcore/kvcore.sock, or tcp://127.0.0.1:7600"


class Address(NamedTuple):
    """One of both: `path` of a Unix socket, or `port` of 127.0.0.1."""

    path: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else f"tcp://127.0.0.1:{self.port}"


def parse_address(text: object) -> Address:
    """Raises `ValueError` that says what is allowed."""
    if not isinstance(text, str):
        raise ValueError(f"{brief(text)} is no address: {_ALLOWED}")
    scheme, _, rest = text.partition("://")
    if scheme == "unix":
        if not rest.startswith("/") or rest.endswith("/") or "\0" in rest:
            raise ValueError(f"{brief(text)} is no address: the path of a socket is absolute, so {_ALLOWED}")
        if len(rest.encode()) > MAX_PATH_BYTES:
            raise ValueError(f"{brief(text)}: the path of a socket has at most {MAX_PATH_BYTES} bytes, this one more")
        return Address(path=rest)
    match = re.fullmatch(r"127\.0\.0\.1:([0-9]{1,5})", rest) if scheme == "tcp" else None
    if match is None or not 0 < int(match[1]) < 65536:
        where = ": over TCP a server serves this machine alone" if scheme == "tcp" else ""
        raise ValueError(f"{brief(text)} is no address{where}: {_ALLOWED}")
    return Address(port=int(match[1]))
