"""`python -m kvcore.testing.servers`: what it prints can be used as it is, and nothing is left of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcore.api import Stored
from kvcore.testing import context
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source
from kvcore.testing.servers import listens
from kvcore.testing.servers.network import PrivateNetwork


@contextmanager
def running(server: str, folder: Path, end: signal.Signals = signal.SIGINT) -> Iterator[dict[str, Any]]:
    """The options of the storage that it prints."""
    command = [sys.executable, "-m", "kvcore.testing.servers", server]
    env = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            text = ""
            while not text.endswith("# until Ctrl-C\n"):
                line = process.stdout.readline()
                assert line, f"it ended after {text!r}"
                text += line
            yield yaml.safe_load(text)["l2"][0]["storage"]
        finally:
            process.send_signal(end)
            assert process.wait(30) == 0
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("server", ["redis", "s3"])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_storage_uses_it(server: str, end: signal.Signals, tmp_path: Path) -> None:
    with running(server, tmp_path, end) as options:
        place = options.get("url") or options["endpoint"]
        with Driver(context().make_storage(options)) as driver:
            (stored,) = driver.store([source(make_key(1), content(1, 10_000))])
            assert isinstance(stored, Stored), stored
            room = Room(10_000)
            driver.load([room.item(make_key(1))])
            assert bytes(room.view[:10_000]) == content(1, 10_000)
    assert not listens(int(place.rpartition(":")[2]))


def test_a_pool_of_mooncake(tmp_path: Path) -> None:
    with PrivateNetwork(), running("mooncake", tmp_path) as options:
        assert options["plugin"] == "mooncake"
        assert listens(int(options["master_server_address"].rpartition(":")[2]))


def test_a_server_that_is_not_installed_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcore.testing.servers", "redis"]
    env = {**os.environ, "KVCORE_TEST_REDIS_SERVER": "/no/such/server", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "kvcore: redis: /no/such/server cannot be run: No such file or directory\n"
