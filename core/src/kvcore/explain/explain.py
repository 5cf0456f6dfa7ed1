"""An explanation of one request, or of a prompt that is looked for now."""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.api import ConfigError, KVCoreError
from kvcore.engine.identity import Identity
from kvcore.explain import specs
from kvcore.explain.cache import Cache, Presence
from kvcore.explain.causes import KEEP_TOKENS, Facts, ago, explain_break, when
from kvcore.explain.elsewhere import elsewhere
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
from kvcore.explain.nearest import Nearest, nearest, parting, shifted
from kvcore.observe.decisions import Asked, Decision, kept_word


class NotOnRecord(ConfigError):
    """Nobody has looked up such a request, as far as is known."""


MAX_LOOKUPS = 20
"""Of one request that are explained."""
MAX_MORE = 20
TOKENS_OFF = f"token ids are not on record: {KEEP_TOKENS}, would let this name the first token that differs"


def explain_request(engine: Any, request: str, name: str = "") -> Explanations:
    """Explain the lookups of a request, the latest first: of the one with this id, or else of those whose id holds it.

    Engines add to the ids that their users see. Raises `NotOnRecord` when there is none.
    """
    cache = Cache(engine, name)
    request, records = kept_word(request), cache.records()
    found = [d for d in records if d.asked.id == request]
    more: list[str] = []
    if not found and request:
        ids = sorted(dict.fromkeys(d.asked.id for d in records if request in d.asked.id), key=_whole(request))
        if ids:
            found, more = [d for d in records if d.asked.id == ids[0]], ids[1 : MAX_MORE + 1]
    if not found:
        raise NotOnRecord(_nobody(cache, request, len(records)))
    return Explanations(explanations=[_of(cache, d, records) for d in found[:MAX_LOOKUPS]], more=more)


def explain_prompt(engine: Any, question: Question, name: str = "") -> Explanations:
    """Explain what a lookup of this prompt would find now. Raises `ConfigError` for one that cannot be looked for."""
    cache = Cache(engine, name)
    namespace, identity, hashes, notes = _looked_for(cache, question)
    presence = cache.presence(namespace, identity, hashes)
    decision = _imagined(question, namespace, identity, hashes)
    decision.answer = presence.prefix if presence is not None else 0
    decision.broke = "absent" if decision.answer < len(hashes) else ""
    if decision.broke and presence is not None and presence.silent:
        decision.broke, decision.blame = "tier_down", ",".join(presence.silent)
    explained = _of(cache, decision, cache.records(), presence)
    return Explanations(explanations=[explained.model_copy(update={"notes": notes + explained.notes})], more=[])


def prompt_decision(cache: Cache, question: Question) -> Decision:
    """The lookup that this prompt would be, not answered."""
    namespace, identity, hashes, _ = _looked_for(cache, question)
    return _imagined(question, namespace, identity, hashes)


def _imagined(question: Question, namespace: bytes, identity: Identity, hashes: Sequence[bytes]) -> Decision:
    asked = Asked("", len(question.tokens), question.tokens or None, question.adapter.partition("=")[0])
    return Decision(asked, namespace, hashes, 0, identity.chunk_tokens, 0, time.time())


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
    if answer < decision.chunks or not decision.chunks:
        broke = _broke(cache, decision, answer, near, others, known)
    speed = cache.speed(identity)
    return Explanation(
        request=decision.asked.id,
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
        saved=SavedModel(tokens=decision.retrieved, seconds=decision.retrieved / speed if speed else None),
        stored=decision.stored,
        record=RecordModel(
            decisions_since=when(cache.since(records)) if cache.kept else None,
            objects_since=when(cache.journal.since) if cache.journal is not None and cache.journal.most else None,
            tokens=cache.tokens,
        ),
        notes=_notes(decision, answer, identity, broke, cache),
    )


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
            cache.policies,
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
        request=other.asked.id,
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
    if decision.asked.id and decision.answer is None:
        notes.append("it has not been answered yet")
    if answer > decision.first and decision.asked.id and not decision.retrieved:
        notes.append(
            "the engine has not taken what was found: it was aborted, waits for room, or computes it after all"
        )
    if identity is None and cache.manager is not None and decision.namespace:
        notes.append("what its namespace stands for is not known any more")
    if broke is not None and decision.asked.id and not cache.tokens and broke.reason in _NEED_TOKENS:
        notes.append(TOKENS_OFF)
    return notes


