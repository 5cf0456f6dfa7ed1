"""What moves no objects goes through redis-py: topology, enumeration, figures. A connection for each use."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvcore.api import StorageError
from kvcore_redis.address import Endpoint
from kvcore_redis.config import Login, RedisConfig

SCAN_COUNT = 1000


class Control:
    """Makes clients for the servers of one storage."""

    def __init__(self, config: RedisConfig) -> None:
        self._connect_timeout_s = config.connect_timeout
        self._timeout_s = config.timeout
        self._tls: dict[str, Any] = {}
        if config.address.tls:
            self._tls = {
                "ssl": True,
                "ssl_ca_certs": _text(config.tls_ca),
                "ssl_certfile": _text(config.tls_cert),
                "ssl_keyfile": _text(config.tls_key),
                "ssl_cert_reqs": "none" if config.tls_verify == "off" else "required",
                "ssl_check_hostname": config.tls_verify == "full",
            }

    @contextmanager
    def client(
        self, endpoint: Endpoint, login: Login, *, database: int = 0, timeout_s: float | None = None
    ) -> Iterator["redis.Redis"]:
        """A client that neither retries nor waits longer than `timeout_s` (default: the storage's `timeout`) for a
        reply. What it raises becomes `OSError` when the server does not answer, `StorageError` when it refuses."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        place = (
            {"unix_socket_path": endpoint.host} if endpoint.is_unix else {"host": endpoint.host, "port": endpoint.port}
        )
        password = login.password()
        client = redis.Redis(
            **place,
            db=database,
            username=login.username if password is not None else None,
            password=password,
            socket_timeout=limit,
            socket_connect_timeout=min(limit, self._connect_timeout_s),
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **self._tls,
        )
        try:
            yield client
        except (redis.AuthenticationError, redis.exceptions.AuthorizationError) as error:  # kinds of ConnectionError
            raise StorageError(f"{endpoint} refuses us ({error}): {login.remedy}") from error
        except redis.TimeoutError as error:
            raise TimeoutError("no answer in time") from error
        except (redis.ConnectionError, redis.BusyLoadingError) as error:
            raise ConnectionError(str(error)) from error
        except redis.RedisError as error:
            raise StorageError(f"{endpoint}: {error}") from error
        finally:
            client.close()


class Found(NamedTuple):
    """One string: its name, its length in bytes, and for how many seconds nobody used it, where the server knows."""

    name: bytes
    nbytes: int
    idle_s: int | None


def scan(client: "redis.Redis", prefix: str) -> Iterator[Found]:
    """Every string whose name begins with `prefix`, page by page; one may come twice. Raises what redis-py raises."""
    pattern = "".join("\\" + c if c in "*?[]\\^-" else c for c in prefix) + "*"
    do_not_touch(client)
    cursor = 0
    while True:
        cursor, names = cast(tuple[int, list[bytes]], client.scan(cursor, match=pattern, count=SCAN_COUNT))
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.object("IDLETIME", name)  # before the name is touched
            pipeline.strlen(name)
        replies = pipeline.execute(raise_on_error=False)
        for name, idle_s, nbytes in zip(names, replies[::2], replies[1::2], strict=True):
            if isinstance(nbytes, int):  # else it is no string, hence none of ours
                yield Found(name, nbytes, idle_s if isinstance(idle_s, int) else None)
        if cursor == 0:
            return


def do_not_touch(client: "redis.Redis") -> None:
    """What this client reads does not count as used, where the server can do that (Redis 7.2, Valkey)."""
    with suppress(redis.ResponseError):
        ask(client, "CLIENT", "NO-TOUCH", "ON")


def ask(client: "redis.Redis", *words: str) -> Any:
    """The reply to a command, as the server gives it."""
    return client.execute_command(*words)  # type: ignore[no-untyped-call]


def _text(path: Any) -> str | None:
    return None if path is None else str(path.expanduser())
