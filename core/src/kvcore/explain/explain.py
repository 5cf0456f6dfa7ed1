"""An explanation of one request, or of a prompt that is looked for now."""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from kvcore.api import ConfigError, KVCoreError
from kvcore.engine import Space
from kvcore.explain import specs
from kvcore.explain.cache import Cache, Presence
from kvcore.explain.causes import Facts, ago, explain_break, when
from kvcore.explain.keys import chunk_hashes
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
from kvcore.explain.nearest import Nearest, nearest, parting
from kvcore.observe.decisions import Asked, Decision


class NotOnRecord(ConfigError):
    """Nobody has looked up such a request, as far as is known."""


MAX_LOOKUPS = 20
"""Of one request that are explained."""
MAX_MORE = 20
TOKENS_OFF = "token ids are not on record: `inspect: {tokens: true}` would let this name the first token that differs"


def explain_request(engine: Any, request: str, name: str = "") -> Explanations:
    """Explain the lookups of a request, the latest first: of the one with this id, or else of those whose id holds it.

    Engines add to the ids that their users see. Raises `NotOnRecord` when there is none.
    """
    cache = Cache(engine, name)
    records = cache.records()
    found = [d for d in records if d.asked.id == request]
    more: list[str] = []
    if not found and request:
        ids = list(dict.fromkeys(d.asked.id for d in records if request in d.asked.id))
        if ids:
            found, more = [d for d in records if d.asked.id == ids[0]], ids[1 : MAX_MORE + 1]
    if not found:
        raise NotOnRecord(_nobody(cache, request, len(records)))
    return Explanations(explanations=[_of(cache, d, records) for d in found[:MAX_LOOKUPS]], more=more)


def explain_prompt(engine: Any, question: Question, name: str = "") -> Explanations:
    """Explain what a lookup of this prompt would find now. Raises `ConfigError` for one that cannot be looked for."""
    cache = Cache(engine, name)
    space, hashes, notes = _looked_for(cache, question)
    presence = cache.presence(space, hashes)
    decision = _imagined(question, space, hashes)
    decision.answer = presence.prefix if presence is not None else 0
    decision.broke = "absent" if decision.answer < len(hashes) else ""
    if decision.broke and presence is not None and presence.silent:
        decision.broke, decision.blame = "tier_down", ",".join(presence.silent)
    explained = _of(cache, decision, cache.records(), presence)
    return Explanations(explanations=[explained.model_copy(update={"notes": notes + explained.notes})], more=[])


def prompt_decision(cache: Cache, question: Question) -> Decision:
    """The lookup that this prompt would be, not answered."""
    space, hashes, _ = _looked_for(cache, question)
    return _imagined(question, space, hashes)


def _imagined(question: Question, space: Space, hashes: Sequence[bytes]) -> Decision:
    asked = Asked("", len(question.tokens), question.tokens or None, question.adapter.partition("=")[0])
    return Decision(asked, space.namespace, hashes, 0, space.chunk_tokens, 0, time.time())


def _of(cache: Cache, decision: Decision, records: Sequence[Decision], presence: Presence | None = None) -> Explanation:
    spaces = cache.spaces()
    space = spaces.get(decision.namespace)
    if presence is None and space is not None and decision.hashes:
        presence = cache.presence(space, decision.hashes)
    near = nearest(decision, (d for d in records if d.at < decision.at and _other(d, decision)))
    answer = decision.first if decision.answer is None else decision.answer
    broke = None
    if answer < decision.chunks or not decision.chunks:
        broke = _broke(cache, decision, answer, near, spaces)
    speed = cache.speed(space)
    return Explanation(
        request=decision.asked.id,
        at=when(decision.at),
        cache=cache.name,
        model=space.spec.model if space is not None else "",
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
        nearest=_near(decision, near, spaces, cache),
        now=_now(decision, presence),
        saved=SavedModel(tokens=decision.retrieved, seconds=decision.retrieved / speed if speed else None),
        stored=decision.stored,
        record=RecordModel(
            decisions_since=when(cache.since(records)) if cache.kept else None,
            objects_since=when(cache.journal.since) if cache.journal is not None and cache.journal.most else None,
            tokens=cache.tokens,
        ),
        notes=_notes(decision, answer, space, broke, cache),
    )


def _other(one: Decision, decision: Decision) -> bool:
    """Of another request: an engine may look up one request several times."""
    return one is not decision and not (one.asked.id and one.asked.id == decision.asked.id)


