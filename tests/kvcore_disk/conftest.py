"""Small real file systems, made and mounted for one test."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount an empty file system (`tmpfs`, `ramfs` or `ext4`) of a few MiB; its directory."""
    folders: list[Path] = []

    def mount(kind: str, mib: int) -> Path:
        folder = tmp_path / f"mount-{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", kind, "-o", f"size={mib}m", kind, str(folder)]
        if kind == "ext4":
            image = tmp_path / f"image-{len(folders)}"
            with image.open("wb") as file:
                file.truncate(mib << 20)
            run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image)])
            command = ["mount", "-t", "ext4", "-o", "loop", str(image), str(folder)]
        run(command)
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run(command: list[str]) -> None:
    """Run it; the test is skipped where the system does not let it mount anything."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"NOT TESTED: needs a real small file system, and {command[0]} is not installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT TESTED: needs a real small file system, and this system lets us mount none: {error.stderr}")
