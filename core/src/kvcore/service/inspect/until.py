"""What comes over a socket, up to a time."""

import io
import socket
import time
from typing import Any


class Until(io.RawIOBase):
    """Reads from `connection` until `give_up`, by the monotonic clock, however what comes is cut: a time-out of the
    socket's own begins anew with every byte. Raises `TimeoutError` from then on."""

    def __init__(self, connection: socket.socket, give_up: float) -> None:
        self._connection = connection
        self._give_up = give_up
        self._raw = connection.makefile("rb", buffering=0)  # so long the socket is open, whoever closes it

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """See `io.RawIOBase`."""
        left = self._give_up - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """See `io.RawIOBase`."""
        self._raw.close()
        super().close()
