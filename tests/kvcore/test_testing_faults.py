"""The suites of serdes, eviction policies and key generators catch broken ones, and say what is wrong."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest

from kvcore.api import EvictionPolicy, KeyGenerator, KeySource, ObjectLayout, Serde, SerdeError
from kvcore.builtin.keys_tokens import TokenKeys
from kvcore.builtin.raw import RawSerde
from kvcore.testing import EvictionConformance, KeyGeneratorConformance, SerdeConformance
from kvcore.testing.serde import LAYOUTS

# -- serdes ----------------------------------------------------------------------------------------------------------


class Raw(RawSerde):
    def __init__(self) -> None:
        super().__init__(None, None)


class DropsAByte(Raw):
    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        return source[: len(source) // 2 * 2]

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        into[: len(source)] = source


class TakesAnyLength(Raw):
    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        n = min(len(source), len(into))
        into[:n] = source[:n]


class OtherError(Raw):
    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        into[:] = source


class ChangesSource(Raw):
    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        encoded = memoryview(bytes(source))
        if not source.readonly and len(source):
            source[0] ^= 1
        return encoded


class NeedsWritable(Raw):
    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        source[:1] = source[:1]
        return source


class Grows(Raw):
    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        return memoryview(bytes(source) + b"\0")

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        super().decode(source[:-1], into, layout)


class OneAtATime(Raw):
    """Keeps state between calls."""

    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        self.last = bytes(source)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300)  # time for another thread
        return memoryview(self.last)


class BadTag(Raw):
    @property
    def tag(self) -> str:
        return "Raw 1"


class Inverts(Raw):
    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        return memoryview(bytes(b ^ 255 for b in source))

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        super().decode(memoryview(bytes(b ^ 255 for b in source)), into, layout)


class Lossy(Raw):
    lossy = True

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        super().decode(source, into, layout)
        into[:1] = b"\0"[: len(into)]


SERDES: list[tuple[Callable[[], Serde], str, tuple[Any, ...], str]] = [
    (DropsAByte, "test_round_trip_at_odd_sizes", (7, LAYOUTS["fp8"]), "7 bytes of .*: other bytes came back"),
    (TakesAnyLength, "test_wrong_length_is_an_error", (), "into 0: `decode` did not raise a SerdeError"),
    (TakesAnyLength, "test_cut_source_is_an_error", (), "did not raise a SerdeError"),
    (OtherError, "test_wrong_length_is_an_error", (), "raised ValueError.* not a SerdeError"),
    (OtherError, "test_garbage_is_harmless", (), "raised ValueError.* not a SerdeError"),
    (ChangesSource, "test_source_stays_as_it_was", (), "`encode` changed its source"),
    (Grows, "test_encoded_size_is_bounded", (), "0 bytes of zeros became 1, `max_encoded_bytes` says 0"),
    (OneAtATime, "test_several_threads", (), "eight threads at once: (other bytes|`decode` refused)"),
    (BadTag, "test_tag_is_valid", (), "`tag` must be"),
    (Inverts, "test_reads_what_was_written_before", (), "earlier release: other bytes"),
    (Inverts, "test_other_options_decode_the_same", (), "under other options: other bytes"),
]


def serde_suite(make: Callable[[], Serde]) -> SerdeConformance:
    class Suite(SerdeConformance):
        written_before = ((b"old", b"old", LAYOUTS["bf16"]),)

        def make_serde(self) -> Serde:
            return make()

        def make_other_serdes(self) -> Sequence[Serde]:
            return [Raw()]

        def check_lossy(self, source: bytes, decoded: bytes, layout: ObjectLayout) -> None:
            assert source[1:] == decoded[1:], "too far"

    return Suite()


@pytest.mark.parametrize(("make", "test", "arguments", "sentence"), SERDES)
def test_serde_fault_is_named(make: Callable[[], Serde], test: str, arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        getattr(serde_suite(make), test)(*arguments)


def test_serde_that_needs_writable_memory() -> None:
    with pytest.raises(TypeError, match="read-only"):
        serde_suite(NeedsWritable).test_source_stays_as_it_was()


def test_lossy_serde_is_judged_by_its_author() -> None:
    serde_suite(Lossy).test_round_trip_at_odd_sizes(4096, LAYOUTS["bf16"])

    class TooLossy(Lossy):
        def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
            if len(source) != len(into):
                raise SerdeError("length")

    with pytest.raises(AssertionError, match="too far"):
        serde_suite(TooLossy).test_round_trip_at_odd_sizes(4096, LAYOUTS["bf16"])


# -- eviction policies -----------------------------------------------------------------------------------------------


class Lru(EvictionPolicy):
    """A right one, in which it is easy to be wrong: key by key."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, int] = OrderedDict()

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            self._entries.pop(key, None)
            self._entries[key] = size

    def touch(self, keys: Sequence[Hashable]) -> None:
        for key in keys:
            if key in self._entries:
                self._entries.move_to_end(key)

    def remove(self, keys: Sequence[Hashable]) -> None:
        for key in keys:
            self._entries.pop(key, None)

    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        victims: list[Hashable] = []
        for key in self._entries:
            if nbytes <= 0:
                break
            if not pinned(key):
                victims.append(key)
                nbytes -= self._entries[key]
        for key in victims:
            del self._entries[key]
        return victims

    def __len__(self) -> int:
        return len(self._entries)


