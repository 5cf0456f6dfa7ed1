"""For storages that move an object's buffers by themselves: several ranges of memory as one, and where one begins."""

import ctypes
from collections.abc import Sequence
from typing import TypeVar

Part = bytes | memoryview
_Part = TypeVar("_Part", memoryview, Part)


def take(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the concatenation, or all of it when it is shorter."""
    taken = []
    for view in views:
        if nbytes <= 0:
            break
        if len(view):
            taken.append(view if len(view) <= nbytes else view[:nbytes])
            nbytes -= len(view)
    return taken


def drop(views: Sequence[_Part], nbytes: int) -> list[_Part]:
    """The concatenation without its first `nbytes`."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            rest = list(views[i:])
            if nbytes:
                rest[0] = view[nbytes:]
            return rest
        nbytes -= len(view)
    return []


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def address_of(view: memoryview) -> int:
    """Where the memory of `view` begins; `from_buffer` refuses the read-only views that stores are made from.

    Raises `ValueError` for a view that was released.
    """
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return int(address)
