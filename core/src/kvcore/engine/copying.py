"""Payloads between the arena and a caller's buffers, without the GIL, so that an engine's other threads go on."""

import ctypes
from collections.abc import Sequence

from kvcore.api.buffers import address_of

_move = ctypes.CDLL(None).memcpy  # a call through ctypes frees the GIL
_move.restype = None
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def copy_out(source: memoryview, parts: Sequence[memoryview]) -> bool:
    """Fill `parts` one after the other from `source`. False when they are not as long: then nothing is written."""
    return _copy(source, parts, out=True)


def copy_in(parts: Sequence[memoryview], into: memoryview) -> bool:
    """Write the concatenation of `parts` to `into`. False when it is not as long: then nothing is written."""
    return _copy(into, parts, out=False)


def _copy(whole: memoryview, parts: Sequence[memoryview], *, out: bool) -> bool:
    if sum(map(len, parts)) != len(whole):
        return False
    at = address_of(whole)
    for part in filter(len, parts):
        ends = (address_of(part), at) if out else (at, address_of(part))
        _move(*ends, len(part))
        at += len(part)
    return True
