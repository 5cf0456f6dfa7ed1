"""Where HTTP is served, and to whom. Imports pydantic: keep it out of start-up."""

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, PlainSerializer, SecretStr, WithJsonSchema

from kvcore.api.config import PluginConfig
from kvcore.api.units import brief
from kvcore.config.tree import DEFAULT, Fault, Source

_ALLOWED = "write an IP address and a port, such as 127.0.0.1:7601 or [::1]:7601; port 0 is any free one"


class Listen(NamedTuple):
    """An IP address of this machine, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Only this machine reaches it."""
        return ipaddress.ip_address(self.host).is_loopback


def parse_listen(text: object) -> Listen:
    """Raises `ValueError` that says what is allowed."""
    if isinstance(text, Listen):
        return text
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+|localhost)):([0-9]{1,5})", str(text))
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"{brief(text)} is no address for HTTP: {_ALLOWED}")
    host = "127.0.0.1" if match[2] == "localhost" else match[1] or match[2]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{brief(text)} is no address for HTTP: {_ALLOWED}") from None
    return Listen(host, int(match[3]))


class HttpConfig(PluginConfig):
    """HTTP of `kvcore serve`: health, metrics, what is cached, changes at run time. Needs the extra `kvcore[http]`."""

    listen: Annotated[
        Listen,
        BeforeValidator(parse_listen),
        PlainSerializer(str, return_type=str, when_used="json"),
        WithJsonSchema({"type": "string", "examples": ["127.0.0.1:7601"]}),
    ]
    """Where: an IP address and a port. Beyond this machine (not 127.0.0.1) only with a `token`; it is not encrypted, so
    put a proxy with TLS before it."""

    token: SecretStr | None = Field(default=None, min_length=16)
    """What requests must carry (`Authorization: Bearer TOKEN`) that change something or show objects: without
    one, those are refused. At least 16 characters, best from the environment (`KVCORE_SERVER__HTTP__TOKEN`)."""

    hosts: tuple[str, ...] = ()
    """Names of this machine that requests may use for it, beside `localhost` and IP addresses."""


def _http(value: Any) -> Any:
    return {"listen": value} if isinstance(value, str) else value


Http = Annotated[HttpConfig | None, BeforeValidator(_http)]
"""As a field: a mapping, or only the address."""


def http_faults(http: HttpConfig | None, sources: Mapping[str, Source]) -> list[Fault]:
    """What must not be served as it is. For who serves it: an engine reads the same file, and needs no token."""
    if http is None or http.listen.loopback or http.token is not None:
        return []
    place = sources.get("server.http.listen") or sources.get("server.http", DEFAULT)
    text = f"{http.listen} can be reached from elsewhere: set a `token`, or listen on 127.0.0.1"
    return [Fault(str(place), "server.http", text)]
