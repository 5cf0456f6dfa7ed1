"""Where the servers are: `redis://`, `rediss://` and `unix://` addresses."""

from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
_FORMS = "redis://HOST:PORT, rediss://HOST:PORT for TLS, or unix:///PATH"


class Endpoint(NamedTuple):
    """One server: a host and a port, or the path of a Unix socket and port 0."""

    host: str
    port: int

    @property
    def is_unix(self) -> bool:
        """It is a Unix socket."""
        return self.port == 0

    def __str__(self) -> str:
        if self.is_unix:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Address(NamedTuple):
    """A URL, taken apart. What it does not say is None."""

    endpoints: tuple[Endpoint, ...]
    tls: bool
    username: str | None = None
    password: str | None = None
    database: int | None = None


def parse_url(text: str, default_port: int = DEFAULT_PORT) -> Address:
    """The servers that `text` names; several are separated by commas. Raises `ValueError`, without the password."""
    try:
        url = urlsplit(text)
    except ValueError:  # its own text quotes what stands between // and /
        raise ValueError(f"is not a URL: write {_FORMS}") from None
    user, _, place = url.netloc.rpartition("@")
    username, _, password = user.partition(":")
    names = (unquote(username) or None, unquote(password) or None)
    if url.scheme == "unix":
        path = unquote(url.path)
        if place or not path.startswith("/") or path.endswith("/"):
            raise ValueError("names no socket: write unix:///PATH, such as unix:///run/valkey/valkey.sock")
        return Address((Endpoint(path, 0),), False, *names, _query_database(url.query))
    if url.scheme not in ("redis", "rediss"):
        raise ValueError(f"is not the URL of a server: write {_FORMS}")
    if not place:
        raise ValueError(f"names no host: write {_FORMS}")
    endpoints = tuple(_endpoint(one, default_port) for one in place.split(","))
    if url.query or url.fragment:
        raise ValueError("has a query: write what is after `?` or `#` as options of the storage")
    return Address(endpoints, url.scheme == "rediss", *names, _path_database(url.path))


def without_password(text: str) -> str:
    """The URL as it may be shown."""
    url = urlsplit(text)
    user, at, place = url.netloc.rpartition("@")
    username, colon, _ = user.partition(":")
    return urlunsplit(url._replace(netloc=f"{username}{colon and ':***'}{at}{place}"))


def _endpoint(text: str, default_port: int) -> Endpoint:
    host, port = text, ""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ValueError("has an IPv6 address that is not written as [ADDRESS]:PORT")
        port = port[1:]
    elif ":" in text:
        host, _, port = text.partition(":")
    if not host:
        raise ValueError(f"names no host: write {_FORMS}")
    if port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"has a port that is no number from 1 to 65535: write {_FORMS}")
    return Endpoint(host, int(port) if port else default_port)


def _path_database(path: str) -> int | None:
    return _number(path[1:]) if path not in ("", "/") else None


def _query_database(query: str) -> int | None:
    found = parse_qs(query, keep_blank_values=True)
    if not found:
        return None
    if list(found) != ["db"] or len(found["db"]) != 1:
        raise ValueError("has a query other than ?db=NUMBER")
    return _number(found["db"][0])


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("has a database that is no number: write redis://HOST:PORT/0, or the option `database`")
    return int(text)
