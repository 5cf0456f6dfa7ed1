"""The arena does not depend on `/dev/shm`, which containers often keep small."""

import subprocess
from pathlib import Path

import pytest
from served import CONFIG, connected, contents, hashes, put

from kvcore.testing.servers.kvcore import KVCoreServer

_SMALL = [
    "unshare",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"',
    "-",
]


def test_a_dev_shm_that_is_too_small(folder: Path) -> None:
    tried = subprocess.run([*_SMALL, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"NOT TESTED: no mount namespace can be made here: {tried.stderr.strip()}")
    server = KVCoreServer(folder, {**CONFIG, "l1": {"size": "64MiB"}})
    server._command = [*_SMALL, *server._command]
    with server:
        engine, space = connected(server)
        keys = hashes(100)
        assert put(engine, space, keys) == 100  # 12.5 MiB, two hundred times what /dev/shm has
        assert contents(engine, space, keys) == list(range(1, 101))
        engine.close()
