"""A network of one's own for servers and clients that listen on every address, whatever they are told."""

import ctypes
import fcntl
import os
import socket
import struct
from types import TracebackType
from typing import Self

from kvcore.testing.servers.process import ServerError

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_libc = ctypes.CDLL(None, use_errno=True)


class PrivateNetwork:
    """A network namespace with a loopback device and nothing else, of this process (Linux, root).

    A context manager: inside, this thread and the threads and processes it starts are in it, so `127.0.0.1` is
    theirs alone. It may be entered again; it ends with its last user. Raises `ServerError` where it is not allowed.
    """

    def __init__(self) -> None:
        self._outside = _own_network()
        if _libc.unshare(_CLONE_NEWNET):
            error = os.strerror(ctypes.get_errno())
            os.close(self._outside)
            raise ServerError(f"no network namespace can be made ({error}): run as root")
        try:
            self._inside = _own_network()
            _raise_loopback()
        finally:
            _enter(self._outside)

    def __enter__(self) -> Self:
        _enter(self._inside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _enter(self._outside)


def _own_network() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise ServerError(f"the network namespace cannot be changed: {os.strerror(ctypes.get_errno())}")


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.Struct("16sh14x")
        answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, request.pack(b"lo", 0))
        flags = request.unpack(answer)[1]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, request.pack(b"lo", flags | _IFF_UP))
