"""An explanation of one request, or of a prompt that is looked for now."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.api import ConfigError
from kvcore.engine.identity import Identity
from kvcore.explain import specs
from kvcore.explain.cache import Cache, Presence
from kvcore.explain.causes import KEEP_TOKENS, Facts, ago, explain_break, name_of, when
from kvcore.explain.elsewhere import elsewhere
from kvcore.explain.models import (
    BreakModel,
    DifferenceModel,
    Explanation,
    Explanations,
    FoundModel,
    NearestModel,
    NowModel,
    Question,
    RecordModel,
    SavedModel,
)
from kvcore.explain.nearest import Nearest, nearest, parting, shifted
from kvcore.explain.prompt import Place, looked_for
from kvcore.observe.decisions import Asked, Decision, kept_word, mark_of


class NotOnRecord(ConfigError):
    """Nobody has looked up such a request, as far as is known."""


MAX_LOOKUPS = 20
"""Of one request that are explained."""
MAX_MORE = 20
MIN_PART = 3
"""Characters of a part of an id; shorter ones have to stand apart in it."""
TOKENS_OFF = f"token ids are not on record: {KEEP_TOKENS}, would let this name the first token that differs"


def explain_request(engine: Any, request: str, name: str = "") -> Explanations:
    """Explain the lookups of a request, the latest first: of the one with this id, or else of those whose id holds it.

    Engines add to the ids that their users see. A lookup without an id goes by its number, `no.12`. Raises
    `NotOnRecord` when there is none.
    """
    cache = Cache(engine, name)
    found, more = on_record(cache, request)
    records = cache.records()
    return Explanations(explanations=[_of(cache, d, records) for d in found[:MAX_LOOKUPS]], more=more)


def on_record(cache: Cache, request: str) -> tuple[list[Decision], list[str]]:
    """The lookups of a request, newest first, and the other ids that hold this one. Raises `NotOnRecord`."""
    request, records = kept_word(request), cache.records()
    found = [d for d in records if name_of(d) == request]
    more: list[str] = []
    if not found and request:
        part = _whole(request)
        holding = dict.fromkeys(d.asked.id for d in records if request in d.asked.id)
        ids = sorted((i for i in holding if len(request) >= MIN_PART or not part(i)), key=part)
        if ids:
            found, more = [d for d in records if d.asked.id == ids[0]], ids[1 : MAX_MORE + 1]
    if not found:
        raise NotOnRecord(_nobody(cache, request, len(records)))
    return found, more


def explain_prompt(engine: Any, question: Question, name: str = "") -> Explanations:
    """Explain what a lookup of this prompt would find now. Raises `ConfigError` for one that cannot be looked for."""
    cache = Cache(engine, name)
    place = looked_for(cache, question)
    presence = cache.presence(place.namespace, place.identity, place.hashes)
    decision = _imagined(question, place)
    decision.answer = presence.prefix if presence is not None else 0
    notes = list(place.notes)
    decision.broke = "absent" if decision.answer < len(place.hashes) else ""
    if decision.broke and presence is not None and decision.answer >= (asked := presence.known):
        decision.broke = ""
        notes.append(f"tiers are asked for the first {asked:,} chunks only: what they have behind these is not known")
    if decision.broke and not decision.answer:
        decision.mark = mark_of(question.tokens[: decision.chunk_tokens])
    if decision.broke and presence is not None and presence.silent:
        decision.broke, decision.blame = "tier_down", ",".join(presence.silent)
    explained = _of(cache, decision, cache.records(), presence)
    return Explanations(explanations=[explained.model_copy(update={"notes": notes + explained.notes})], more=[])


def prompt_decision(cache: Cache, question: Question) -> Decision:
    """The lookup that this prompt would be, not answered."""
    return _imagined(question, looked_for(cache, question))


def _imagined(question: Question, place: Place) -> Decision:
    asked = Asked("", len(question.tokens), question.tokens or None, question.adapter.partition("=")[0])
    return Decision(asked, place.namespace, place.hashes, 0, place.identity.chunk_tokens, 0, time.time())


def _whole(request: str) -> Callable[[str], bool]:
    """What stands apart in an id, as what an engine has added to, goes before what is a part of another word."""
    apart = re.compile(rf"(?<![A-Za-z0-9]){re.escape(request)}(?![A-Za-z0-9])")
    return lambda found: apart.search(found) is None


def _of(cache: Cache, decision: Decision, records: Sequence[Decision], presence: Presence | None = None) -> Explanation:
    known = cache.identities()
    identity = known.get(decision.namespace)
    if presence is None and identity is not None and decision.hashes:
        presence = cache.presence(decision.namespace, identity, decision.hashes)
    others = [d for d in records if d.at < decision.at and _other(d, decision)]
    near = nearest(decision, others)
    answer = decision.first if decision.answer is None else decision.answer
    broke = None
    known_end = bool(decision.seq) or presence is None or answer < presence.known
    if (answer < decision.chunks and known_end) or not decision.chunks:
        broke = _broke(cache, decision, answer, near, others, known)
    speed = cache.speed(identity)
    return Explanation(
        request=name_of(decision),
        at=when(decision.at),
        cache=cache.name,
        model=identity.spec.model if identity is not None else "",
        namespace=decision.namespace.hex(),
        adapter=decision.asked.adapter,
        salt=decision.asked.salt,
        tokens=decision.asked.tokens,
        chunk_tokens=decision.chunk_tokens,
        chunks=decision.chunks,
        lookup_s=decision.seconds,
        found=FoundModel(
            held=decision.first,
            chunks=answer - decision.first,
            places=dict(decision.sources),
            misses=dict(decision.misses),
        ),
        broke=broke,
        nearest=_near(decision, near, known, cache),
        now=_now(decision, presence),
        saved=_saved(decision, speed),
        stored=decision.stored,
        record=RecordModel(
            decisions_since=when(cache.since(records)) if cache.kept else None,
            objects_since=when(cache.journal.since) if cache.journal is not None and cache.journal.most else None,
            tokens=cache.tokens,
        ),
        notes=_notes(decision, answer, identity, broke, cache),
    )


def _saved(decision: Decision, speed: float | None) -> SavedModel:
    read = decision.retrieved
    known = read or decision.asked.id or not decision.seq  # loads of a store are told apart by ids alone
    return SavedModel(tokens=read if known else None, seconds=read / speed if speed and known else None)


def _other(one: Decision, decision: Decision) -> bool:
    """Of another request: an engine may look up one request several times."""
    return one is not decision and not (one.asked.id and one.asked.id == decision.asked.id)


def _broke(
    cache: Cache,
    decision: Decision,
    chunk: int,
    near: Nearest | None,
    others: Sequence[Decision],
    known: dict[bytes, Identity],
) -> BreakModel:
    chunk_hash = decision.hash_of(chunk)
    events = cache.events(chunk_hash, decision.namespace) if chunk_hash else []
    other = None
    before = any(e.at <= decision.at for e in events)  # later it may have been stored by this very request
    if chunk_hash and not before and decision.namespace in known and decision.broke in ("", "absent"):
        other = elsewhere(cache, chunk_hash, decision.namespace, known)
    journal = cache.journal
    return explain_break(
        Facts(
            decision,
            chunk,
            events,
            near,
            shifted(decision, others) if not chunk and decision.chunks else None,
            _differs(decision, near, known, cache) if near is not None else (),
            other.place if other is not None else "",
            other.differences if other is not None else (),
            journal.since if journal is not None and journal.most else None,
            cache.writes,
            all(d.begin <= chunk for d in others if d.namespace == decision.namespace),
            any(d.namespace != decision.namespace for d in others),
        )
    )


def _differs(decision: Decision, near: Nearest, known: dict[bytes, Identity], cache: Cache) -> list[DifferenceModel]:
    """In what the namespace, the adapter or the salt of the nearest request is another."""
    other = near.decision
    found: list[DifferenceModel] = []
    if other.namespace != decision.namespace:
        tenants = cache.named_tenants
        mine, its = known.get(decision.namespace), known.get(other.namespace)
        if mine is not None and its is not None:
            found = specs.differences(specs.fields(mine, tenants), specs.fields(its, tenants))
        else:
            found = specs.differences({"namespace": decision.namespace.hex()}, {"namespace": other.namespace.hex()})
    salts = [f"#{d.asked.salt}" if d.asked.salt else "" for d in (decision, other)]
    for i, one in enumerate(found):
        if one.field == "tenant" and [one.here, one.there] == salts:  # an engine takes it for the tenant
            found[i] = one.model_copy(update={"field": "cache salt"})
    fields = {d.field for d in found}
    adapters = [decision.asked.adapter, other.asked.adapter]
    for field, same, (here, there) in (("adapter", "lora", adapters), ("cache salt", "tenant", salts)):
        if here != there and decision.asked.id and not {field, same} & fields:
            found.append(DifferenceModel(field=field, here=here, there=there))
    return found


def _near(decision: Decision, near: Nearest | None, known: dict[bytes, Identity], cache: Cache) -> NearestModel | None:
    if near is None:
        return None
    other = near.decision
    here: list[int] = []
    there: list[int] = []
    at = 0
    if near.tokens is not None and decision.asked.ids is not None and other.asked.ids is not None:
        here, there, at = parting(decision.asked.ids, other.asked.ids, near.tokens)
    return NearestModel(
        request=name_of(other),
        at=when(other.at),
        chunks=near.chunks,
        tokens=near.tokens,
        here=here,
        there=there,
        at_here=at,
        differences=_differs(decision, near, known, cache),
    )


def _now(decision: Decision, presence: Presence | None) -> NowModel | None:
    if presence is None:
        return None
    counts = {place: sum(there) for place, there in presence.places.items()}
    return NowModel(chunks=decision.begin + presence.prefix, places=counts, silent=dict(presence.silent))


def _notes(
    decision: Decision, answer: int, identity: Identity | None, broke: BreakModel | None, cache: Cache
) -> list[str]:
    notes = []
    if decision.seq and decision.answer is None:
        notes.append("it has not been answered yet")
    if answer > decision.first and decision.asked.id and not decision.retrieved:
        notes.append(
            "the engine has not taken what was found: it was aborted, waits for room, or computes it after all"
        )
    if identity is None and cache.manager is not None and decision.namespace:
        notes.append("what its namespace stands for is not known any more")
    if (
        broke is not None
        and decision.seq
        and decision.asked.tokens
        and not cache.tokens
        and broke.reason in _NEED_TOKENS
    ):
        notes.append(TOKENS_OFF)
    return notes


_NEED_TOKENS = ("differs", "unknown")


def _nobody(cache: Cache, request: str, count: int) -> str:
    if cache.decisions is None or not cache.kept:
        return "this cache keeps no record of requests: `inspect.requests` is 0"
    since = ago(time.time() - cache.decisions.began)
    return (
        f"no request {request!r} is among the {count} lookups on record (of {cache.decisions.last} in {since}): it was "
        "not looked up here, or so many have come since; `inspect.requests` sets how many are kept"
    )
