"""Objects between memory and an open file, by O_DIRECT without a copy where that can be.

O_DIRECT moves whole blocks between the device and the caller's memory. The file offset and the length are kept at
multiples of a page here: the last, partial page goes through a page of our own in the same system call, and the file is
cut to its length afterwards. Whether the *memory* is aligned well enough is for the kernel to say (it depends on the
device): it answers EINVAL, and the object goes through an aligned bounce buffer instead. EINVAL again means that the
file system does not do O_DIRECT after all: the flag is taken off and the object goes through the page cache.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

from kvcore.api.buffers import address_of, drop, take

PAGE = 4096
BOUNCE_BYTES = 4 << 20
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024) if os.sysconf("SC_IOV_MAX") > 0 else 16


def write_object(fd: int, buffers: Sequence[memoryview], *, direct: bool) -> bool:
    """Write the concatenation of `buffers` to `fd` from offset 0, and cut the file there.

    `direct` says that `fd` was opened with O_DIRECT. Returns whether it went so; False: through the page cache.
    Raises `OSError`.
    """
    views = [view for view in buffers if len(view)]
    nbytes = sum(len(view) for view in views)
    if direct:
        for attempt in (_write_pages, _write_bounced):
            try:
                attempt(fd, views, nbytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            else:
                if nbytes % PAGE:
                    os.ftruncate(fd, nbytes)
                return True
        _clear_direct(fd)
        os.ftruncate(fd, 0)
    _write_all(fd, views)
    return False


def read_object(fd: int, buffers: Sequence[memoryview], nbytes: int, *, direct: bool) -> tuple[int, bool]:
    """Read `nbytes` from offset 0 of `fd` into `buffers` from the front; nothing behind them is touched.

    `nbytes` is the length of the file and must fit. Returns how many bytes came (fewer when the file has become
    shorter) and whether they came by O_DIRECT. Raises `OSError`.
    """
    views = take(buffers, nbytes)
    if direct:
        for attempt in (_read_pages, _read_bounced):
            try:
                return attempt(fd, views, nbytes), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        _clear_direct(fd)
    return _read_all(fd, views, nbytes), False


# --- the three ways ---------------------------------------------------------------------------------------------


def _write_pages(fd: int, views: list[memoryview], nbytes: int) -> None:
    """All from the caller's memory, but for the last partial page."""
    tail_bytes = nbytes % PAGE
    if tail_bytes:
        page = _own("page", PAGE)
        at = 0
        for view in drop(views, nbytes - tail_bytes):
            page[at : at + len(view)] = view
            at += len(view)
        page[at:] = bytes(PAGE - at)  # nothing of another object may reach the device behind this one
        views = [*take(views, nbytes - tail_bytes), page]
    _write_all(fd, views)


def _write_bounced(fd: int, views: list[memoryview], nbytes: int) -> None:
    bounce = _own("bounce", BOUNCE_BYTES)
    start = address_of(bounce)
    offset = 0
    for pieces in _chunks(views, BOUNCE_BYTES):
        filled = 0
        for piece in pieces:
            # frees the GIL, which copying by slices does not
            ctypes.memmove(start + filled, address_of(piece), len(piece))
            filled += len(piece)
        padded = -(-filled // PAGE) * PAGE
        bounce[filled:padded] = bytes(padded - filled)
        _write_all(fd, [bounce[:padded]], offset)
        offset += filled


def _write_all(fd: int, views: list[memoryview], offset: int = 0) -> None:
    """All of `views`, however little each call takes (it is at most 2 GiB)."""
    while views:
        done = os.pwritev(fd, views[:_IOV_MAX], offset)
        if done == 0:
            raise OSError(errno.EIO, "the file system wrote nothing")
        offset += done
        views = drop(views, done)


def _read_pages(fd: int, views: list[memoryview], nbytes: int) -> int:
    tail_bytes = nbytes % PAGE
    if not tail_bytes:
        return _read_all(fd, views, nbytes)
    whole = nbytes - tail_bytes
    page = _own("page", PAGE)
    done = _read_all(fd, [*take(views, whole), page], nbytes)
    at = 0
    for view in drop(views, whole):
        count = min(len(view), max(0, done - whole - at))
        view[:count] = page[at : at + count]
        at += count
    return done


def _read_bounced(fd: int, views: list[memoryview], nbytes: int) -> int:
    bounce = _own("bounce", BOUNCE_BYTES)
    start = address_of(bounce)
    total = 0
    for pieces in _chunks(views, BOUNCE_BYTES):
        wanted = sum(len(piece) for piece in pieces)
        done = _read_all(fd, [bounce[: -(-wanted // PAGE) * PAGE]], wanted, total)
        at = 0
        for piece in pieces:
            count = min(len(piece), max(0, done - at))
            ctypes.memmove(address_of(piece), start + at, count)
            at += count
        total += done
        if done < wanted:
            break
    return total


def _read_all(fd: int, views: list[memoryview], nbytes: int, offset: int = 0) -> int:
    """Up to `nbytes` (the last view may be longer: O_DIRECT asks for whole pages); fewer at the end of the file."""
    total = 0
    while total < nbytes:
        done = os.preadv(fd, views[:_IOV_MAX], offset + total)
        if done == 0:
            break
        total += done
        views = drop(views, done)
    return min(total, nbytes)


# --- views ------------------------------------------------------------------------------------------------------


def _chunks(views: list[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """The concatenation in runs of `nbytes`, the last one shorter."""
    while views:
        yield take(views, nbytes)
        views = drop(views, nbytes)


# --- memory -----------------------------------------------------------------------------------------------------

_local = threading.local()


def _own(name: str, nbytes: int) -> memoryview:
    """This thread's own page-aligned buffer of that name."""
    view: memoryview | None = getattr(_local, name, None)
    if view is None:
        view = memoryview(mmap.mmap(-1, nbytes))
        setattr(_local, name, view)
    return view


def _clear_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
