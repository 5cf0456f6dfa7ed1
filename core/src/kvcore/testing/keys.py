"""The conformance suite of key generators. Subclass `KeyGeneratorConformance` and give `make_generator`."""

import hashlib
import os
import subprocess
import sys
from array import array
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.api import KeyGenerator, KeySource
from kvcore.testing.child import child_command, suite_from_arguments

SHAPES = ((16, 16), (256, 16), (48, 16), (64, 64), (1, 1))
_tokens = st.lists(st.sampled_from([0, 1, 255, 256, 65_536, 2**31, 2**32 - 1]), max_size=20)


def engine_hashes(
    source_tokens: Sequence[int], block_tokens: int, extra: bytes, chunks: Mapping[int, bytes]
) -> list[bytes]:
    """Chained block hashes as an honest engine makes them; `chunks` gives what else a *block* depends on."""
    parent, hashes = hashlib.sha256(b"engine" + extra).digest(), []
    for i in range(len(source_tokens) // block_tokens):
        block = repr((list(source_tokens[i * block_tokens : (i + 1) * block_tokens]), chunks.get(i, b""))).encode()
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(parent)
    return hashes


class KeyGeneratorConformance:
    """All tests of a key generator, of one that hashes tokens as of one that takes the engine's hashes.

    class TestAcmeKeys(KeyGeneratorConformance):
        def make_generator(self):
            return AcmeKeys(AcmeConfig(), context())
    """

    def make_generator(self) -> KeyGenerator:
        """A key generator. Called several times: all must be alike."""
        raise NotImplementedError("override make_generator(self) and return a key generator")

    def make_source(
        self,
        tokens: Sequence[int],
        *,
        chunk_tokens: int = 16,
        block_tokens: int = 16,
        extra: bytes = b"",
        chunk_extra: Mapping[int, bytes] = {},
    ) -> KeySource:
        """A source that has everything: the tokens and an honest engine's block hashes of them."""
        per_chunk = chunk_tokens // block_tokens
        blocks = {chunk * per_chunk: more for chunk, more in chunk_extra.items()}
        hashes = engine_hashes(tokens, block_tokens, extra, blocks)
        return KeySource(chunk_tokens, block_tokens, tokens, hashes, extra, dict(chunk_extra))

    # The tests.

    def test_scheme_is_named(self) -> None:
        scheme = self.make_generator().scheme
        assert isinstance(scheme, str), f"`scheme` must be a str, not {type(scheme).__name__}"
        assert scheme, "`scheme` must not be empty"
        assert scheme.isascii(), f"`scheme` must be ASCII, not {scheme!r}"

    @pytest.mark.parametrize(("chunk_tokens", "block_tokens"), SHAPES)
    def test_one_hash_per_full_chunk(self, chunk_tokens: int, block_tokens: int) -> None:
        generator = self.make_generator()
        for n in (0, 1, chunk_tokens - 1, chunk_tokens, chunk_tokens + 1, 3 * chunk_tokens, 4 * chunk_tokens - 1):
            source = self.make_source(range(n), chunk_tokens=chunk_tokens, block_tokens=block_tokens)
            hashes = generator.extend(source)
            what = f"{n} tokens in chunks of {chunk_tokens}"
            assert isinstance(hashes, list), f"`extend` must return a list, not {type(hashes).__name__}"
            assert len(hashes) == n // chunk_tokens, f"{what} gave {len(hashes)} hashes, not {n // chunk_tokens}"
            assert all(isinstance(h, bytes) for h in hashes), f"hashes must be bytes, not {hashes[:1]!r}"
            assert all(16 <= len(h) <= 64 for h in hashes), f"hashes must be 16 to 64 bytes long, not {hashes[:1]!r}"
            assert len(set(hashes)) == len(hashes), f"{what}: two chunks have the same hash"

    @pytest.mark.parametrize(("chunk_tokens", "block_tokens"), SHAPES)
    def test_known_hashes_change_nothing(self, chunk_tokens: int, block_tokens: int) -> None:
        """A request that grows gets the hashes that it would have got at once."""
        generator = self.make_generator()
        tokens = [i * 7 % 1000 for i in range(5 * chunk_tokens + 3)]
        extras = {1: b"image", 3: b"other"}

        def source(n: int) -> KeySource:
            return self.make_source(
                tokens[:n], chunk_tokens=chunk_tokens, block_tokens=block_tokens, chunk_extra=extras
            )

        whole = generator.extend(source(len(tokens)))
        for known in range(len(whole) + 1):
            rest = generator.extend(source(len(tokens)), whole[:known])
            assert rest == whole[known:], f"with {known} hashes known, the following ones are others"
        known_hashes: list[bytes] = []
        for n in range(0, len(tokens) + 1, max(1, chunk_tokens // 3)):
            known_hashes += generator.extend(source(n), list(known_hashes))
        assert known_hashes + generator.extend(source(len(tokens)), known_hashes) == whole, "a growing request differs"
        shorter = generator.extend(source(chunk_tokens), whole[:3])
        assert shorter == [], "a source shorter than what is known has no further hashes"

    def test_every_token_counts_from_its_chunk_on(self) -> None:
        """Changing one token changes the hash of its chunk and of all later ones, and of no earlier one."""
        generator, tokens = self.make_generator(), [5] * 96
        before = generator.extend(self.make_source(tokens))
        for at in range(96):
            for value in (4, 0, 5 + (1 << 8), 5 + (1 << 16), 5 + (1 << 31)):
                changed = generator.extend(self.make_source([*tokens[:at], value, *tokens[at + 1 :]]))
                same = [a == b for a, b in zip(before, changed, strict=True)]
                assert same == [i < at // 16 for i in range(6)], (
                    f"token {at} of 96 became {value} (from 5): chunks of 16 that kept their hash: {same}"
                )

    def test_order_counts(self) -> None:
        generator = self.make_generator()
        a, b = list(range(16)), list(range(16, 32))
        hashes = [generator.extend(self.make_source(tokens)) for tokens in (a + b, b + a, a[::-1] + b, b, b + b)]
        flat = [h for one in hashes for h in one]
        assert hashes[1][0] == hashes[3][0] == hashes[4][0], "the first chunk's hash depends on what follows it"
        assert len(set(flat)) == len(flat) - 2, "chunks in another order have the same hash"

    def test_extra_counts_from_the_start(self) -> None:
        generator, tokens = self.make_generator(), list(range(64))
        seen: dict[bytes, bytes] = {}
        for extra in (b"", b"\0", b"\0\0", b"lora-1", b"lora-2", bytes(16), bytes(64)):
            for chunk_hash in generator.extend(self.make_source(tokens, extra=extra)):
                assert chunk_hash not in seen, f"extra {extra!r} and {seen[chunk_hash]!r} give the same hash"
                seen[chunk_hash] = extra

    def test_chunk_extra_counts_from_its_chunk_on(self) -> None:
        generator, tokens = self.make_generator(), list(range(96))
        plain = generator.extend(self.make_source(tokens))
        for chunk in range(6):
            one, two = (
                generator.extend(self.make_source(tokens, chunk_extra={chunk: more})) for more in (b"image", b"imagf")
            )
            for what, other in (("no extra", plain), ("another extra", two)):
                same = [a == b for a, b in zip(one, other, strict=True)]
                assert same == [i < chunk for i in range(6)], f"extra of chunk {chunk} against {what}: same hash {same}"
        moved = generator.extend(self.make_source(tokens, chunk_extra={2: b"a", 3: b"b"}))
        merged = generator.extend(self.make_source(tokens, chunk_extra={2: b"ab"}))
        assert moved[3] != merged[3], "extras of neighbouring chunks can be shifted between them"

    def test_kind_of_sequence_does_not_count(self) -> None:
        """A list, a tuple and buffers of uint32 with the same tokens have the same hashes."""
        generator, tokens = self.make_generator(), [0, 1, 65_536, 2**31, 2**32 - 1, *range(100)]
        expected = generator.extend(self.make_source(tokens))
        code = "I" if array("I").itemsize == 4 else "L"
        packed = array(code, tokens)
        for name, value in {
            "tuple": tuple(tokens),
            "array": packed,
            "memoryview": memoryview(packed),
            "read-only memoryview": memoryview(packed.tobytes()).cast(code),  # type: ignore[call-overload]
            "slice of a memoryview": memoryview(array(code, [9, *tokens]))[1:],
        }.items():
            source = self.make_source(value)
            assert generator.extend(source) == expected, f"a {name} of tokens has other hashes than a list"
            assert generator.extend(source, expected[:2]) == expected[2:], f"a {name} that grows has other hashes"

    def test_equal_prefix_and_nothing_else(self) -> None:
        """Two requests share exactly the hashes of the full chunks that they share from the start."""
        generator = self.make_generator()

        @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(_tokens, _tokens, _tokens)
        def run(prefix: list[int], a: list[int], b: list[int]) -> None:
            one, two = prefix + a, prefix + b
            hashes = [generator.extend(self.make_source(t, chunk_tokens=2, block_tokens=1)) for t in (one, two)]
            shared = 0
            while shared < min(map(len, hashes)) and one[: 2 * shared + 2] == two[: 2 * shared + 2]:
                shared += 1
            assert hashes[0][:shared] == hashes[1][:shared], "an equal prefix has different hashes"
            assert not set(hashes[0][shared:]) & set(hashes[1][shared:]), "different prefixes share a hash"

        run()

    def test_same_in_every_process(self) -> None:
        """Another process with another hash seed names the same chunks the same."""
        here = self.sample()
        for seed in ("0", "12345"):
            result = subprocess.run(
                child_command(__name__, type(self)),
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert result.returncode == 0, f"the child process failed: {result.stderr[-2000:]}"
            assert result.stdout.split() == here, "another process gives other hashes for the same tokens"

    def sample(self) -> list[str]:
        """Hashes of a fixed request, in hex."""
        source = self.make_source(range(1000), extra=b"salt", chunk_extra={2: b"image"})
        return [h.hex() for h in self.make_generator().extend(source)]


def main(arguments: Sequence[str]) -> None:
    """The child of `test_same_in_every_process`: prints the suite's sample."""
    sys.stdout.write("\n".join(suite_from_arguments(arguments).sample()))
