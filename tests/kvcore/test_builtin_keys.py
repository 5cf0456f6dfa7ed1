"""The built-in key generators keep the contract; `tokens` is pinned by vectors from a second implementation."""

import hashlib
import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import KeySource, LayoutError
from kvcore.builtin.keys_engine import EngineKeys
from kvcore.builtin.keys_tokens import TokenKeys
from kvcore.testing import KeyGeneratorConformance

GOLDEN = Path(__file__).parent / "golden" / "keys_tokens.json"
CASES: dict[str, dict[str, Any]] = {
    "plain": {"chunk_tokens": 16, "tokens": list(range(70))},
    "one token per chunk": {"chunk_tokens": 1, "tokens": [0, 0, 1, 4294967295]},
    "256 tokens per chunk": {"chunk_tokens": 256, "tokens": [i * 7919 % 128_256 for i in range(1024)]},
    "extra": {"chunk_tokens": 16, "tokens": list(range(32)), "extra": b"lora=7;salt=tenant".hex()},
    "chunk extra": {"chunk_tokens": 16, "tokens": list(range(64)), "chunk_extra": {"1": b"image".hex(), "2": ""}},
    "both": {"chunk_tokens": 32, "tokens": [5] * 100, "extra": "00", "chunk_extra": {"0": "00", "2": "ffff"}},
}


def chain(chunk_tokens: int, tokens: Sequence[int], extra: bytes, chunk_extra: Mapping[int, bytes]) -> list[bytes]:
    """The scheme `tokens-sha256/1` as its description reads, by other means than the generator's."""
    message = b"kvcore tokens-sha256/1\0" + struct.pack("<Q", chunk_tokens) + struct.pack("<Q", len(extra)) + extra
    parent, hashes = hashlib.new("sha256", message).digest(), []
    for i in range(len(tokens) // chunk_tokens):
        message = parent + b"".join(struct.pack("<I", t) for t in tokens[i * chunk_tokens : (i + 1) * chunk_tokens])
        if chunk_extra.get(i):
            message += len(chunk_extra[i]).to_bytes(8, "little") + chunk_extra[i]
        parent = hashlib.new("sha256", message).digest()
        hashes.append(parent)
    return hashes


def arguments(case: dict[str, Any]) -> tuple[int, list[int], bytes, dict[int, bytes]]:
    more = {int(i): bytes.fromhex(value) for i, value in case.get("chunk_extra", {}).items()}
    return case["chunk_tokens"], case["tokens"], bytes.fromhex(case.get("extra", "")), more


def vectors() -> dict[str, list[str]]:
    return {name: [h.hex() for h in chain(*arguments(case))] for name, case in CASES.items()}


class TestTokenKeys(KeyGeneratorConformance):
    def make_generator(self) -> TokenKeys:
        return TokenKeys(None, None)

    def test_scheme_is_pinned(self) -> None:
        assert TokenKeys.scheme == "tokens-sha256/1"

    def test_golden_file_is_what_the_second_implementation_gives(self) -> None:
        assert json.loads(GOLDEN.read_text()) == vectors()

    @pytest.mark.parametrize("name", CASES)
    def test_golden_vectors(self, name: str) -> None:
        chunk_tokens, tokens, extra, chunk_extra = arguments(CASES[name])
        expected = json.loads(GOLDEN.read_text())[name]
        for given in (tokens, array("I", tokens)):
            source = KeySource(chunk_tokens, 1, given, (), extra, chunk_extra)
            assert [h.hex() for h in self.make_generator().extend(source)] == expected

    def test_chunk_size_is_part_of_the_chain(self) -> None:
        """Else two chunk sizes would share the hashes where extras make up for tokens."""
        tokens = list(range(64))
        hashes = [self.make_generator().extend(KeySource(n, 1, tokens)) for n in (8, 16, 32)]
        assert len({h for one in hashes for h in one}) == 8 + 4 + 2

    @pytest.mark.parametrize("token", [-1, 2**32, 1.5, "a", None])
    def test_what_is_no_token_id_is_refused(self, token: Any) -> None:
        with pytest.raises(LayoutError, match="token id"):
            self.make_generator().extend(KeySource(4, 4, [1, 2, 3, token]))

    @pytest.mark.parametrize("code", ["i", "q", "Q", "H", "B"])
    def test_other_buffers_are_read_as_numbers(self, code: str) -> None:
        tokens = [1, 2, 200, 4] * 3
        expected = self.make_generator().extend(KeySource(4, 4, tokens))
        assert self.make_generator().extend(KeySource(4, 4, array(code, tokens))) == expected
        assert self.make_generator().extend(KeySource(4, 4, memoryview(array(code, tokens)))) == expected

    def test_strided_buffer_is_read_as_numbers(self) -> None:
        every_other = memoryview(array("I", range(64)))[::2]
        expected = self.make_generator().extend(KeySource(8, 8, list(range(0, 64, 2))))
        assert self.make_generator().extend(KeySource(8, 8, every_other)) == expected


class TestEngineKeys(KeyGeneratorConformance):
    def make_generator(self) -> EngineKeys:
        return EngineKeys(None, None)

    def test_takes_the_last_block_of_each_chunk(self) -> None:
        blocks = [bytes([i]) * 32 for i in range(11)]
        assert EngineKeys(None, None).extend(KeySource(64, 16, (), blocks)) == [blocks[3], blocks[7]]
        assert EngineKeys(None, None).extend(KeySource(64, 16, (), blocks), blocks[3:4]) == [blocks[7]]

    @pytest.mark.parametrize(("bad", "named"), [(b"", "0 bytes"), (bytes(15), "15"), (bytes(65), "65"), (7, "int")])
    def test_odd_hashes_are_refused(self, bad: Any, named: str) -> None:
        with pytest.raises(LayoutError, match=f"{named}.*16 to 64"):
            self.make_generator().extend(KeySource(16, 16, (), [bytes(32), bad]))

    @pytest.mark.parametrize("nbytes", [16, 64])
    def test_shortest_and_longest_are_taken(self, nbytes: int) -> None:
        assert self.make_generator().extend(KeySource(16, 16, (), [bytes(nbytes)])) == [bytes(nbytes)]

    @pytest.mark.parametrize(("chunk", "block"), [(24, 16), (8, 16)])
    def test_chunk_that_is_no_multiple_of_the_block(self, chunk: int, block: int) -> None:
        with pytest.raises(LayoutError, match=f"{chunk}.*{block}"):
            self.make_generator().extend(KeySource(chunk, block, (), [bytes(32)]))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(vectors(), indent=1) + "\n")
