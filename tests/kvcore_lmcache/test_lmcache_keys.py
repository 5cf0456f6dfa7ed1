"""What is in the namespace and what in the hash. Pinned: a change here would lose everybody's cache."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvcore.api import ConfigError, Prompt
from kvcore_lmcache import _compat
from kvcore_lmcache.integration import LMCacheIntegration
from kvcore_lmcache.keys import SCHEME, hash_of, spec_of
from kvcore_lmcache.prompts import HASH_BYTES

LAYOUT = _compat.Layout(((2, 4, 64, 64),), ("bfloat16",), (65536,), 2)
KEY = {"chunk_hash": b"\x01" * 32, "kv_rank": (2 << 24) | (1 << 16) | (2 << 8) | 1, "cache_salt": ""}


def key(**other: object) -> SimpleNamespace:
    return SimpleNamespace(**{**KEY, **other})


def test_the_hash_is_pinned() -> None:
    assert SCHEME == "lmcache-chunk/1"
    assert hash_of(key()).hex() == "5b578fecdaae16afff0a202c06591240f9dc3dfaf77ebacf351ce8b90959523d"
    assert len(hash_of(key())) == HASH_BYTES


@pytest.mark.parametrize("other", [{"chunk_hash": b"\x02" * 32}, {"kv_rank": 1}, {"cache_salt": "alice"}])
def test_whatever_the_key_says_is_in_the_hash(other: dict[str, object]) -> None:
    assert hash_of(key(**other)) != hash_of(key())


def test_fields_do_not_run_into_each_other() -> None:
    assert hash_of(key(chunk_hash=b"ab", cache_salt="c")) != hash_of(key(chunk_hash=b"a", cache_salt="bc"))


def test_short_hashes_and_odd_salts_do() -> None:
    """LMCache's `builtin` hash has eight bytes; a salt may be any text that came with a request."""
    assert len(hash_of(key(chunk_hash=b"\x01" * 8, cache_salt="\udcff" * 128))) == HASH_BYTES


def test_whatever_the_layout_says_is_in_the_model() -> None:
    spec = spec_of("some/model", 0, LAYOUT, "", 2, "blake3")
    others = [
        spec_of("other/model", 0, LAYOUT, "", 2, "blake3"),
        spec_of("some/model", 1, LAYOUT, "", 2, "blake3"),
        spec_of("some/model", 0, LAYOUT, "revision", 2, "blake3"),
        spec_of("some/model", 0, LAYOUT, "", 4, "blake3"),
        spec_of("some/model", 0, LAYOUT, "", 2, "sha256_cbor"),
        spec_of("some/model", 0, LAYOUT._replace(dtypes=("float16",)), "", 2, "blake3"),
        spec_of("some/model", 0, LAYOUT._replace(shapes=((2, 4, 32, 128),)), "", 2, "blake3"),
        spec_of("some/model", 0, LAYOUT._replace(sizes=(65535,)), "", 2, "blake3"),
    ]
    assert all(other != spec for other in others)
    assert sum(spec.groups[0].block_bytes) * spec.ranks == 65536
    assert spec.block_tokens == 64
    assert replace(spec) == spec_of("some/model", 0, LAYOUT, "", 2, "blake3")


def test_tokens_of_a_chunk() -> None:
    assert LAYOUT.tokens == 64
    assert LAYOUT._replace(shapes=((4, 32, 64), (2, 2))).tokens == 32  # one plane: MLA
    assert LAYOUT._replace(shapes=((5000,),)).tokens == 1  # as LMCache's own serdes leave it


@pytest.mark.parametrize(
    ("words", "algorithm"),
    [
        ([], "blake3"),
        (["--hash-algorithm", "builtin", "--port", "1"], "builtin"),
        (["--hash-algorithm=sha256_cbor"], "sha256_cbor"),
        (["--hash-algorithm"], ""),
    ],
)
def test_the_servers_hash_algorithm(words: list[str], algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lmcache", "server", *words])
    assert _compat.hash_algorithm() == algorithm


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (Prompt([], 64, 64, adapter="a=b"), "with an adapter is not known"),
        (Prompt([], 64, 64, {"hash": "builtin"}), "--hash-algorithm builtin: only the hashes of blake3"),
    ],
)
def test_prompts_whose_chunks_have_no_known_name(prompt: Prompt, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LMCacheIntegration(None, None).key_source(prompt)


def test_without_blake3_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    with pytest.raises(ConfigError, match="pip install blake3"):
        LMCacheIntegration(None, None).key_source(Prompt([1] * 64, 64, 64))
