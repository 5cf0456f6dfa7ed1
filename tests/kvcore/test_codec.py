"""The codec: round trips through chains, changed configurations, and frames that do not say the truth."""

import os
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import LAYOUT, NBYTES, Halve, Mirror, Pairs, Raising, Toy, Zip, key, payload

from kvcore.api import FrameError, Serde, SerdeError
from kvcore.l2 import HEADER_BYTES, Codec, frame
from kvcore.l2.frame import Stage


def none(tag: str) -> None:
    return None


def encode(chain: Sequence[Serde], data: memoryview) -> tuple[memoryview, memoryview]:
    header = memoryview(bytearray(HEADER_BYTES))
    (body,) = Codec(chain, none).encode(key(1), (data,), LAYOUT, header)
    return header, body


def decode(codec: Codec, header: memoryview, body: memoryview, nbytes: int = NBYTES, room: int | None = None) -> bytes:
    into = memoryview(bytearray(nbytes))
    memory = memoryview(bytearray(room or codec.max_encoded_bytes(nbytes)))
    memory[: len(body)] = body
    codec.decode(key(1), header, (memory,), HEADER_BYTES + len(body), (into,), LAYOUT)
    return bytes(into)


CHAINS: list[list[Serde]] = [[], [Zip()], [Mirror(), Zip()], [Zip(), Mirror()], [Mirror(), Mirror(), Zip(9)]]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: "+".join(s.tag for s in c) or "plain")
@pytest.mark.parametrize("reader", CHAINS, ids=lambda c: "+".join(s.tag for s in c) or "plain")
def test_whatever_chain_wrote_it_every_configuration_reads_it(chain: list[Serde], reader: list[Serde]) -> None:
    known = {"zip/1": Zip(), "mirror/1": Mirror()}
    header, body = encode(chain, payload(7))
    assert (len(body) < NBYTES) == bool(chain)
    assert decode(Codec(reader, known.get), header, body) == payload(7)


@given(data=st.binary(min_size=1, max_size=600))
@settings(max_examples=60)
def test_any_bytes(data: bytes) -> None:
    for chain in CHAINS:
        header, body = encode(chain, memoryview(data))
        assert len(body) <= len(data), "a lossless chain never grows what is stored"
        assert decode(Codec(chain, none), header, body, len(data)) == data


def test_in_place() -> None:
    """Read into the slot itself, as a plain tier does, though the frame was written with a chain."""
    codec = Codec([], {"zip/1": Zip(), "mirror/1": Mirror()}.get)
    header, body = encode([Mirror(), Zip()], payload(3))
    slot = memoryview(bytearray(NBYTES))
    slot[: len(body)] = body
    place = (slot,)
    codec.decode(key(1), header, place, HEADER_BYTES + len(body), place, LAYOUT)
    assert slot == payload(3)


def test_in_place_by_a_serde_that_reads_while_it_writes() -> None:
    original = memoryview(bytes(i // 2 % 251 for i in range(NBYTES)))
    header, body = encode([Pairs()], original)
    slot = memoryview(bytearray(NBYTES))
    slot[: len(body)] = body
    place = (slot,)
    Codec([], {"pairs/1": Pairs()}.get).decode(key(1), header, place, HEADER_BYTES + len(body), place, LAYOUT)
    assert slot == original


def test_noise_is_stored_as_it_is() -> None:
    noise = memoryview(os.urandom(NBYTES))
    header, body = encode([Mirror(), Zip()], noise)
    assert body is noise
    assert frame.unpack(key(1), header, HEADER_BYTES + NBYTES).stages == ()


def test_lossy_is_never_replaced_by_the_exact_bytes() -> None:
    header, body = encode([Halve()], payload(3))
    assert frame.unpack(key(1), header, HEADER_BYTES + NBYTES).stages == (Stage("halve/1", NBYTES),)
    assert decode(Codec([Halve()], none), header, body) == bytes(b & 0xF0 for b in payload(3))
    header, body = encode([Halve(), Zip()], payload(3))
    assert decode(Codec([Halve(), Zip()], none), header, body) == bytes(b & 0xF0 for b in payload(3))


def test_an_unknown_serde() -> None:
    header, body = encode([Zip()], payload(3))
    with pytest.raises(FrameError, match="no installed serde reads 'zip/1'") as caught:
        decode(Codec([], none), header, body)
    assert caught.value.reason == "unknown_serde"


@given(at=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_a_flipped_bit_in_the_payload(at: int, mask: int) -> None:
    for chain in ([], [Mirror(), Zip()]):
        header, body = encode(chain, payload(3))
        damaged = bytearray(body)
        damaged[at % len(damaged)] ^= mask
        with pytest.raises(FrameError) as caught:
            decode(Codec(chain, none), header, memoryview(damaged))
        assert caught.value.reason == "checksum"


@pytest.mark.parametrize("nbytes", [NBYTES - 1, NBYTES + 1, 1])
def test_an_object_of_another_size(nbytes: int) -> None:
    for chain in ([], [Zip()]):
        header, body = encode(chain, payload(3))
        with pytest.raises(FrameError) as caught:
            decode(Codec(chain, none), header, body, nbytes, room=2 * NBYTES)
        assert caught.value.reason == "length"


@pytest.mark.parametrize("claim", [0, 1, NBYTES - 1, NBYTES + 1, 1 << 20, 1 << 40])
def test_a_stage_that_claims_another_size(claim: int) -> None:
    """A right checksum over a wrong claim: refused, and no memory is taken for what is claimed."""
    body = memoryview(zlib_of(payload(3)))
    header = memoryview(bytearray(HEADER_BYTES))
    frame.pack(key(1), len(body), [Stage("mirror/1", NBYTES), Stage("zip/1", claim)], frame.checksum(body), header)
    with pytest.raises(FrameError) as caught:
        decode(Codec([Mirror(), Zip()], none), header, body)
    assert caught.value.reason in ("serde", "header")


def zlib_of(data: memoryview) -> bytes:
    return Zip().encode(data, LAYOUT)


def test_a_serde_error_is_a_frame_error_and_a_bug_stays_a_bug() -> None:
    body = memoryview(b"half")
    header = memoryview(bytearray(HEADER_BYTES))
    frame.pack(key(1), 4, [Stage("raising/1", NBYTES)], frame.checksum(body), header)
    with pytest.raises(FrameError, match="raising/1: bad bytes"):
        decode(Codec([Raising("decode", SerdeError("bad bytes"))], none), header, body)
    with pytest.raises(ZeroDivisionError):
        decode(Codec([Raising("decode", ZeroDivisionError())], none), header, body)


def test_max_encoded_bytes_covers_each_stage() -> None:
    class Grows(Toy):
        def max_encoded_bytes(self, nbytes: int) -> int:
            return 2 * nbytes

    class Shrinks(Toy):
        def max_encoded_bytes(self, nbytes: int) -> int:
            return nbytes // 2

    assert Codec([], none).max_encoded_bytes(100) == 100
    assert Codec([Grows(), Shrinks()], none).max_encoded_bytes(100) >= 200
    assert Codec([Shrinks()], none).max_encoded_bytes(100) == 100  # one that gained nothing is kept plain
    assert Codec([], none).plain
    assert not Codec([Grows()], none).plain
