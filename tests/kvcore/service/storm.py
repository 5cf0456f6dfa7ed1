"""A server with a disk and a Redis behind it, and all that happens to them: a storm of faults, each of which is over
after a while."""

import json
import os
import random
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from chaos import LEASE_S
from served import until

from kvcore.testing.servers import free_port
from kvcore.testing.servers.kvcore import KVCoreServer
from kvcore.testing.servers.redis import RedisServer

TENANTS = ("", "alice", "bob")
_TOKEN = "correct horse battery"
_MIB = 1 << 20
_DISK_BYTES = 40 * _MIB
_ANSWERS = {200, 201, 404, 409, 422, 502, 503, 504}
"""Of HTTP, while everything else fails. 500 is a bug."""


class Storm:
    """See above. Everything is drawn from `ran`; `begun` counts what has been done."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.ran = random.Random(seed)
        self.begun: Counter[str] = Counter()
        self.odd: list[str] = []
        """Answers of HTTP that there must not be."""
        self.disk = folder / "disk"
        self.redis = RedisServer(folder, options={"maxmemory": 48 * _MIB, "maxmemory-policy": "allkeys-lru"})
        self._http = f"http://127.0.0.1:{free_port()}"
        self._tiers: dict[str, dict[str, Any]] = {
            "disk": {"storage": {"plugin": "disk", "path": str(self.disk / "tier"), "capacity": "32MiB"}},
            "redis": {"storage": {"plugin": "redis", "url": self.redis.url}, "capacity": "24MiB"},
        }
        self._tiers = {name: {"name": name, "timeout": "1s", **tier} for name, tier in self._tiers.items()}
        self._spare = {"name": "spare", "storage": {"plugin": "memory", "capacity": "4MiB"}}
        listen = self._http.partition("//")[2]
        self.server = KVCoreServer(
            folder,
            {
                "server": {
                    "url": f"unix://{folder}/kvcore.sock",
                    "timeout": "300ms",
                    "http": {"listen": listen, "token": _TOKEN},
                },
                "l1": {"size": "8MiB", "lease": f"{LEASE_S}s"},
                "l2": list(self._tiers.values()),
                "tenants": {"alice": {"l1": "2MiB", "disk": "8MiB"}, "default": {"l1": "3MiB", "disk": "16MiB"}},
                "min_object_size": "128KiB",
                "lookup_timeout": "400ms",
                "log_level": "warning",
            },
        )
        self._over: list[tuple[float, Callable[[], object]]] = []
        self._kinds: list[Callable[[], None]] = [
            self._redis_away, self._redis_frozen, self._server_frozen, self._disk_full,
            self._disk_damaged, self._disk_damaged, self._tier_removed, self._tier_added,
            self._cleared, self._quota, self._asked, self._asked,
        ]  # fmt: skip
        self._mounted = False

    def __enter__(self) -> "Storm":
        self.disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(self.disk)]
        done = subprocess.run(command, capture_output=True, check=False)
        self._mounted = done.returncode == 0
        if not self._mounted:
            self._kinds.remove(self._disk_full)
            print(f"NOT TESTED: a disk that fills up, for nothing can be mounted here: {done.stderr.decode().strip()}")
        self.redis.start()
        self.server.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None or not self.server.running:
            print(self.server._process.poll() if self.server._process else None, self.server.log.read_text()[-8000:])
        self.server.stop()
        self.redis.stop()
        if self._mounted:
            subprocess.run(["umount", "-l", str(self.disk)], check=True)

    def strike(self) -> None:
        """One thing happens."""
        self.ran.choice(self._kinds)()

    def pass_by(self, now: float = float("inf")) -> None:
        """What is over by `now` ends, or all of it."""
        for due in [d for d in self._over if d[0] <= now]:
            self._over.remove(due)
            due[1]()

    def calm(self) -> None:
        """All of it ends, every tier is there and used."""
        self.pass_by()
        self.redis.thaw()
        if not self.redis.running:
            self.redis.start()
        for name in self._open():
            if name not in self._tiers or not self._open()[name]:
                self._ask("DELETE", f"/tiers/{name}?drain_s=0")  # its circuit breaker may wait for a minute
        for name in self._tiers.keys() - self._open().keys():
            self._add(name)
        until(lambda: self._open() == dict.fromkeys(self._tiers, True), "both tiers are open", 60)

    def clear(self) -> None:
        """Forget everything, everywhere."""
        while not self._ask("POST", "/clear", {"all": True, "tiers": True})["complete"]:
            pass

    def objects_on_disk(self) -> list[Path]:
        """The files of objects, whole or not: none of the disk's own accounts is as large."""
        return [p for p in (self.disk / "tier").rglob("*") if _size(p) > 4096]

    # -- what happens --------------------------------------------------------------------------------------------------

    def _lasts(self, what: str, least_s: float, most_s: float, end: Callable[[], object]) -> None:
        self.begun[what] += 1
        self._over.append((time.monotonic() + self.ran.uniform(least_s, most_s), end))

    def _redis_away(self) -> None:
        if self.redis.running:
            self.redis.kill()
            self._lasts("Redis killed", 0.1, 3.0, self._redis_back)

    def _redis_back(self) -> None:
        if not self.redis.running:
            self.redis.start()

    def _redis_frozen(self) -> None:
        if self.redis.running:
            self.redis.freeze()
            self._lasts("Redis frozen", 0.1, 3.0, self.redis.thaw)

    def _server_frozen(self) -> None:
        """For longer than a lease, now and then."""
        self.begun["server frozen"] += 1
        with frozen(self.server):
            time.sleep(self.ran.uniform(0.1, 2.5 * LEASE_S))

    def _disk_full(self) -> None:
        ballast = self.disk / f"ballast-{sum(self.begun.values())}"
        with suppress(OSError), ballast.open("wb") as file:  # it may be full already
            while True:
                file.write(bytes(_MIB))
                file.flush()
        self._lasts("disk full", 0.5, 3.0, lambda: ballast.unlink(missing_ok=True))

    def _disk_damaged(self) -> None:
        """An object's file is cut, changed or removed."""
        files = self.objects_on_disk()
        if not files:
            return
        path = self.ran.choice(files)
        with suppress(FileNotFoundError):
            what = self.ran.choice(("removed", "cut", "changed"))
            if what == "removed":
                path.unlink()
            elif what == "cut":
                os.truncate(path, self.ran.randrange(_size(path) or 1))
            else:
                with path.open("r+b") as file:
                    file.seek(self.ran.randrange(_size(path) or 1))
                    file.write(b"\xa5" * 16)
            self.begun[f"file {what}"] += 1

    def _tier_removed(self) -> None:
        name = self.ran.choice(list(self._tiers))
        if name in self._open():
            self._ask("DELETE", f"/tiers/{name}?drain_s={self.ran.choice((0, 0.2, 2))}")
            self._lasts("tier removed", 0.0, 2.0, lambda: self._add(name))

    def _tier_added(self) -> None:
        if "spare" in self._open():
            self._ask("DELETE", "/tiers/spare?drain_s=0")
        else:
            self.begun["tier added"] += 1
            self._ask("POST", "/tiers?before=" + next(iter(self._open()), ""), self._spare)

    def _add(self, name: str) -> None:
        if name not in self._open():
            before = "?before=redis" if name == "disk" and "redis" in self._open() else ""
            self._ask("POST", f"/tiers{before}", self._tiers[name])

    def _cleared(self) -> None:
        self.begun["cleared"] += 1
        tiers = self.ran.choice((False, False, True))
        what = self.ran.choice(({"all": True}, *({"tenant": t} for t in TENANTS)))
        self._ask("POST", "/clear", {**what, "tiers": tiers})

    def _quota(self) -> None:
        self.begun["quota changed"] += 1
        self._ask("PUT", "/tenants/alice", {"quotas": {"l1": self.ran.choice((_MIB, 2 * _MIB, 4 * _MIB))}})

    def _asked(self) -> None:
        """Somebody looks at the server, or begins to."""
        self.begun["looked at"] += 1
        paths = (
            "/healthz /metrics /status /history /requests /hot /prefixes /tenants /tiers /namespaces /objects?limit=7 "
            "/objects?tier=disk&limit=50 /objects?tier=redis"
        )
        self._ask("GET", self.ran.choice(paths.split()))

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _open(self) -> dict[str, bool]:
        """The server's tiers, and whether they are used."""
        return {tier["name"]: tier["state"] == "open" for tier in self._ask("GET", "/tiers")["tiers"]}

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._http + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=90) as response:
                status, text = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        if status not in _ANSWERS:
            self.odd.append(f"{method} {path} {body}: {status} {text.decode()[:300]}")
        return json.loads(text) if text.startswith(b"{") else text


@contextmanager
def frozen(server: KVCoreServer) -> Iterator[None]:
    """It does nothing for a while."""
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
