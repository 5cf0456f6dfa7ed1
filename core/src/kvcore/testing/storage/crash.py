"""The child of the crash test: stores for ever, until it is killed. Run as a module by `RestartTests`."""

import hashlib
import importlib
import importlib.util
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

from kvcore.testing.driver import Driver
from kvcore.testing.memory import content, make_key, source

ANCHOR = "anchor"
NAMES = tuple(f"crash-{i}" for i in range(6))
MAX_BYTES = 600_000
_DIGEST_BYTES = 32


def blob(name: str, version: int) -> bytes:
    """An object that can be judged alone: a digest, then bytes that depend on the name and the version."""
    body = content((name, version), 1000 + (version * 77_777 + len(name)) % (MAX_BYTES - 2000))
    return hashlib.sha256(name.encode() + body).digest() + body


def is_whole(name: str, data: bytes) -> bool:
    """Whether `data` is some version of `name`, to its last byte."""
    return hashlib.sha256(name.encode() + data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]


def main(path: str, module_name: str, qualname: str, tmp_path: str, search_path: str) -> None:
    """Make the storage of the suite's subclass and store until killed; prints `ready` after the first store."""
    sys.path[:] = search_path.split("\n")
    suite: Any = _module(path, module_name)
    for part in qualname.split("."):
        suite = getattr(suite, part)
    with Driver(suite().make_storage(Path(tmp_path))) as driver:
        driver.store([source(make_key(ANCHOR), blob(ANCHOR, 1), (4096,))])
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for version in count(os.getpid() * 1000):
            calls = [driver.submit("store", [source(make_key(n), blob(n, version), (4096,))]) for n in NAMES]
            for call in calls:
                call.result()
            driver.delete([make_key(NAMES[version % len(NAMES)])])


def _module(path: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


if __name__ == "__main__":
    main(*sys.argv[1:])
