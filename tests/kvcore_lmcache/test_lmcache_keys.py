"""What is in the namespace and what in the hash. Pinned: a change here would lose everybody's cache."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvcore_lmcache._compat import Layout
from kvcore_lmcache.keys import HASH_BYTES, SCHEME, hash_of, spec_of

LAYOUT = Layout(((2, 4, 64, 64),), ("bfloat16",), (65536,), 2)
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
    spec = spec_of("some/model", 0, LAYOUT, "")
    others = [
        spec_of("other/model", 0, LAYOUT, ""),
        spec_of("some/model", 1, LAYOUT, ""),
        spec_of("some/model", 0, LAYOUT, "revision"),
        spec_of("some/model", 0, LAYOUT._replace(dtypes=("float16",)), ""),
        spec_of("some/model", 0, LAYOUT._replace(shapes=((2, 4, 32, 128),)), ""),
        spec_of("some/model", 0, LAYOUT._replace(sizes=(65535,)), ""),
    ]
    assert all(other != spec for other in others)
    assert sum(spec.groups[0].block_bytes) * spec.ranks == 65536
    assert replace(spec) == spec_of("some/model", 0, LAYOUT, "")
