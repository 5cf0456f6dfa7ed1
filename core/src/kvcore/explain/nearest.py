"""The request on record that has most in common with a prompt, and where the two part."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcore.observe.decisions import Decision

AROUND = 8
"""So many tokens before and behind the first that differs are shown."""
SEARCHED = 8192
"""Tokens of a prompt in which another's beginning is looked for."""
SKIPPED, NEEDLE = 4, 24
"""Of that beginning, so many tokens are left out, and so many looked for."""


class Nearest(NamedTuple):
    """Args: chunks, tokens: what both have in common from the first on; `tokens` is None where that is not on record,
    and `chunks` are then of one namespace. marked: tokens of the first chunk, where the marks of both say that it is
    the same, whatever the namespace."""

    decision: Decision
    chunks: int
    tokens: int | None
    marked: int = 0

    def common(self, chunk_tokens: int) -> int:
        """Tokens that both are known to have in common."""
        return self.tokens if self.tokens is not None else max(self.chunks * chunk_tokens, self.marked)


def nearest(one: Decision, others: Iterable[Decision]) -> Nearest | None:
    """Of `others`, newest first, the one with the longest common prefix; of equals one of the same namespace, then the
    newest. None when nothing is shared."""
    best: Nearest | None = None
    score = (0, False)
    for other in others:
        same = other.namespace == one.namespace
        chunks = shared(one, other) if same else 0
        length = None
        if one.asked.ids is not None and other.asked.ids is not None:
            length = shared_tokens(one.asked.ids, other.asked.ids)
        marked = one.chunk_tokens if one.mark and one.mark == other.mark else 0
        known = max(chunks * one.chunk_tokens, length or 0, marked)
        if known and (known, same) > score:
            score, best = (known, same), Nearest(other, chunks, length, marked)
    return best


def shared(a: Decision, b: Decision) -> int:
    """How many chunks from the first on are the same, as far as the hashes on record tell: a chunk's hash covers all
    before it."""
    least, most = max(a.begin, b.begin), min(a.chunks, b.chunks)
    count = _bisected(most - least, lambda n: a.hash_of(least + n - 1) == b.hash_of(least + n - 1))
    return least + count if count else 0


def shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of the front are equal."""
    most, step, done = min(len(a), len(b)), 64, 0
    while done < most and list(a[done : done + step]) == list(b[done : done + step]):
        done, step = min(done + step, most), step * 2
    while done < most and a[done] == b[done]:
        done += 1
    return done


def parting(tokens: Sequence[int], others: Sequence[int], at: int) -> tuple[list[int], list[int], int]:
    """The tokens of both around index `at`, and its index within them."""
    begin = max(0, at - AROUND)
    return list(tokens[begin : at + AROUND]), list(others[begin : at + AROUND]), at - begin


def _bisected(most: int, equal: Callable[[int], bool]) -> int:
    """The largest n up to `most` for which `equal(n)`; true below it, and false above."""
    low, high = 0, max(0, most)
    while low < high:
        middle = (low + high + 1) // 2
        if equal(middle):
            low = middle
        else:
            high = middle - 1
    return low


class Shifted(NamedTuple):
    """The beginning of one prompt stands in another behind so many `tokens`. `mine`: it is this prompt that has
    something in front, else the other one."""

    decision: Decision
    tokens: int
    mine: bool


def shifted(one: Decision, others: Iterable[Decision]) -> Shifted | None:
    """The first of `others` that would share a prefix with this prompt if nothing stood in front of one of them."""
    if one.asked.ids is None:
        return None
    here = _words(one.asked.ids)
    for other in others:
        if other.asked.ids is None:
            continue
        there = _words(other.asked.ids)
        for hay, needle, mine in ((here, there, True), (there, here, False)):
            if (at := _find(hay, needle)) > 0:
                return Shifted(other, at, mine)
    return None


def _words(ids: Sequence[int]) -> bytes:
    return b"".join((int(i) & 0xFFFFFFFF).to_bytes(4, "little") for i in ids[:SEARCHED])  # any numbers will do


def _find(hay: bytes, prompt: bytes) -> int:
    """How many tokens stand in `hay` before the beginning of `prompt`; 0 when it is not in there, or at the front. The
    first tokens are not looked at: text before them may have been joined with them into others."""
    needle = prompt[4 * SKIPPED : 4 * (SKIPPED + NEEDLE)]
    if len(needle) < 4 * NEEDLE:
        return 0
    at = hay.find(needle)
    while at > 0 and at % 4:
        at = hay.find(needle, at + 1)
    return max(0, at // 4 - SKIPPED)
