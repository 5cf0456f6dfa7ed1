"""The raw serde keeps the serde contract and copies nothing on the way in."""

from kvcore.builtin.raw import RawSerde
from kvcore.testing import SerdeConformance
from kvcore.testing.serde import LAYOUTS


class TestRawSerde(SerdeConformance):
    written_before = ((b"as it is", b"as it is", LAYOUTS["bf16"]),)

    def make_serde(self) -> RawSerde:
        return RawSerde(None, None)

    def test_encoding_is_the_source_itself(self) -> None:
        source = memoryview(bytearray(100))
        assert self.make_serde().encode(source, LAYOUTS["bf16"]) is source

    def test_tag_is_pinned(self) -> None:
        assert self.make_serde().tag == "raw/1"