class EvictsPinned(Lru):
    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        return super().evict(nbytes, lambda key: False)


class ForgetsPinned(Lru):
    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        kept = [key for key in self._entries if pinned(key)]
        victims = super().evict(nbytes, pinned)
        self.remove(kept)
        return victims


class StopsAtPinned(Lru):
    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        victims: list[Hashable] = []
        while nbytes > 0 and self._entries and not pinned(next(iter(self._entries))):
            key, size = self._entries.popitem(last=False)
            victims.append(key)
            nbytes -= size
        return victims


class AsksForAll(Lru):
    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        held = {key for key in self._entries if pinned(key)}
        return super().evict(nbytes, held.__contains__)


class CountsKeys(Lru):
    """Takes bytes for keys."""

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        super().insert(keys, [1] * len(keys))


class OneAtMost(Lru):
    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        return super().evict(min(nbytes, 1), pinned)


class KeepsVictims(Lru):
    def evict(self, nbytes: int, pinned: Callable[[Hashable], bool]) -> list[Hashable]:
        before = self._entries.copy()
        victims = super().evict(nbytes, pinned)
        self._entries = before
        return victims


class TouchInserts(Lru):
    def touch(self, keys: Sequence[Hashable]) -> None:
        for key in keys:
            self._entries[key] = self._entries.pop(key, 1)


class RaisesOnUnknown(Lru):
    def remove(self, keys: Sequence[Hashable]) -> None:
        for key in keys:
            del self._entries[key]


class OldSize(Lru):
    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        super().insert(keys, [self._entries.get(key, size) for key, size in zip(keys, sizes, strict=True)])


class NeedsOrder(Lru):
    """Sorts its keys, which are opaque."""

    def insert(self, keys: Sequence[Hashable], sizes: Sequence[int]) -> None:
        super().insert(sorted(keys), sizes)  # type: ignore[type-var]


POLICIES: list[tuple[Callable[[], EvictionPolicy], str, tuple[Any, ...], str]] = [
    (EvictsPinned, "test_pinned_keys_stay", (), "a pinned key was evicted"),
    (EvictsPinned, "test_all_pinned", (), "a pinned key was evicted"),
    (EvictsPinned, "test_like_a_set", (), "a pinned key was evicted"),
    (ForgetsPinned, "test_pinned_keys_stay", (), "are known after"),
    (StopsAtPinned, "test_pinned_keys_stay", (), "all keys but the pinned ones must go"),
    (AsksForAll, "test_few_pinned_keys_cost_little", (), "keys were asked about to evict 200"),
    (CountsKeys, "test_frees_enough_and_not_much_more", (), "bytes were freed where"),
    (OneAtMost, "test_frees_enough_and_not_much_more", (), "bytes were freed, .* were asked for"),
    (KeepsVictims, "test_evicts_each_key_once", ("int",), "keys are known after 7 of 100 were evicted"),
    (TouchInserts, "test_unknown_keys_are_ignored", (), "touching unknown keys made them known"),
    (OldSize, "test_known_key_is_touched_and_resized", (), "the size of a key that was inserted again"),
]


def policy_suite(make: Callable[[], EvictionPolicy]) -> EvictionConformance:
    class Suite(EvictionConformance):
        model_shrinks = False

        def make_policy(self) -> EvictionPolicy:
            return make()

    return Suite()