def _broke(
    cache: Cache, decision: Decision, chunk: int, near: Nearest | None, spaces: dict[bytes, Space]
) -> BreakModel:
    chunk_hash = decision.hash_of(chunk)
    events = cache.events(chunk_hash, decision.namespace) if chunk_hash else []
    here = spaces.get(decision.namespace)
    elsewhere, other = ("", list[DifferenceModel]())
    if chunk_hash and here is not None:
        elsewhere, other = _elsewhere(cache, chunk_hash, here, spaces)
    journal = cache.journal
    return explain_break(
        Facts(
            decision,
            chunk,
            events,
            near,
            _differs(decision, near, spaces, cache) if near is not None else (),
            elsewhere,
            other,
            journal.since if journal is not None and journal.most else None,
            cache.policies,
        )
    )


def _elsewhere(
    cache: Cache, chunk_hash: bytes, here: Space, spaces: dict[bytes, Space]
) -> tuple[str, list[DifferenceModel]]:
    """Where the same chunk lies under another namespace, and in what that differs: in the fewest fields, of several."""
    tenants = cache.named_tenants
    found: list[tuple[str, list[DifferenceModel]]] = []
    stored = {e.namespace: e.place for e in reversed(cache.events(chunk_hash)) if e.what in ("stored", "loaded")}
    for namespace, space in spaces.items():
        if namespace == here.namespace:
            continue
        place = "l1" if cache.in_l1(space, [chunk_hash])[0] else stored.get(namespace, "")
        if place:
            found.append((place, specs.differences(specs.fields(here, tenants), specs.fields(space, tenants))))
    return min(found, key=lambda entry: len(entry[1])) if found else ("", [])


def _differs(decision: Decision, near: Nearest, spaces: dict[bytes, Space], cache: Cache) -> list[DifferenceModel]:
    """In what the namespace, the adapter or the salt of the nearest request is another."""
    other = near.decision
    found: list[DifferenceModel] = []
    if other.namespace != decision.namespace:
        tenants = cache.named_tenants
        mine, its = spaces.get(decision.namespace), spaces.get(other.namespace)
        if mine is not None and its is not None:
            found = specs.differences(specs.fields(mine, tenants), specs.fields(its, tenants))
        else:
            found = specs.differences({"namespace": decision.namespace.hex()}, {"namespace": other.namespace.hex()})
    words = {"adapter": (decision.asked.adapter, other.asked.adapter), "salt": (decision.asked.salt, other.asked.salt)}
    for field, (here, there) in words.items():
        if here != there and decision.asked.id:
            found.append(DifferenceModel(field=field, here=here, there=there))
    return found


def _near(decision: Decision, near: Nearest | None, spaces: dict[bytes, Space], cache: Cache) -> NearestModel | None:
    if near is None:
        return None
    other = near.decision
    here: list[int] = []
    there: list[int] = []
    at = 0
    if near.tokens is not None and decision.asked.ids is not None and other.asked.ids is not None:
        here, there, at = parting(decision.asked.ids, other.asked.ids, near.tokens)
    return NearestModel(
        request=other.asked.id,
        at=when(other.at),
        chunks=near.chunks,
        tokens=near.tokens,
        here=here,
        there=there,
        at_here=at,
        differences=_differs(decision, near, spaces, cache),
    )


def _now(decision: Decision, presence: Presence | None) -> NowModel | None:
    if presence is None:
        return None
    counts = {place: sum(there) for place, there in presence.places.items()}
    return NowModel(chunks=decision.begin + presence.prefix, places=counts, silent=dict(presence.silent))


def _notes(decision: Decision, answer: int, space: Space | None, broke: BreakModel | None, cache: Cache) -> list[str]:
    notes = []
    if decision.asked.id and decision.answer is None:
        notes.append("it has not been answered yet")
    if answer > decision.first and decision.asked.id and not decision.retrieved:
        notes.append(
            "the engine has not taken what was found: it was aborted, waits for room, or computes it after all"
        )
    if space is None and cache.manager is not None and decision.namespace:
        notes.append("its model is registered no more, so what its namespace stands for is not known")
    if broke is not None and decision.asked.id and not cache.tokens and broke.reason in _NEED_TOKENS:
        notes.append(TOKENS_OFF)
    return notes


