"""The file of a trace that is being recorded."""

import os
import zlib
from contextlib import suppress

_GZIP = 16 + zlib.MAX_WBITS


class TraceFile:
    """A new file of lines, packed where its name ends with .gz. What `flush` could not write whole is not in it. One
    without a line is removed at its end, so that the next one may have its name.

    Each of them raises `OSError` with the file's name, and with how many lines there are.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - until it is closed
        self._pack = zlib.compressobj(zlib.Z_BEST_COMPRESSION, wbits=_GZIP) if path.endswith(".gz") else None
        self._new: list[str] = []
        self._lines = 0
        self._bytes = 0

    def write(self, line: str) -> None:
        """Add a line, with its end."""
        self._new.append(line)

    def flush(self) -> None:
        """Write what is new, all or nothing."""
        new, self._new = self._new, []
        if not new:
            return
        data = "".join(new).encode()
        pack = self._pack and self._pack.copy()  # as it is now, it can end the file that is there now
        if pack is not None:
            data = pack.compress(data) + pack.flush(zlib.Z_SYNC_FLUSH)
        self._put(data)
        self._pack = pack
        self._lines += len(new)

    def close(self) -> None:
        """End the file."""
        with self._file:
            if not self._lines:
                with suppress(FileNotFoundError):
                    os.unlink(self._path)
            elif self._pack is not None:
                self._put(self._pack.flush())

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):
                self._file.seek(self._bytes)
                self._file.truncate()
            before = f": the trace ends with the {self._lines:,} requests before" if self._lines else ""
            raise OSError(error.errno, f"{error.strerror}{before}", self._path) from error
        self._bytes += len(data)
