"""The options of the NIXL storage."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvcore.api.config import PluginConfig

FILE_OPTIONS = ("path", "direct")
OBJECT_OPTIONS = (
    "bucket", "prefix", "endpoint", "region", "profile", "credentials_file", "addressing", "checksum",
    "ca_bundle", "threads",
)  # fmt: skip
_SECRETS = ("access_key", "secret_key", "session_token")


def default_path() -> Path:
    """`kvcore/nixl` below `$XDG_CACHE_HOME`, or below `~/.cache` when that is not set to an absolute path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache")) / "kvcore" / "nixl"


def _check_path(value: Path) -> Path:
    # Path("") is ".", so an empty value would otherwise fill the current directory with objects.
    if str(value) in ("", "."):
        raise ValueError("an empty path; name a directory such as /var/cache/kvcore")
    return value


def _as_text(value: Any) -> Any:
    """NIXL takes text only; YAML gives `true` and `8` as what they are."""
    if not isinstance(value, dict):
        return value
    return {
        k: ("true" if v else "false") if isinstance(v, bool) else str(v) if isinstance(v, int | float) else v
        for k, v in value.items()
    }


def _check_params(value: dict[str, str]) -> dict[str, str]:
    for name in _SECRETS:
        if name in value:
            raise ValueError(
                f"`{name}` does not belong in this file: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or `profile`"
            )
    return value


class NixlConfig(PluginConfig):
    """Options of `storage: nixl`."""

    backend: Literal["posix", "obj", "gds", "gds_mt"] = "posix"
    """NIXL's backend: `posix` for files, `obj` for S3 and compatibles. `gds` and `gds_mt` (files by GPUDirect Storage)
    have NEVER BEEN RUN by kvcore's tests, for want of such a machine: run `kvcore doctor FILE` before you use them."""

    path: Annotated[Path, AfterValidator(_check_path)] | None = None
    """Files: the directory of the objects, made if need be. `~` is the home directory. Processes may share it. Default:
    `~/.cache/kvcore/nixl`, or below `$XDG_CACHE_HOME`."""

    direct: Literal["auto", "on", "off"] = "auto"
    """Files: O_DIRECT. `auto`: where the file system takes it; `on` insists; `off` goes through the page cache."""

    bucket: str | None = Field(default=None, min_length=1)
    """`obj`: the bucket, which must exist. Required."""

    prefix: str = Field(default="kvcore-nixl/", pattern=r"^[A-Za-z0-9!_.*'()/-]{0,256}$")
    """`obj`: what the keys of all objects begin with."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    """`obj`: the server, such as `http://10.0.0.1:9000`. Default: what `AWS_ENDPOINT_URL_S3` or
    the AWS configuration says, else AWS."""

    region: str | None = Field(default=None, min_length=1)
    """`obj`: the region. Default: `AWS_DEFAULT_REGION`, the profile's, or us-east-1."""

    profile: str | None = Field(default=None, min_length=1)
    """`obj`: the profile of the AWS configuration files that has the access key. Default: what the AWS libraries find,
    first `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`."""

    credentials_file: Path | None = None
    """`obj`: a credentials file in AWS's format, instead of `~/.aws/credentials`."""

    addressing: Literal["path", "virtual"] = "path"
    """`obj`: whether the bucket stands in the path or in the host name of a URL."""

    checksum: Literal["required", "supported"] = "required"
    """`obj`: when requests carry a checksum of the newer kinds; `supported` is AWS's own default, which JuiceFS and
    Ceph refuse. Frames have a checksum of their own either way."""

    ca_bundle: Path | None = None
    """`obj`: the certificates to trust (PEM). Default: the system's."""

    threads: int = Field(default=8, ge=1, le=256)
    """`obj`: transfers that NIXL does at once."""

    params: Annotated[dict[str, str], BeforeValidator(_as_text), AfterValidator(_check_params)] = Field(
        default_factory=dict
    )
    """More parameters for NIXL's `create_backend`, such as `{use_uring: true}` for `posix`, `{thread_count: 8}` for
    `gds_mt` or `{crtMinLimit: 16777216}` for `obj`. They win over what the other options give."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        other = FILE_OPTIONS if self.backend == "obj" else OBJECT_OPTIONS
        for name in other:
            if name in self.model_fields_set:
                whose = "the file backends (posix, gds, gds_mt)" if self.backend == "obj" else "`backend: obj`"
                raise ValueError(f"`{name}` is an option of {whose}, this one is `backend: {self.backend}`")
        if self.backend == "obj" and self.bucket is None:
            raise ValueError("`backend: obj` needs `bucket`: the name of a bucket that exists")
        return self
