"""A small real file system, mounted for one test; real gateways with a bucket."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest

from kvcore.testing.servers.s3 import ACCESS_KEY, SECRET_KEY, JuiceFS

BUCKET = "kvcore-test"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount an empty file system of a few MiB (`tmpfs`, or `ramfs`, which does not do O_DIRECT); its directory."""
    folders: list[Path] = []

    def mount(kind: str, mib: int) -> Path:
        folder = tmp_path / f"mount-{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", kind, "-o", f"size={mib}m", kind, str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"NOT TESTED: needs a file system of its own, and this system mounts none: {error.stderr}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def _gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuiceFS]:
    with JuiceFS(tmp_path_factory.mktemp("gateway")) as server:
        make_bucket(server)
        yield server


@pytest.fixture
def gateway(_gateway: JuiceFS, monkeypatch: pytest.MonkeyPatch) -> JuiceFS:
    """A gateway with the bucket `BUCKET`, for all tests that do not stop it; its access key is in the environment."""
    give_keys(monkeypatch)
    return _gateway


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JuiceFS]:
    """A gateway for this test alone, which may stop it."""
    give_keys(monkeypatch)
    with JuiceFS(tmp_path / "gateway") as server:
        make_bucket(server)
        yield server


def give_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


def make_bucket(server: JuiceFS) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
