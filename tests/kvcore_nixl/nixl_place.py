"""Makes NIXL storages for the tests, and objects to move through them."""

from pathlib import Path
from typing import Any

from kvcore.api import Context
from kvcore.testing.driver import Driver
from kvcore_nixl.config import NixlConfig
from kvcore_nixl.storage import NixlStorage


def make_nixl(*, passive: bool = False, **options: Any) -> NixlStorage:
    """An unopened storage, its options as YAML would give them."""
    return NixlStorage(NixlConfig.model_validate(options), Context(passive=passive))


def in_bucket(endpoint: str, prefix: str = "test/", **options: Any) -> Driver:
    """A storage over the tests' bucket, in a driver, to be entered."""
    return Driver(make_nixl(backend="obj", bucket="kvcore-test", endpoint=endpoint, prefix=prefix, **options))


def in_files(root: Path, **options: Any) -> Driver:
    """A storage over a directory, in a driver, to be entered."""
    return Driver(make_nixl(path=str(root), **options))
