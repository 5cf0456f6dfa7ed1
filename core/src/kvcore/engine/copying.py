"""Payloads between the arena and a caller's buffers, without the GIL, so that an engine's other threads go on."""

import ctypes
from collections.abc import Sequence

from kvcore.api.buffers import address_of

_move = ctypes.CDLL(None).memcpy  # a call through ctypes frees the GIL
_move.restype = None
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def copy_out(source: memoryview, parts: Sequence[memoryview]) -> bool:
    """Fill `parts` one after the other from `source`. False when they are not as long: then nothing is written."""
    if sum(map(len, parts)) != len(source):
        return False
    at = address_of(source)
    for part in parts:
        if len(part):
            _move(address_of(part), at, len(part))
            at += len(part)
    return True


def copy_in(parts: Sequence[memoryview], into: memoryview) -> bool:
    """Write the concatenation of `parts` to `into`. False when it is not as long: then nothing is written."""
    if sum(map(len, parts)) != len(into):
        return False
    at = address_of(into)
    for part in parts:
        if len(part):
            _move(at, address_of(part), len(part))
            at += len(part)
    return True
