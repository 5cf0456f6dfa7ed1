"""Where the bytes of a batch lie: in registered memory, or in staging memory and copied."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcore.api.buffers import address_of
from kvcore_mooncake.memory import Region


class Piece(NamedTuple):
    """A part of one object in the caller's memory. `direct`: Mooncake may transfer from and to it."""

    address: int
    nbytes: int
    direct: bool


Pieces = tuple[Piece, ...]


def pieces(buffers: Sequence[memoryview], regions: Sequence[Region]) -> Pieces:
    """The parts of an object, without empty ones."""
    found = []
    for view in buffers:
        if len(view):
            start = address_of(view)
            direct = any(region.start <= start and start + len(view) <= region.end for region in regions)
            found.append(Piece(start, len(view), direct))
    return tuple(found)


def cut(parts: Pieces, nbytes: int) -> Pieces:
    """The first `nbytes` of an object's room."""
    found = []
    for part in parts:
        if nbytes <= 0:
            break
        found.append(part if part.nbytes <= nbytes else part._replace(nbytes=nbytes))
        nbytes -= part.nbytes
    return tuple(found)


def staged_bytes(parts: Iterable[Piece]) -> int:
    """Staging memory that an object needs."""
    return sum(part.nbytes for part in parts if not part.direct)


class Layout(NamedTuple):
    """How a batch is given to Mooncake: for each object its pointers, their sizes, and the copies to or from staging
    memory as (caller's address, staging address, bytes)."""

    pointers: list[list[int]]
    sizes: list[list[int]]
    copies: list[list[tuple[int, int, int]]]


def lay_out(batch: Iterable[Pieces], staging: int) -> Layout:
    """Place what is not direct in the staging memory at `staging`, one after the other."""
    layout = Layout([], [], [])
    for parts in batch:
        pointers: list[int] = []
        sizes: list[int] = []
        copies = []
        staged_end = 0
        for part in parts:
            address = part.address
            if not part.direct:
                copies.append((part.address, staging, part.nbytes))
                address, staging = staging, staging + part.nbytes
            if not part.direct and staged_end == address:  # each range is a request of its own
                sizes[-1] += part.nbytes
            else:
                pointers.append(address)
                sizes.append(part.nbytes)
            staged_end = 0 if part.direct else staging
        layout.pointers.append(pointers)
        layout.sizes.append(sizes)
        layout.copies.append(copies)
    return layout


def to_staging(copies: Iterable[tuple[int, int, int]]) -> None:
    """Copy one object's parts into staging memory. `memmove` frees Python's lock."""
    for caller, staging, nbytes in copies:
        ctypes.memmove(staging, caller, nbytes)


def from_staging(copies: Iterable[tuple[int, int, int]]) -> None:
    """Copy one object's parts to their caller."""
    for caller, staging, nbytes in copies:
        ctypes.memmove(caller, staging, nbytes)


def batches(staged: Sequence[int], at_most: int) -> list[range]:
    """Cut a batch so that each part stages at most so many bytes, or is one object."""
    found, start, held = [], 0, 0
    for i, nbytes in enumerate(staged):
        if i > start and held + nbytes > at_most:
            found.append(range(start, i))
            start, held = i, 0
        held += nbytes
    if start < len(staged):
        found.append(range(start, len(staged)))
    return found
