"""The child of the crash test: stores for ever, until it is killed. Started by `RestartTests`."""

import hashlib
import os
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from kvcore.testing.child import suite_from_arguments
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


def main(arguments: Sequence[str]) -> None:
    """Make the storage of the suite's subclass and store until killed; prints `ready` after the first store."""
    suite = suite_from_arguments(arguments)
    with Driver(suite.make_storage(Path(arguments[-1]))) as driver:
        driver.store([source(make_key(ANCHOR), blob(ANCHOR, 1), (4096,))])
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for version in count(os.getpid() * 1000):
            calls = [driver.submit("store", [source(make_key(n), blob(n, version), (4096,))]) for n in NAMES]
            for call in calls:
                call.result()
            driver.delete([make_key(NAMES[version % len(NAMES)])])
