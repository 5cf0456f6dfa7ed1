"""What `kvcore doctor` looks at in the machine and the process."""

import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvcore import __version__
from kvcore.api.engine import Finding
from kvcore.api.units import format_size
from kvcore.l1.arena import available_memory

LOW_MEMORY_BYTES = 1 << 30
SHM = "/dev/shm"  # noqa: S108
LOW_SHM_BYTES = 64 << 20
LOW_L1_BYTES = 64 << 20
"""A few objects: one has 1 MiB and more."""


def python() -> Iterator[Finding]:
    """The interpreter and the system."""
    version = platform.python_version()
    data = {"python": version, "executable": sys.executable, "system": platform.platform(), "cpus": os.cpu_count()}
    if not sys.platform.startswith("linux"):
        yield Finding("warning", "system", f"{platform.system()} is not tested", "run kvcore on Linux", data)
    yield Finding(
        "ok", "python", f"{version}, kvcore {__version__}, {platform.machine()}, {os.cpu_count()} CPUs", data=data
    )


def memory() -> Iterator[Finding]:
    """What may still be taken, the cgroup's limit included."""
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith("MemTotal:")
    )
    available, limit = available_memory(), _cgroup_limit()
    data = {"total_bytes": total, "available_bytes": available, "cgroup_limit_bytes": limit}
    text = f"{format_size(available)} available of {format_size(total)}"
    if limit is not None and limit < total:
        text += f", cgroup limit {format_size(limit)}"
    if available < LOW_MEMORY_BYTES:
        yield Finding("warning", "memory", text, "free memory, or raise the container's limit", data)
    else:
        yield Finding("ok", "memory", text, data=data)


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue  # no such controller, or "max"
    return None


def shared_memory() -> Iterator[Finding]:
    """`/dev/shm`: engines with several workers need it. L1 does not stand in it."""
    try:
        found = os.statvfs(SHM)
    except OSError as e:
        yield Finding("warning", SHM, f"cannot be read: {e.strerror}", "mount it: several workers need it")
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{format_size(free)} free of {format_size(size)}"
    data = {"size_bytes": size, "free_bytes": free}
    if free <= LOW_SHM_BYTES:
        remedy = "start the container with --shm-size=2g: engines with several workers need it (L1 does not)"
        yield Finding("warning", SHM, text, remedy, data)
    else:
        yield Finding("ok", SHM, text, data=data)


def huge_pages() -> Iterator[Finding]:
    """Whether the arena, which asks for huge pages, gets them: copies and direct I/O are faster with them."""
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    try:
        mode = path.read_text(encoding="ascii").split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return  # a kernel without them
    if mode in ("never", "deny"):
        remedy = f"echo advise > {path}, as root: copies and direct I/O of L1 are faster then"
        yield Finding("note", "huge pages", f"off for shared memory ({mode})", remedy, {"shmem_enabled": mode})
    else:
        yield Finding("ok", "huge pages", f"shared memory: {mode}", data={"shmem_enabled": mode})


def locked_memory() -> Iterator[Finding]:
    """RLIMIT_MEMLOCK: what may be pinned by other means than CUDA's own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    data = {"soft_bytes": soft if soft != resource.RLIM_INFINITY else None}
    if soft == resource.RLIM_INFINITY:
        yield Finding("ok", "memlock", "unlimited", data=data)
    else:
        remedy = "only RDMA storages need more: ulimit -l unlimited, or docker run --ulimit memlock=-1"
        yield Finding("note", "memlock", format_size(soft), remedy, data)


def l1_size(size: int | Literal["auto"]) -> Iterator[Finding]:
    """Whether L1 fits into the memory there is."""
    available = available_memory()
    if size == "auto":
        yield Finding("ok", "l1", f"auto: {format_size(available // 4)}, a quarter of the available memory")
    elif size > available:
        text = f"l1.size is {format_size(size)}, but {format_size(available)} are available"
        yield Finding("error", "l1", text, "lower l1.size, or free memory")
    elif size > 0.8 * available:
        text = f"l1.size is {format_size(size)} of {format_size(available)} available"
        yield Finding("warning", "l1", text, "leave memory for the engine: lower l1.size")
    elif size < LOW_L1_BYTES:
        text = f"l1.size is {format_size(size)}: room for a few objects, which push each other out"
        yield Finding("warning", "l1", text, "raise l1.size; a prompt of 8,000 tokens has about 1 GiB on an 8B model")
    else:
        yield Finding("ok", "l1", f"{format_size(size)} of {format_size(available)} available")


def metrics_port(port: int | None) -> Iterator[Finding]:
    """Whether the port of the metrics is free."""
    if not port:
        return  # not served, or any free one
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as e:
            text = f"metrics_port {port} cannot be served: {e.strerror}"
            yield Finding("warning", "metrics", text, "give another port, or end what uses it: ss -ltnp")
        else:
            yield Finding("ok", "metrics", f"port {port} is free")
