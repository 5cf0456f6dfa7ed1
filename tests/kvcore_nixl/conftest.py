"""A small real file system, mounted for one test."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


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
