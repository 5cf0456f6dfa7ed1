"""What the numbers were measured on."""

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvcore import __version__
from kvcore.l1.arena import available_memory


def describe(path: Path, peer: str | None) -> dict[str, Any]:
    """The field `machine` of the result."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
        "file_system": _file_system(path),
        "python": sys.version.split()[0],
        "kvcore": __version__,
        **{name: _version(name) for name in ("kvcore-disk", "kvcore-zstd", "torch", "numpy")},
        "fio": _fio(),
        "peer": peer,
    }


def available_bytes() -> int:
    """Bytes of memory that may be taken."""
    return available_memory()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith(("model name", "cpu part")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fio() -> str | None:
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip() or None


def _file_system(path: Path) -> str | None:
    """Type of the file system that holds `path`."""
    best, kind = "", None
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        inside = str(path) == mount or str(path).startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind
