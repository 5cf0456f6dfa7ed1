"""Shared memory at addresses that huge pages fit, and their making.

Direct I/O and copies are up to a third faster out of 2 MiB pages, but Linux keeps them off for shared memory
(`shmem_enabled` is `never`). MADV_COLLAPSE (Linux 6.1) makes them all the same, where file offset and address agree.
"""

import ctypes
import mmap
import os
import weakref

HUGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14: fault pages in without touching what they hold
_MADV_COLLAPSE = 25
_PROT_NONE = 0
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)  # ctypes frees the GIL, mmap.madvise does not
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, nbytes: int) -> tuple[memoryview, int]:
    """Map the file from its start, writable, at a multiple of 2 MiB; the memory and its address.

    It is unmapped with the last view of it. Raises `OSError`.
    """
    if os.fstat(fd).st_size < nbytes:  # touching what lies behind the end of a file kills the process
        raise OSError("the file is shorter than what is to be mapped")
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _checked(_libc.mmap(None, nbytes + HUGE, _PROT_NONE, private, -1, 0))
    address = -(-reserved // HUGE) * HUGE
    _libc.munmap(reserved, address - reserved)
    end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    _libc.munmap(end, reserved + nbytes + HUGE - end)
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        _checked(_libc.mmap(address, nbytes, writable, mmap.MAP_SHARED | _MAP_FIXED, fd, 0))
    except OSError:
        _libc.munmap(address, nbytes)
        raise
    anchor = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(anchor, _libc.munmap, address, nbytes).atexit = False
    return memoryview(anchor).cast("B"), address


def populate(address: int, nbytes: int) -> bool:
    """Fault memory in, in huge pages where the kernel lets us. False when it has none left, or is too old."""
    _libc.madvise(address, nbytes, _MADV_HUGEPAGE)
    for at in range(address, address + nbytes, HUGE):  # collapsing takes a range that is not all holes
        if _libc.madvise(at, mmap.PAGESIZE, _MADV_POPULATE_WRITE) != 0:
            return False
    _libc.madvise(address, nbytes, _MADV_COLLAPSE)
    return bool(_libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0)


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address
