"""Payloads that lie in several places, through serde chains and frames."""

from collections.abc import Sequence

import pytest
from toys import LAYOUT, NBYTES, Mirror, Zip, key, payload

from kvcore.api import Serde
from kvcore.l2 import HEADER_BYTES, Codec

CHAINS: list[list[Serde]] = [[], [Zip()], [Mirror(), Zip()]]
CUTS = [[NBYTES], [1, NBYTES - 1], [0, 7, NBYTES // 2, 0, NBYTES - NBYTES // 2 - 7]]


def cut(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Copies of consecutive ranges, none of them aligned."""
    parts, at = [], 0
    for size in sizes:
        room = memoryview(bytearray(size + 3))[3:]
        room[:] = data[at : at + size]
        parts.append(room)
        at += size
    return parts


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: "+".join(s.tag for s in c) or "plain")
@pytest.mark.parametrize("reader", CHAINS, ids=lambda c: "+".join(s.tag for s in c) or "plain")
@pytest.mark.parametrize("written", CUTS, ids=len)
@pytest.mark.parametrize("read", CUTS, ids=len)
def test_a_frame_does_not_depend_on_where_its_payload_lay(
    chain: list[Serde], reader: list[Serde], written: list[int], read: list[int]
) -> None:
    header = memoryview(bytearray(HEADER_BYTES))
    given = cut(payload(5), written)
    body = Codec(chain, {}.get).encode(key(1), given, LAYOUT, header)
    assert chain or body is given, "nothing is joined on the plain path"
    stored = b"".join(body)
    codec = Codec(reader, {"zip/1": Zip(), "mirror/1": Mirror()}.get)
    into = cut(memoryview(bytes(NBYTES)), read)
    codec.decode(key(1), header, [memoryview(stored)], HEADER_BYTES + len(stored), into, LAYOUT)
    assert b"".join(into) == payload(5)
    slot = cut(memoryview(stored.ljust(NBYTES, b"\0")), read)  # read in place
    codec.decode(key(1), header, slot, HEADER_BYTES + len(stored), slot, LAYOUT)
    assert b"".join(slot) == payload(5)
