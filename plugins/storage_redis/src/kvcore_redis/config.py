"""The options of the Redis storage."""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PlainSerializer, SecretStr, WithJsonSchema, model_validator

from kvcore.api import StorageError
from kvcore.api.config import Duration, PluginConfig
from kvcore_redis.address import DEFAULT_PORT, SENTINEL_PORT, Address, parse_url, without_password


def _check_url(value: SecretStr) -> SecretStr:
    parse_url(value.get_secret_value())
    return value


Url = Annotated[
    SecretStr,
    AfterValidator(_check_url),
    PlainSerializer(lambda v: without_password(v.get_secret_value()), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["redis://10.0.0.1:6379", "unix:///run/valkey.sock"]}),
]


class RedisConfig(PluginConfig):
    """Options of `storage: redis`."""

    url: Url = SecretStr(f"redis://127.0.0.1:{DEFAULT_PORT}")
    """The server: `redis://HOST:PORT`, `rediss://HOST:PORT` for TLS, `unix:///PATH`; user, password and database may
    stand in it as usual. Several, separated by commas: nodes of a cluster, or Sentinels (default port 26379)."""

    cluster: bool = False
    """The servers are a cluster: each object goes to the node that has its slot."""

    sentinel_master: str | None = Field(default=None, min_length=1)
    """The servers are Sentinels, which are asked for the master of this name."""

    username: str | None = Field(default=None, min_length=1)
    """The ACL user. Default: the server's `default` user."""

    password: SecretStr | None = Field(default=None, min_length=1)
    """The password. Better kept out of the file: `password_env` or `password_file`."""

    password_env: str | None = Field(default=None, min_length=1)
    """The environment variable that holds the password."""

    password_file: Path | None = None
    """The file that holds the password. Read at every new connection, so that the password may be rotated."""

    sentinel_username: str | None = Field(default=None, min_length=1)
    """The ACL user of the Sentinels, when they want one."""

    sentinel_password_env: str | None = Field(default=None, min_length=1)
    """The environment variable that holds the Sentinels' password, when they want one."""

    sentinel_password_file: Path | None = None
    """The file that holds the Sentinels' password."""

    database: int | None = Field(default=None, ge=0)
    """The number of the database. Default: 0."""

    tls_ca: Path | None = None
    """The certificates to trust (PEM). Default: the system's."""

    tls_cert: Path | None = None
    """This client's certificate (PEM), where the server wants one."""

    tls_key: Path | None = None
    """The key of `tls_cert`. Default: it is in the same file."""

    tls_verify: Literal["full", "ca", "off"] = "full"
    """`full` checks the server's certificate and its host name, `ca` the certificate alone, `off` nothing."""

    prefix: str = Field(default="kvcore:", pattern=r"^[^\x00-\x20\x7f]{1,256}$")
    """What the names of all objects begin with. With a `{tag}` in it a cluster keeps all objects on one node."""

    ttl: Duration | None = Field(default=None, ge=0.001)
    """Objects vanish so long after they were stored. Default: they stay until the server evicts them."""

    timeout: Duration = Field(default=5.0, gt=0)
    """The longest that one call may take, connecting included. Keep it below the tier's own `timeout`, so that what has
    arrived by then counts."""

    connect_timeout: Duration = Field(default=2.0, gt=0)
    """The longest that a connection may take to come about."""

    connections: int = Field(default=4, ge=1, le=256)
    """How many calls run at once, each on a connection of its own (per node of a cluster)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        address = self.address
        kinds = [
            name for name, given in (("cluster", self.cluster), ("sentinel_master", self.sentinel_master)) if given
        ]
        if len(kinds) > 1:
            raise ValueError("`cluster` and `sentinel_master` exclude each other: give the one that the servers are")
        if len(address.endpoints) > 1 and not kinds:
            raise ValueError("`url` names several servers: say what they are with `cluster: true` or `sentinel_master`")
        if kinds and address.endpoints[0].is_unix:
            raise ValueError(f"`{kinds[0]}` needs servers with host and port, `url` names a Unix socket")
        _at_most_one("password", address.password, self.password, self.password_env, self.password_file)
        _at_most_one("user name", address.username, self.username)
        _at_most_one("database", address.database, self.database)
        _at_most_one("Sentinels' password", self.sentinel_password_env, self.sentinel_password_file)
        if not self.sentinel_master:
            _only_with(self, "sentinel_master", "sentinel_username", "sentinel_password_env", "sentinel_password_file")
        if not address.tls:
            _only_with(self, "a `url` that begins with rediss://", "tls_ca", "tls_cert", "tls_key", "tls_verify")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("`tls_key` needs `tls_cert`")
        return self

    @property
    def address(self) -> Address:
        """`url`, taken apart."""
        return parse_url(self.url.get_secret_value(), SENTINEL_PORT if self.sentinel_master else DEFAULT_PORT)


class Login:
    """A user name and where its password comes from.

    Args:
        whose: what the names of the options begin with, for errors.
        fixed: the password itself.
        env: the environment variable that holds it.
        file: the file that holds it; read anew at every call.
    """

    def __init__(self, whose: str, username: str | None, fixed: str | None, env: str | None, file: Path | None) -> None:
        self.username = username
        self.remedy = f"give the right `{whose}username`, and `{whose}password_env` or `{whose}password_file`"
        self._option = f"{whose}password"
        self._fixed = fixed
        self._env = env
        self._file = file

    def password(self) -> str | None:
        """The password now; None: there is none. Raises `StorageError`."""
        if self._env is not None:
            found = os.environ.get(self._env, "")
            if not found:
                raise StorageError(f"{self._option}_env: the environment variable {self._env} is not set: set it")
            return found
        if self._file is not None:
            try:
                found = self._file.expanduser().read_text().strip("\r\n")
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not text"
                raise StorageError(f"{self._option}_file: {self._file} cannot be read ({reason})") from None
            if not found:
                raise StorageError(f"{self._option}_file: {self._file} is empty: write the password into it")
            return found
        return self._fixed


def server_login(config: RedisConfig) -> Login:
    """How to log in to the servers that hold the objects."""
    address = config.address
    fixed = config.password.get_secret_value() if config.password is not None else address.password
    return Login("", config.username or address.username, fixed, config.password_env, config.password_file)


def sentinel_login(config: RedisConfig) -> Login:
    """How to log in to the Sentinels."""
    return Login(
        "sentinel_",
        config.sentinel_username,
        None,
        config.sentinel_password_env,
        config.sentinel_password_file,
    )


def _at_most_one(what: str, *given: object) -> None:
    if sum(value is not None for value in given) > 1:
        raise ValueError(f"the {what} is given more than once: keep one")


def _only_with(config: RedisConfig, needed: str, *names: str) -> None:
    for name in names:
        if name in config.model_fields_set:
            raise ValueError(f"`{name}` is of use only with {needed if needed.startswith('a ') else f'`{needed}`'}")
