"""Storages over a server of the tests, and what the tests ask of them."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from kvcore.api import Context, ObjectKey, Stored
from kvcore.testing.driver import Driver
from kvcore.testing.memory import content, source
from kvcore.testing.servers.s3 import ACCESS_KEY, SECRET_KEY
from kvcore_s3.config import S3Config
from kvcore_s3.storage import S3Storage
from moved import kind

BUCKET = "kvtest"


def options(endpoint: str, **changed: Any) -> dict[str, Any]:
    """Options of a storage over this server, as YAML gives them."""
    keys = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
    return {"endpoint": endpoint, "bucket": BUCKET, "region": "us-east-1", **keys, **changed}


def make_s3(endpoint: str, *, passive: bool = False, **changed: Any) -> S3Storage:
    """An unopened storage."""
    return S3Storage(S3Config.model_validate(options(endpoint, **changed)), Context(passive=passive))


def opened(endpoint: str, **changed: Any) -> Driver:
    """A storage in a driver, to be entered."""
    return Driver(make_s3(endpoint, **changed))


@functools.cache
def raw_client(endpoint: str, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> Any:
    """Past the storage: boto3 as it is."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=32),
    )


def prefix_of(tmp_path: Path) -> str:
    """A part of the bucket for one test."""
    return f"kvcore{tmp_path}"


def name_of(key: ObjectKey, prefix: str = "kvcore") -> str:
    """What an object is called in the bucket, worked out apart from the storage."""
    namespace, group, digest = key.name.split("-")
    return f"{prefix}/{namespace}/{group}-{digest}"


def put(driver: Driver, keys: Sequence[ObjectKey], nbytes: int = 10_000) -> list[str]:
    """Store an object for each key, whose content depends on the key: `ok`, or the kind of failure."""
    outcomes = driver.store([source(key, content(key, nbytes), (4096,)) for key in keys])
    return ["ok" if isinstance(outcome, Stored) else kind(outcome) for outcome in outcomes]
