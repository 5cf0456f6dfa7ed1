"""An explanation for people: a line each for what was asked, found, missed, what to do, and what was saved."""

import time
from collections.abc import Callable, Sequence

from kvcore.explain.causes import ago, count
from kvcore.explain.models import DiffModel, Explanation

Decode = Callable[[Sequence[int]], str]
Line = tuple[str, str]
"""What a line is about, and the line."""
_PARTED = ("differs", "short_prefix", "never_stored")
MAX_TEXT = 60
"""Characters of text before and behind the first token that differs."""


def explanation(it: Explanation, decode: Decode | None = None) -> list[Line]:
    """The lines of one explanation."""
    lines = [("request" if it.request else "prompt", _asked(it)), ("found", _found(it))]
    if it.broke is not None:
        where = (
            "" if not it.chunks else f"chunk {it.broke.chunk + 1} (tokens {it.broke.begin:,} to {it.broke.end - 1:,}) "
        )
        lines.append(("missed", f"{where}{it.broke.text}"))
        lines += _parting(it, decode)
        if it.broke.remedy:
            lines.append(("next", it.broke.remedy))
    lines.append(("saved", _saved(it)))
    lines += [("note", note) for note in [*_silent(it), *it.notes]]
    return lines


def diff(it: DiffModel, decode: Decode | None = None) -> list[Line]:
    """The lines of a comparison."""
    lines = [("a", _side(it.a, it.tokens_a)), ("b", _side(it.b, it.tokens_b)), ("shared", it.text)]
    lines += _differing(it.here, it.there, it.at_here, "a", "b", decode)
    if it.remedy:
        lines.append(("next", it.remedy))
    return lines


def _asked(it: Explanation) -> str:
    parts = [it.request, f"{ago(time.time() - it.at.timestamp())} ago"] if it.request else []
    parts.append(_size(it.tokens, it.chunks, it.chunk_tokens))
    what = [it.model, f"adapter {it.adapter}" if it.adapter else "", f"salt #{it.salt}" if it.salt else ""]
    parts.append(" ".join(filter(None, [*what, f"in {it.cache}" if it.cache else ""])))
    return ", ".join(filter(None, parts))


def _size(tokens: int, chunks: int, chunk_tokens: int) -> str:
    if not chunks:
        return (
            f"{count(tokens, 'token')}: no whole chunk of {chunk_tokens}" if tokens else f"no chunk of {chunk_tokens}"
        )
    size = f"{count(chunks, 'chunk')} of {chunk_tokens} tokens"
    if not tokens:
        return size
    rest = tokens - chunks * chunk_tokens
    return f"{count(tokens, 'token')}: {size}" + (f" and {rest:,} more" if rest else "")


def _found(it: Explanation) -> str:
    found = it.found
    if not it.chunks:
        return "nothing to look for"
    parts = []
    if found.held:
        parts.append(f"{count(found.held, 'chunk')} that the engine had itself")
    if found.held < it.chunks:
        places = ", ".join(f"{n} in {place}" for place, n in found.places.items())
        if sum(found.places.values()) > found.chunks and places:
            places = f"objects loaded: {places}" + ("; what lies behind the gap is of no use" if it.broke else "")
        parts.append(f"{found.chunks} of {count(it.chunks - found.held, 'chunk')}" + (f" ({places})" if places else ""))
    if it.request:
        parts.append(f"answered in {it.lookup_s * 1e3:.1f} ms")
    elif it.now is not None:
        there = ", ".join(f"{n} in {place}" for place, n in it.now.places.items() if n)
        parts.append(f"there now: {there or 'nothing'}")
    return "; ".join(parts)


def _saved(it: Explanation) -> str:
    if not it.request:
        return f"{it.found.chunks * it.chunk_tokens:,} tokens would not be computed"
    if it.saved.tokens is None:
        return "not known: the engine does not say for which request it loads"
    if not it.saved.tokens:
        return "nothing: " + (
            "the engine had it all itself"
            if it.chunks and it.found.held == it.chunks
            else "the engine computed all that it did not have itself"
        )
    seconds = it.saved.seconds
    time_said = f", about {seconds:.2g} s of computing" if seconds else " (the engine's speed is not known yet)"
    return f"{it.saved.tokens:,} tokens{time_said}"


def _silent(it: Explanation) -> list[str]:
    if it.now is None:
        return []
    return [f"tier {name} could not be asked what it has now: {why}" for name, why in it.now.silent.items()]


def _parting(it: Explanation, decode: Decode | None) -> list[Line]:
    near = it.nearest
    if near is None or near.tokens is None or it.broke is None or it.broke.reason not in _PARTED:
        return []
    return _differing(near.here, near.there, near.at_here, "here", "there", decode)


def _differing(
    here: Sequence[int], there: Sequence[int], at: int, name: str, other: str, decode: Decode | None
) -> list[Line]:
    """Where two prompts part, as text or as token ids."""
    if at >= len(here) and at >= len(there):
        return []
    return [(name, _around(here, at, decode)), (other, _around(there, at, decode))]


def _around(ids: Sequence[int], at: int, decode: Decode | None) -> str:
    if at >= len(ids):
        return "(the prompt ends here)"
    if decode is None:
        return f"token {ids[at]} (its text: give --model DIR)"
    before, token, behind = decode(ids[:at]), decode(ids[at : at + 1]), decode(ids[at + 1 :])
    begins = f"{before[-MAX_TEXT:]!r} then {token!r}" if before else f"it begins with {token!r}"
    return f"{begins} then {behind[:MAX_TEXT]!r}" if behind else f"{begins}, then the prompt ends"


def _side(request: str, tokens: int) -> str:
    return f"request {request}, {count(tokens, 'token')}" if request else f"a prompt of {count(tokens, 'token')}"
