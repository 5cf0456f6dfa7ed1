"""Key generator `tokens`: a SHA-256 chain over token ids, for engines without hashes and caches that engines share.

The scheme `tokens-sha256/1`, integers little-endian:

    root    = SHA256("kvcore tokens-sha256/1\\0" | uint64 chunk_tokens | uint64 len(extra) | extra)
    hash[i] = SHA256(hash[i-1] or root | tokens of chunk i as uint32 [ | uint64 len(chunk_extra[i]) | chunk_extra[i] ])

The bracket is left out when the chunk has no extra, or an empty one. Chunks of a chain have one length of tokens, which
is in the root, so no two inputs of SHA-256 are alike unless all parts are.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from struct import iter_unpack, pack
from typing import Any

from kvcore.api import ApiVersion, Component, KeyGenerator, KeySource, LayoutError, hookimpl

TOKEN_BYTES = 4
_DOMAIN = b"kvcore tokens-sha256/1\0"
_UINT32 = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


@hookimpl
def kvcore_keys() -> Component:
    """The `tokens` key generator."""
    return Component(api=ApiVersion(1, 0), factory=TokenKeys)


class TokenKeys(KeyGenerator):
    """See the module. One algorithm and no options: another one is another scheme."""

    scheme = "tokens-sha256/1"

    def __init__(self, config: Any, context: Any) -> None:
        """Has no options."""

    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        """See `KeyGenerator.extend`. Raises `LayoutError` for token ids that are not in 0 to 2**32 - 1."""
        size, start = source.chunk_tokens, len(known)
        end = len(source.tokens) // size
        if start >= end:
            return []
        data = _token_bytes(source.tokens, start * size, end * size)
        parent = known[-1] if known else _root(source)
        hashes: list[bytes] = []
        append, new, extra = hashes.append, sha256, source.chunk_extra
        for (chunk,) in iter_unpack(f"{size * TOKEN_BYTES}s", data):
            state = new(parent)
            state.update(chunk)
            if extra and (more := extra.get(start + len(hashes))):
                state.update(pack("<Q", len(more)) + more)
            parent = state.digest()
            append(parent)
        return hashes


def _root(source: KeySource) -> bytes:
    return sha256(_DOMAIN + pack("<QQ", source.chunk_tokens, len(source.extra)) + source.extra).digest()


def _token_bytes(tokens: Any, start: int, end: int) -> "memoryview | array[int]":
    """Tokens `start` to `end` as contiguous little-endian uint32."""
    view = _uint32_view(tokens)
    if view is not None and sys.byteorder == "little":
        return view[start:end]
    ids = array(_UINT32)
    part = tokens[start:end] if start or end < len(tokens) else tokens
    try:
        ids.fromlist(part if type(part) is list else list(part))  # faster than array(code, part)
    except (OverflowError, TypeError) as error:
        raise LayoutError(f"keys `tokens`: a token id is not an integer of 0 to 2**32 - 1 ({error})") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _uint32_view(tokens: Any) -> memoryview | None:
    """The tokens' own memory when it is a contiguous buffer of native uint32."""
    if type(tokens) is list:
        return None
    try:
        view = memoryview(tokens)
    except TypeError:
        return None
    right = view.format == _UINT32 and view.itemsize == TOKEN_BYTES and view.ndim == 1 and view.c_contiguous
    return view if right else None
