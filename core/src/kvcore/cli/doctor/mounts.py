"""What kind of file system a tier's directory lies on, for `kvcore doctor`."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvcore.api.engine import Finding

MOUNTS = Path("/proc/self/mountinfo")
_MEMORY = ("tmpfs", "ramfs")
_CONTAINER = ("overlay", "aufs", "fuse.fuse-overlayfs")
_NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs")
_OCTAL = re.compile(r"\\([0-7]{3})")


def file_system(path: Path) -> str:
    """The kind that a path, or what exists of it, lies on, such as `ext4`; empty where that cannot be told."""
    here = os.path.realpath(path)
    best, found = "", ""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:  # the last of those mounted at one place is what one sees
        fields, _, rest = line.partition(" - ")
        point = _OCTAL.sub(lambda m: chr(int(m[1], 8)), fields.split(" ")[4])
        under = point in ("/", here) or here.startswith(f"{point}/")
        if under and len(point) >= len(best):
            best, found = point, rest.split(" ")[0]
    return found


def place(subject: str, path: Path) -> Iterator[Finding]:
    """What is to be known of a directory by the kind of its file system."""
    kind = file_system(path)
    data = {"file_system": kind}
    if kind in _MEMORY:
        text = f"{path} lies in memory ({kind}): what it holds is taken from the machine's or the container's memory"
        yield Finding("warning", subject, text, "give a path on a disk, or no tier and a larger l1.size", data)
    elif kind in _NETWORK or (kind.startswith("fuse.") and kind not in _CONTAINER):
        text = f"{path} lies on a network file system ({kind}), which may hang, and whose locks may not hold"
        remedy = "give a path on a local disk; between machines use storage: redis, s3 or mooncake"
        yield Finding("warning", subject, text, remedy, data)
    elif kind in _CONTAINER:
        text = f"{path} lies in the container's own layer ({kind}): it is slow, and gone with the container"
        yield Finding("note", subject, text, "mount a volume there: docker run -v, a hostPath or a claim", data)