@pytest.mark.parametrize(("make", "test", "arguments", "sentence"), POLICIES)
def test_policy_fault_is_named(
    make: Callable[[], EvictionPolicy], test: str, arguments: tuple[Any, ...], sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        getattr(policy_suite(make), test)(*arguments)


def test_errors_of_a_policy_are_shown() -> None:
    with pytest.raises(KeyError):
        policy_suite(RaisesOnUnknown).test_unknown_keys_are_ignored()
    with pytest.raises(TypeError):
        policy_suite(NeedsOrder).test_evicts_each_key_once("opaque")


# -- key generators --------------------------------------------------------------------------------------------------


class Keys(TokenKeys):
    def __init__(self) -> None:
        super().__init__(None, None)

    def _again(self, source: KeySource, known: Sequence[bytes], **changes: Any) -> list[bytes]:
        fields = {name: getattr(source, name) for name in KeySource.__slots__} | changes
        return super().extend(KeySource(**fields), known)


class NoExtra(Keys):
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        return self._again(source, known, extra=b"")


class NoChunkExtra(Keys):
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        return self._again(source, known, chunk_extra={})


class Uint16(Keys):
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        return self._again(source, known, tokens=[t & 0xFFFF for t in source.tokens])


class Unchained(Keys):
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        n = source.chunk_tokens
        return [
            hashlib.sha256(repr(list(source.tokens[i : i + n])).encode()).digest()
            for i in range(len(known) * n, len(source.tokens) // n * n, n)
        ]


class PartialChunk(Keys):
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        padding = [0] * (-len(source.tokens) % source.chunk_tokens)
        return self._again(source, known, tokens=[*source.tokens, *padding])


class ForgetsKnown(Keys):
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        return super().extend(source)


class StartsAgain(Keys):
    """Chains from the root although chunks are known."""

    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        return self._again(source, (), tokens=source.tokens[len(known) * source.chunk_tokens :])


class PythonHash(Keys):
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        return [hash(h).to_bytes(8, "little", signed=True) * 4 for h in super().extend(source, known)]


class ShortHashes(Keys):
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        return [h[:8] for h in super().extend(source, known)]


class ListsOnly(Keys):
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        whole = source if isinstance(source.tokens, list | range) else KeySource(16, 16, [1] * len(source.tokens))
        return super().extend(whole, known)


class NoScheme(Keys):
    scheme = ""


GENERATORS: list[tuple[Callable[[], KeyGenerator], str, tuple[Any, ...], str]] = [
    (NoExtra, "test_extra_counts_from_the_start", (), "give the same hash"),
    (NoChunkExtra, "test_chunk_extra_counts_from_its_chunk_on", (), "extra of chunk 0 against no extra"),
    (Uint16, "test_every_token_counts_from_its_chunk_on", (), "token 0 of 96 became 65541"),
    (Unchained, "test_order_counts", (), "another order have the same hash|first chunk"),
    (Unchained, "test_equal_prefix_and_nothing_else", (), "different prefixes share a hash"),
    (PartialChunk, "test_one_hash_per_full_chunk", (16, 16), "1 tokens in chunks of 16 gave 1 hashes, not 0"),
    (ForgetsKnown, "test_known_hashes_change_nothing", (16, 16), "with 1 hashes known, the following ones are others"),
    (StartsAgain, "test_known_hashes_change_nothing", (16, 16), "with 1 hashes known, the following ones are others"),
    (ShortHashes, "test_one_hash_per_full_chunk", (16, 16), "16 to 64 bytes long"),
    (ListsOnly, "test_kind_of_sequence_does_not_count", (), "a tuple of tokens has other hashes"),
    (NoScheme, "test_scheme_is_named", (), "`scheme` must not be empty"),
]


def keys_suite(make: Callable[[], KeyGenerator]) -> KeyGeneratorConformance:
    class Suite(KeyGeneratorConformance):
        def make_generator(self) -> KeyGenerator:
            return make()

    return Suite()


@pytest.mark.parametrize(("make", "test", "arguments", "sentence"), GENERATORS)
def test_generator_fault_is_named(
    make: Callable[[], KeyGenerator], test: str, arguments: tuple[Any, ...], sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        getattr(keys_suite(make), test)(*arguments)


class TestPythonHashSuite(KeyGeneratorConformance):
    """Not run as a suite (see below): a child process must be able to find it by its name."""

    __test__ = False

    def make_generator(self) -> KeyGenerator:
        return PythonHash()


def test_hash_that_differs_between_processes_is_caught() -> None:
    with pytest.raises(AssertionError, match="another process gives other hashes"):
        TestPythonHashSuite().test_same_in_every_process()