_NEED_TOKENS = ("differs", "unknown", "other_namespace")


# -- a prompt ------------------------------------------------------------------------------------------------------


Found = tuple[bytes, Identity, Sequence[bytes], list[str]]
"""A namespace and what it stands for, the prompt's hashes there, and what else there is to say."""


def _looked_for(cache: Cache, question: Question) -> Found:
    """Where a prompt would be looked up."""
    if cache.manager is None:
        raise ConfigError("this cache is a server's: explain the prompt at the server")
    known = cache.identities()
    if question.hashes:
        namespace = bytes.fromhex(question.namespace)
        if namespace not in known:
            raise ConfigError(f"no model has been registered under the namespace {question.namespace}")
        return namespace, known[namespace], [bytes.fromhex(h) for h in question.hashes], []
    notes: list[str] = []
    models = sorted({i.spec.model for i in known.values()})
    of_model = {n: i for n, i in known.items() if question.model in ("", i.spec.model)}
    if not of_model and len(models) == 1:  # the engine has it by another name, such as another folder's
        of_model = known
        notes.append(f"the cache has one model, {models[0]!r}: taken for {question.model!r}")
    if not of_model:
        raise ConfigError(
            f"no model {question.model!r} is registered with this cache: {', '.join(models) or 'none yet'}"
        )
    adapter = question.adapter.partition("=")[0]
    fit = {n: i for n, i in of_model.items() if i.tenant in _tenants(question) and _adapter(i) == adapter}
    if not fit:
        raise ConfigError(_no_identity(cache, list(of_model.values()), question))
    best: tuple[int, bytes, Sequence[bytes]] | None = None
    for namespace, identity in reversed(fit.items()):  # of equals the latest
        hashes = chunk_hashes(cache.manager, identity, question.tokens, question.salt, question.adapter)
        count = cache.in_l1(namespace, identity, hashes).count(True)
        if best is None or count > best[0]:
            best = (count, namespace, hashes)
    assert best is not None
    if len(fit) > 1:
        notes.append(
            f"{len(fit)} engines have registered this model in ways that differ; this is the one with most of it"
        )
    for namespace, identity in of_model.items():
        if namespace not in fit:
            notes += _alternative(cache, namespace, identity, question, fit[best[1]])
    return best[1], fit[best[1]], best[2], notes


def _alternative(cache: Cache, namespace: bytes, identity: Identity, question: Question, here: Identity) -> list[str]:
    """What another tenant has of the same tokens."""
    assert cache.manager is not None
    if _adapter(identity):  # the path of its weights, which vLLM's hashes cover, is not known here
        return []
    try:
        hashes = chunk_hashes(cache.manager, identity, question.tokens, identity.tenant, "")
    except KVCoreError:
        return []
    there = cache.in_l1(namespace, identity, hashes)
    count = there.index(False) if False in there else len(there)
    if not count:
        return []
    fields = specs.differences(specs.fields(here, cache.named_tenants), specs.fields(identity, cache.named_tenants))
    return [f"the first {count} chunks of the same tokens are in l1 under another namespace: {specs.told(fields)}"]


def _tenants(question: Question) -> tuple[str, ...]:
    """What the tenant may be called: a salt that is not fit to be a name is hashed."""
    if question.tenant:
        return (question.tenant,)
    return question.salt, hashlib.sha256(question.salt.encode(errors="surrogatepass")).hexdigest()


def _adapter(identity: Identity) -> str:
    return identity.spec.extra.get("lora", "").rpartition(":")[0]


def _no_identity(cache: Cache, identities: Sequence[Identity], question: Question) -> str:
    tenants = sorted({specs.tenant_shown(s.tenant, cache.named_tenants) or "none" for s in identities})
    adapters = sorted({_adapter(s) or "none" for s in identities})
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