_NEED_TOKENS = ("never_stored", "differs", "unknown", "other_namespace")


# -- a prompt ------------------------------------------------------------------------------------------------------


def _looked_for(cache: Cache, question: Question) -> tuple[Space, Sequence[bytes], list[str]]:
    """The space in which a prompt would be looked up, its hashes there, and what else there is."""
    if cache.manager is None:
        raise ConfigError("this cache is a server's: explain the prompt at the server")
    spaces = cache.spaces()
    if question.hashes:
        space = spaces.get(bytes.fromhex(question.namespace))
        if space is None:
            raise ConfigError(f"no model is registered under the namespace {question.namespace}")
        return space, [bytes.fromhex(h) for h in question.hashes], []
    of_model = [s for s in spaces.values() if question.model in ("", s.spec.model)]
    notes: list[str] = []
    models = sorted({s.spec.model for s in spaces.values()})
    if not of_model and len(models) == 1:  # the engine has it by another name, such as another folder's
        of_model = list(spaces.values())
        notes.append(f"the cache has one model, {models[0]!r}: taken for {question.model!r}")
    if not of_model:
        raise ConfigError(
            f"no model {question.model!r} is registered with this cache: {', '.join(models) or 'none yet'}"
        )
    adapter = question.adapter.partition("=")[0]
    fit = [s for s in of_model if s.tenant in _tenants(question) and _adapter(s) == adapter]
    if not fit:
        raise ConfigError(_no_space(cache, of_model, question))
    registry = cache.manager.registry
    best: tuple[int, Space, Sequence[bytes]] | None = None
    for space in fit:
        hashes = chunk_hashes(registry, space, question.tokens, question.salt, question.adapter)
        count = cache.in_l1(space, hashes).count(True)
        if best is None or count > best[0]:
            best = (count, space, hashes)
    assert best is not None
    if len(fit) > 1:
        notes.append(
            f"{len(fit)} engines have registered this model in ways that differ; this is the one with most of it"
        )
    for space in of_model:
        if space not in fit:
            notes += _alternative(cache, space, question, best[1])
    return best[1], best[2], notes


def _alternative(cache: Cache, space: Space, question: Question, here: Space) -> list[str]:
    """What another tenant or adapter has of the same tokens."""
    assert cache.manager is not None
    adapter = _adapter(space)
    if adapter:  # the path of its weights, which vLLM's hashes cover, is not known here
        return []
    try:
        hashes = chunk_hashes(cache.manager.registry, space, question.tokens, space.tenant, "")
    except KVCoreError:
        return []
    there = cache.in_l1(space, hashes)
    count = there.index(False) if False in there else len(there)
    if not count:
        return []
    fields = specs.differences(specs.fields(here, cache.named_tenants), specs.fields(space, cache.named_tenants))
    return [f"the first {count} chunks of the same tokens are in l1 under another namespace: {specs.told(fields)}"]


def _tenants(question: Question) -> tuple[str, ...]:
    """What the tenant may be called: a salt that is not fit to be a name is hashed."""
    if question.tenant:
        return (question.tenant,)
    return question.salt, hashlib.sha256(question.salt.encode(errors="surrogatepass")).hexdigest()


def _adapter(space: Space) -> str:
    return space.spec.extra.get("lora", "").rpartition(":")[0]


def _no_space(cache: Cache, spaces: Sequence[Space], question: Question) -> str:
    tenants = sorted({specs.tenant_shown(s.tenant, cache.named_tenants) or "none" for s in spaces})
    adapters = sorted({_adapter(s) or "none" for s in spaces})
    wanted = specs.tenant_shown(question.tenant or question.salt, cache.named_tenants)
    return (
        f"nobody has asked for this model as the tenant (or with the salt) {wanted or 'none'} and with the adapter "
        f"{question.adapter or 'none'}, so nothing can be there; tenants: {', '.join(tenants)}; adapters: "
        f"{', '.join(adapters)}"
    )


def _nobody(cache: Cache, request: str, count: int) -> str:
    if cache.decisions is None or not cache.kept:
        return "this cache keeps no record of requests: `inspect.requests` is 0"
    since = ago(time.time() - cache.decisions.began)
    return (
        f"no request {request!r} is among the {count} lookups on record (of {cache.decisions.last} in {since}): it was "
        "not looked up here, or so many have come since; `inspect.requests` sets how many are kept"
    )
