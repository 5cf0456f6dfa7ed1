"""The thread that serves: its start, its idleness, its end."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import ConfigError
from kvcore.config import HttpConfig
from kvcore.service.http import Node, serve_http
from kvcore.testing.chunks import hashes, put, spec


def test_it_sleeps_while_nobody_asks(serve: Any) -> None:
    """No wake-up in three seconds, also after requests and with a listing that waits to be gone on with."""
    engine, client = serve("[{storage: memory}]")
    put(engine, engine.register(spec()), hashes())
    for path in ("/healthz", "/status", "/metrics"):
        client.get(path)
    assert client.get("/objects?limit=1").body["next"]
    (thread,) = (t for t in threading.enumerate() if t.name == "kvcore-http")
    time.sleep(0.5)

    def wakeups() -> int:
        text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)

    before = wakeups()
    time.sleep(3)
    assert wakeups() == before


def test_start_and_memory() -> None:
    """Beside the engine: 0.1 s and 8 MiB on an idle machine."""
    script = """
import time
from kvcore.engine import CacheEngine
from kvcore.config import HttpConfig
def rss():
    return next(int(l.split()[1]) >> 10 for l in open("/proc/self/status") if l.startswith("RssAnon"))
engine = CacheEngine.open(flags={"l1.size": "8MiB", "l2": "[]"})
at, before = time.perf_counter(), rss()
from kvcore.service.http import Node, serve_http
from kvcore.testing.chunks import hashes, put, spec
server = serve_http(Node(engine), HttpConfig(listen="127.0.0.1:0"))
print(time.perf_counter() - at, rss() - before, rss())
server.close()
engine.close()
"""
    env = {**os.environ, "KVCORE_CONFIG": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env, check=True
    )
    seconds, more_mib, all_mib = map(float, done.stdout.split())
    print(done.stdout)
    assert seconds < 10
    assert more_mib < 30
    assert all_mib < 80


def test_a_port_that_is_taken(serve: Any) -> None:
    engine, client = serve()
    with pytest.raises(ConfigError, match=f"127.0.0.1 port {client.server.port} cannot be had: .*in use"):
        serve_http(Node(engine), HttpConfig(listen=f"127.0.0.1:{client.server.port}"))


def test_closing_lets_a_request_end_and_frees_the_port(serve: Any) -> None:
    engine, client = serve("[{storage: {plugin: faulty, storage: memory}}]")
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(client.get("/status").status))
    asking.start()
    asking.join()
    client.server.close()
    client.server.close()
    assert answers == [200]
    with pytest.raises(ConnectionRefusedError):
        client.get("/status")
    again = serve_http(Node(engine), HttpConfig(listen=f"127.0.0.1:{client.server.port}"))
    again.close()
    assert not [t for t in threading.enumerate() if t.name == "kvcore-http"]


def test_without_the_packages_the_command_is_said() -> None:
    script = """
import sys
sys.modules["uvicorn"] = None
from kvcore.service import http
try:
    http.serve_http(None, None)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("ConfigError HTTP needs uvicorn: pip install 'kvcore[http]'"), done.stdout


def test_it_is_not_imported_unless_it_is_used() -> None:
    script = "import sys, kvcore.service.http\nprint([m for m in ('starlette', 'uvicorn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
