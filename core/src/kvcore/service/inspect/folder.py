"""Where the sockets of open caches are: a folder that is this user's alone."""

import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "KVCORE_RUN_DIR"
MAX_PATH_BYTES = 107
"""Of a Unix socket's path, on Linux."""
DEAD_S = 60.0
"""So long a dead socket stays: who watched the cache asks again, and sees that it was not closed."""


def folders() -> list[Path]:
    """Where a cache may have put its socket, in the order in which they are tried. One alone when `KVCORE_RUN_DIR` is
    set; else that of the login session, and one in /tmp: a service has no session."""
    if given := os.environ.get(VARIABLE):
        return [Path(given)]
    session = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(session) / "kvcore"] if session else []
    return [*found, Path(f"/tmp/kvcore-{os.geteuid()}")]  # noqa: S108 - `check` looks whose it is


def made() -> Path:
    """The first of the folders that can be had, made if it is not there. Raises `OSError` with why the last cannot."""
    faults: list[OSError] = []
    for folder in folders():
        try:
            _absolute(folder)
            folder.mkdir(mode=0o700, exist_ok=True)
            check(folder)
            return folder
        except OSError as error:
            faults.append(error)
    raise faults[-1]


def check(folder: Path, *, asking: bool = False) -> None:
    """Raises `PermissionError` unless the folder is ours and nobody else can reach into it. Root may ask (`asking`)
    the caches of others."""
    _absolute(folder)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is no folder")
    if found.st_uid != os.geteuid() and not (asking and os.geteuid() == 0):
        raise PermissionError(f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to other users: chmod 700 {folder}")


def hidden() -> list[str]:
    """Why caches are not looked for in folders that are there, or that `KVCORE_RUN_DIR` names."""
    told = []
    for folder in folders():
        try:
            check(folder, asking=True)
        except FileNotFoundError:
            if os.environ.get(VARIABLE):
                told.append(f"{VARIABLE} is {folder}, which is not there")
        except OSError as error:
            told.append(str(error))
    return told


def _absolute(folder: Path) -> None:
    if not folder.is_absolute():
        raise PermissionError(f"{VARIABLE} is {folder}, a place that differs by process: give a path from / on")


def alive(path: Path) -> bool:
    """Does anybody listen behind this socket? Also a process that hangs does; the socket of one that has ended refuses.
    A process number would not tell: it may be of another container, or of another program by now."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it has no time for us
            return True
    return True


def bury(path: Path) -> None:
    """Remove a socket behind which nobody listens, `DEAD_S` after it was first found so: that time is its `ctime`, once
    it has no `mtime`."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if found.st_mtime:
            os.utime(path, (0, 0))
        elif time.time() - found.st_ctime >= DEAD_S:
            path.unlink()
