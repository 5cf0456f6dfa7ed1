"""The conformance suite of serdes. Subclass `SerdeConformance` and give `make_serde`."""

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.api import ObjectLayout, Serde, SerdeError
from kvcore.testing.memory import Room, aligned, content

LAYOUTS = {
    "bf16": ObjectLayout(blocks=4, ranks=1, layer_block_bytes=(512, 512), dtype="bfloat16", element_bytes=2),
    "fp32": ObjectLayout(blocks=2, ranks=2, layer_block_bytes=(1024, 256, 64), dtype="float32", element_bytes=4),
    "fp8": ObjectLayout(blocks=3, ranks=1, layer_block_bytes=(333,), dtype="fp8_e4m3", element_bytes=1),
}
SIZES = (0, 1, 2, 3, 7, 511, 512, 4095, 4096, 4097, 100_003, (1 << 20) + 3)
_TAG = re.compile(r"[a-z0-9._/-]{1,32}\Z")


def payloads(nbytes: int) -> dict[str, bytes]:
    """Contents that are easy, hard and typical to encode, each `nbytes` long."""
    bf16 = b"".join(bytes([byte, 0x3C + byte % 5]) for byte in content("bf16", nbytes // 2 + 1))
    return {
        "zeros": bytes(nbytes),
        "random": content("random", nbytes),
        "like bf16": bf16[:nbytes],
        "repeated": (b"kvcore" * (nbytes // 6 + 1))[:nbytes],
    }


class SerdeConformance:
    """All tests of a serde.

    class TestAcmeSerde(SerdeConformance):
        def make_serde(self):
            return AcmeSerde(AcmeConfig(), context())
    """

    written_before: ClassVar[Sequence[tuple[bytes, bytes, ObjectLayout]]] = ()
    """What earlier releases encoded under the same tag: (encoded, decoded, layout). `decode` must read it for ever."""

    def make_serde(self) -> Serde:
        """A serde. Called several times: all must be alike."""
        raise NotImplementedError("override make_serde(self) and return a serde")

    def make_other_serdes(self) -> Sequence[Serde]:
        """Optional: the serde with other options. All decode what any of them encodes, when the tag is the same."""
        return ()

    def check_lossy(self, source: bytes, decoded: bytes, layout: ObjectLayout) -> None:
        """For a lossy serde: raise AssertionError when `decoded` is too far from `source`."""

    # The tests.

    def test_tag_is_valid(self) -> None:
        tag = self.make_serde().tag
        assert isinstance(tag, str) and _TAG.match(tag), f"`tag` must be 1 to 32 of [a-z0-9._/-], not {tag!r}"  # noqa: PT018
        assert self.make_serde().tag == tag, "`tag` differs between two serdes of the same config"
        assert isinstance(self.make_serde().lossy, bool), "`lossy` must be a bool"

    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
    @pytest.mark.parametrize("nbytes", SIZES)
    def test_round_trip_at_odd_sizes(self, nbytes: int, layout: ObjectLayout) -> None:
        """Any length, also one that is no multiple of the element: an earlier stage of the chain may have made it."""
        for name, data in payloads(nbytes).items():
            self.round_trip(self.make_serde(), data, layout, what=f"{nbytes} bytes of {name}")

    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
    def test_round_trip_of_whole_objects(self, layout: ObjectLayout) -> None:
        for name, data in payloads(layout.nbytes).items():
            self.round_trip(self.make_serde(), data, layout, what=f"an object of {name}")

    def test_random_round_trips(self) -> None:
        serde = self.make_serde()

        @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.binary(max_size=3000), st.sampled_from(list(LAYOUTS.values())))
        def run(data: bytes, layout: ObjectLayout) -> None:
            self.round_trip(serde, data, layout, what="random bytes")

        run()

    def test_source_stays_as_it_was(self) -> None:
        """`encode` works from memory that it may not write to, at any address, and leaves it as it was."""
        data, layout = content("source", 20_001), LAYOUTS["bf16"]
        for offset in (0, 1, 3):
            memory = aligned(len(data) + offset)[offset:]
            memory[:] = data
            encoded = bytes(self.make_serde().encode(memory.toreadonly(), layout))
            self.make_serde().encode(memory, layout)
            assert memory == data, "`encode` changed its source"
            self.decode(self.make_serde(), encoded, data, layout, what=f"a source {offset} bytes off a page")

    def test_encoded_size_is_bounded(self) -> None:
        serde = self.make_serde()
        for nbytes in SIZES:
            bound = serde.max_encoded_bytes(nbytes)
            for name, data in payloads(nbytes).items():
                size = len(bytes(serde.encode(memoryview(data), LAYOUTS["bf16"])))
                assert size <= bound, f"{nbytes} bytes of {name} became {size}, `max_encoded_bytes` says {bound}"

    def test_wrong_length_is_an_error(self) -> None:
        """`into` must be filled exactly: one byte more or less is a `SerdeError`, and nothing outside is written."""
        serde, layout = self.make_serde(), LAYOUTS["bf16"]
        for name, data in payloads(5000).items():
            encoded = bytes(serde.encode(memoryview(data), layout))
            for size in (0, 1, 4096, 4999, 5001, 9000):
                self.refuse(serde, encoded, size, layout, what=f"{name} of 5000 bytes into {size}")

    def test_cut_source_is_an_error(self) -> None:
        """A source that is cut short or has bytes too many is a `SerdeError`."""
        serde, layout = self.make_serde(), LAYOUTS["fp32"]
        for name, data in payloads(5000).items():
            encoded = bytes(serde.encode(memoryview(data), layout))
            for size in {0, 1, 4, len(encoded) // 2, len(encoded) - 1} - {len(encoded)}:
                self.refuse(serde, encoded[:size], 5000, layout, what=f"{name} cut to {size} of {len(encoded)} bytes")
            self.refuse(serde, encoded + b"\0", 5000, layout, what=f"{name} with a byte too many")
            self.refuse(serde, encoded + encoded, 5000, layout, what=f"{name} twice")

    def test_garbage_is_harmless(self) -> None:
        """Random bytes and flipped bits give a `SerdeError` or wrong bytes, never another error or a stray write."""
        serde, layout = self.make_serde(), LAYOUTS["bf16"]
        encoded = bytes(serde.encode(memoryview(payloads(3000)["like bf16"]), layout))

        @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.binary(max_size=200), st.lists(st.integers(0, len(encoded) * 8 - 1), min_size=1, max_size=4))
        def run(garbage: bytes, flips: list[int]) -> None:
            flipped = bytearray(encoded)
            for bit in flips:
                flipped[bit // 8] ^= 1 << bit % 8
            for data in (garbage, bytes(flipped), encoded[: flips[0] // 8] + garbage):
                room = Room(3000)
                try:
                    serde.decode(memoryview(data), room.view, layout)
                except SerdeError:
                    pass
                except Exception as error:
                    raise AssertionError(f"`decode` of garbage raised {error!r}, not a SerdeError") from error
                assert room.clean_from(3000), "`decode` of garbage wrote outside `into`"

        run()

    def test_what_is_sealed_is_taken_as_it_is_or_not_at_all(self) -> None:
        """A sealing serde refuses what was changed by a bit, and what was sealed for another object."""
        serde, layout = self.make_serde(), LAYOUTS["bf16"]
        if not serde.sealing:
            pytest.skip("does not apply: the serde does not seal")
        data = payloads(3000)["like bf16"]
        encoded = bytes(serde.bound(b"one object").encode(memoryview(data), layout))
        self.decode(serde.bound(b"one object"), encoded, data, layout, what="a sealed object")
        self.refuse(serde.bound(b"another one"), encoded, 3000, layout, what="an object under another's name")
        self.refuse(serde, encoded, 3000, layout, what="an object under no name")
        for at in {*range(0, len(encoded), 97), len(encoded) - 1}:
            changed = encoded[:at] + bytes([encoded[at] ^ 1]) + encoded[at + 1 :]
            self.refuse(serde.bound(b"one object"), changed, 3000, layout, what=f"a change of byte {at}")

    def test_several_threads(self) -> None:
        """One serde serves several threads at once."""
        serde, layout = self.make_serde(), LAYOUTS["bf16"]

        def work(number: int) -> None:
            for i in range(6):
                data = payloads(30_000 + number)["like bf16"][i:] + content((number, i), 5000)
                self.round_trip(serde, data, layout, what="with eight threads at once")

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(work, number) for number in range(8)]:
                future.result(60)

    def test_other_options_decode_the_same(self) -> None:
        """Options are for encoding: under one tag, every config decodes what any config wrote."""
        others = self.make_other_serdes()
        if not others:
            pytest.skip("does not apply: no `make_other_serdes` was given to the suite")
        data = payloads(20_001)["like bf16"]
        serdes = [self.make_serde(), *others]
        for one in serdes:
            encoded = bytes(one.encode(memoryview(data), LAYOUTS["bf16"]))
            for other in serdes:
                if other.tag == one.tag:
                    self.decode(other, encoded, data, LAYOUTS["bf16"], what="encoded under other options")

    def test_reads_what_was_written_before(self) -> None:
        if not self.written_before:
            pytest.skip("does not apply: no `written_before` was given to the suite")
        for encoded, decoded, layout in self.written_before:
            self.decode(self.make_serde(), encoded, decoded, layout, what="an encoding of an earlier release")

    # Helpers.

    def round_trip(self, serde: Serde, data: bytes, layout: ObjectLayout, *, what: str) -> None:
        """Encode and decode `data`."""
        memory = aligned(len(data))
        memory[:] = data
        encoded = serde.encode(memory.toreadonly(), layout)
        assert isinstance(encoded, bytes | bytearray | memoryview), f"`encode` returned a {type(encoded).__name__}"
        self.decode(serde, bytes(encoded), data, layout, what=what)

    def decode(self, serde: Serde, encoded: bytes, data: bytes, layout: ObjectLayout, *, what: str) -> None:
        """Decode `encoded`, which must give `data` (or something near it, when lossy) and touch nothing else."""
        room = Room(len(data), offset=len(data) % 3)
        try:
            serde.decode(memoryview(encoded), room.view, layout)
        except SerdeError as error:
            raise AssertionError(f"{what}: `decode` refused what `encode` wrote: {error}") from error
        assert room.clean_from(len(data)), f"{what}: `decode` wrote outside `into`"
        decoded = bytes(room.view)
        if serde.lossy:
            self.check_lossy(data, decoded, layout)
        else:
            assert _digest(decoded) == _digest(data), f"{what}: other bytes came back, from a serde that is not lossy"

    def refuse(self, serde: Serde, encoded: bytes, nbytes: int, layout: ObjectLayout, *, what: str) -> None:
        """Decode `encoded` into `nbytes`, which must be a `SerdeError`."""
        room = Room(nbytes)
        try:
            serde.decode(memoryview(encoded), room.view, layout)
        except SerdeError:
            assert room.clean_from(nbytes), f"{what}: `decode` wrote outside `into`"
            return
        except Exception as error:
            raise AssertionError(f"{what}: `decode` raised {error!r}, not a SerdeError") from error
        raise AssertionError(f"{what}: `decode` did not raise a SerdeError")


def _digest(data: bytes) -> str:
    """Compared in place of the bytes, so that a failure does not print a megabyte."""
    return hashlib.sha256(data).hexdigest()
