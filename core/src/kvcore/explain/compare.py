"""How much two prompts have in common, to the cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore.api import ConfigError
from kvcore.explain import specs
from kvcore.explain.cache import Cache
from kvcore.explain.causes import COMPARE, KEEP_TOKENS, count, name_of
from kvcore.explain.explain import on_record, prompt_decision
from kvcore.explain.models import Comparison, DifferenceModel, DiffModel, Question, Side
from kvcore.explain.nearest import parting, shared, shared_tokens
from kvcore.observe.decisions import Decision


class Two(NamedTuple):
    """Two prompts as far as they are known.

    Args: ids: their tokens, or None. marked: tokens of the first chunk, where marks say that it is the same.
    """

    names: tuple[str, str]
    tokens: tuple[int, int]
    ids: tuple[Sequence[int] | None, Sequence[int] | None]
    chunk_tokens: int = 0
    chunks: int | None = None
    differences: Sequence[DifferenceModel] = ()
    marked: int = 0


def compare(engine: Any, asked: Comparison, name: str = "") -> DiffModel:
    """Compare requests on record and prompts. Raises `ConfigError` for a request that is not on record, or one
    that is compared with itself."""
    cache = Cache(engine, name)
    a, b = (_decision(cache, side, asked.model) for side in (asked.a, asked.b))
    if a.seq and a.seq == b.seq:
        texts = " and ".join(dict.fromkeys(repr(side.request) for side in (asked.a, asked.b)))
        raise ConfigError(f"{texts}: A and B are one request, {name_of(a)}: name two, as `kvcore explain` lists them")
    found: list[DifferenceModel] = []
    if a.namespace != b.namespace and a.seq and b.seq:
        known, tenants = cache.identities(), cache.named_tenants
        fields = [specs.fields(known[d.namespace], tenants) for d in (a, b) if d.namespace in known]
        if len(fields) == 2:
            found = specs.differences(*fields)
        else:
            found = specs.differences({"namespace": a.namespace.hex()}, {"namespace": b.namespace.hex()})
    chunks = shared(a, b) if a.hashes and b.hashes else None
    return told(
        Two(
            (name_of(a), name_of(b)), (a.asked.tokens, b.asked.tokens), (a.asked.ids, b.asked.ids), a.chunk_tokens,
            chunks, found, a.chunk_tokens if a.mark and a.mark == b.mark else 0,
        )
    )  # fmt: skip


def _decision(cache: Cache, side: Side, model: str) -> Decision:
    if side.tokens:
        return prompt_decision(cache, Question(tokens=side.tokens, model=model))
    if not side.request:
        raise ConfigError("a side is empty: name a request on record, or give the tokens of a prompt")
    return on_record(cache, side.request)[0][0]


def told(two: Two) -> DiffModel:
    """What is known of two prompts, in a sentence, too."""
    a, b = two.ids
    size, chunks = two.chunk_tokens, two.chunks
    tokens = shared_tokens(a, b) if a is not None and b is not None else None
    if tokens is not None and chunks is None and size and not two.differences:
        chunks = tokens // size
    here: list[int] = []
    there: list[int] = []
    at = 0
    if tokens is not None and a is not None and b is not None:
        here, there, at = parting(a, b, tokens)
    text, remedy = _sentence(two, tokens, chunks)
    return DiffModel(
        a=two.names[0], b=two.names[1], chunk_tokens=size, tokens_a=two.tokens[0], tokens_b=two.tokens[1],
        chunks=chunks, tokens=tokens, here=here, there=there, at_here=at, differences=list(two.differences),
        text=text, remedy=remedy,
    )  # fmt: skip


def _sentence(two: Two, tokens: int | None, chunks: int | None) -> tuple[str, str]:
    size = two.chunk_tokens
    if two.differences:
        same = two.marked if tokens is None else tokens
        what = f"the first {count(same, 'token')} {'is' if same == 1 else 'are'} the same, but " if same else ""
        return f"nothing: {what}their namespaces differ in {specs.told(list(two.differences))}", (
            "give both the same, if KV may be shared"
        )
    if tokens is None:
        if chunks is None:
            return "not known: neither hashes nor tokens of both are on record", ""
        return f"{count(chunks, 'chunk')} of {size} tokens; which token differs is not on record", (
            f"{COMPARE} names it; or {KEEP_TOKENS}: then this does"
        )
    if not min(two.tokens):
        return ("nothing: both are empty" if two.tokens == (0, 0) else "nothing: one of them is empty"), ""
    if not size:
        return (
            f"the first {count(tokens, 'token')}; how many chunks that is, a running cache says, or --chunk-tokens N",
            "",
        )
    chunks = chunks or 0
    if not tokens:
        return "nothing: the first token differs already", "put what varies behind what prompts share"
    part = (
        f"the first {count(tokens, 'token')}: {count(chunks, 'whole chunk')} of {size}, so {chunks * size:,} are reused"
    )
    if tokens == min(two.tokens) or chunks:
        return part, ""
    return part, "put what varies last; a smaller `chunk_tokens`, if many prompts share so short a beginning"
