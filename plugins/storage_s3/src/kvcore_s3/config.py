"""The options of the S3 storage."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from kvcore.api.config import Duration, PluginConfig, Size

MIB = 1 << 20
MAX_PARTS = 10_000
"""S3's limit of parts per object."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SEGMENT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9!_.*'()=+@,-]+")
_MAX_PREFIX = 512  # a name of S3 has at most 1,024 bytes; ours take up to 171 behind the prefix


def _check_bucket(value: str) -> str:
    if not _BUCKET.fullmatch(value):
        raise ValueError(
            f"{value!r} is not the name of a bucket: 3 to 63 characters of a-z, 0-9, dot and hyphen, "
            "with a letter or digit at both ends; folders go into `prefix`"
        )
    if value.endswith("--x-s3"):
        raise ValueError(f"{value!r} is a directory bucket (S3 Express), which has keys of its own: not supported")
    return value


def _check_prefix(value: str) -> str:
    segments = value.strip("/").split("/") if value.strip("/") else []
    if len(value) > _MAX_PREFIX or not all(_SEGMENT.fullmatch(s) for s in segments):
        raise ValueError(
            f"{value!r} is not a prefix: write up to {_MAX_PREFIX} characters of A-Z, a-z, 0-9 and !_.*'()=+@,- "
            "in segments that are separated by one slash, such as team/kvcore"
        )
    return "/".join(segments)


def _check_endpoint(value: str) -> str:
    try:
        url = urlsplit(value)
        good = url.scheme in ("http", "https") and url.hostname and (url.port or 1) and not url.query
    except ValueError:
        good = False
    if not good or url.username or url.password:
        raise ValueError(
            "not the URL of an endpoint: write http:// or https://, a host and perhaps a port, such as "
            "https://s3.example.com:9000; keys and the bucket have options of their own"
        )
    return value.rstrip("/")


class S3Config(PluginConfig):
    """Options of `storage: s3`."""

    bucket: Annotated[str, AfterValidator(_check_bucket)]
    """The bucket. It must exist, unless `create_bucket` is set."""

    prefix: Annotated[str, AfterValidator(_check_prefix)] = "kvcore"
    """What the name of every object begins with. Caches with different prefixes share nothing."""

    endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = None
    """The URL of a server other than AWS, such as `https://s3.example.com:9000`. Default: what `AWS_ENDPOINT_URL_S3` or
    the AWS configuration says, else AWS."""

    region: str | None = Field(default=None, min_length=1)
    """The bucket's region. Default: what the AWS configuration says, else `us-east-1`."""

    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket's name goes: `path` (`endpoint/bucket`), `virtual` (`bucket.endpoint`). `auto` is `path` with an
    `endpoint` and the SDK's choice without."""

    profile: str | None = Field(default=None, min_length=1)
    """A profile of the AWS configuration files."""

    credentials_file: Path | None = None
    """A credentials file in AWS's format, instead of `~/.aws/credentials`."""

    access_key_id: str | None = Field(default=None, min_length=1)
    """The access key, with `secret_access_key`. Default: the SDK's chain (environment, profile, files, web identity,
    container, instance)."""

    secret_access_key: SecretStr | None = None
    """The secret key. Never shown. Better in the environment or a credentials file than in YAML."""

    session_token: SecretStr | None = None
    """The token that belongs to temporary keys. Never shown."""

    create_bucket: bool = False
    """Make the bucket when it is missing."""

    encryption: Literal["none", "sse-s3", "sse-kms"] = "none"
    """Encryption at rest, asked for with each object. `none` leaves it to the bucket's default."""

    kms_key_id: str | None = Field(default=None, min_length=1)
    """The KMS key for `sse-kms`: id, ARN or alias. Default: the account's own key for S3."""

    sign_payload: Literal["auto", "always", "never"] = "auto"
    """Whether the signature of a request covers the bytes of the object, which costs a SHA-256 of them. `auto`: not
    over TLS, which protects them already."""

    ca_bundle: Path | None = None
    """Certificates to trust for TLS, in PEM format. Default: `AWS_CA_BUNDLE`, else the SDK's own."""

    concurrency: int = Field(default=16, ge=1, le=256)
    """Requests at once."""

    part_size: Size = Field(default=16 * MIB, ge=5 * MIB, le=5 << 30)
    """Larger objects are written and read in parts of this size, several at once."""

    deadline: Duration = Field(default=8.0, gt=0)
    """The time for one call, retries included. Keep it below the tier's `timeout`."""

    connect_timeout: Duration = Field(default=1.0, gt=0)
    """The time for one connection to be made."""

    read_timeout: Duration = Field(default=3.0, gt=0)
    """A server that sends nothing for so long has failed this request. No request begins with less time left."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            given, absent = ("access_key_id", "secret_access_key")[:: 1 if self.access_key_id else -1]
            raise ValueError(f"`{given}` is given without `{absent}`: give both, or none for the SDK's chain")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("`session_token` belongs to `access_key_id` and `secret_access_key`: give all three")
        if self.access_key_id is not None and (self.profile or self.credentials_file):
            raise ValueError("keys are given twice: `access_key_id`, or `profile` and `credentials_file`, not both")
        if self.kms_key_id is not None and self.encryption != "sse-kms":
            raise ValueError("`kms_key_id` has no effect without `encryption: sse-kms`")
        if self.deadline < self.connect_timeout + self.read_timeout:
            least = self.connect_timeout + self.read_timeout
            raise ValueError(
                f"`deadline` of {self.deadline:g}s leaves no time for one request: at least `connect_timeout` and "
                f"`read_timeout`, here {least:g}s"
            )
        return self
