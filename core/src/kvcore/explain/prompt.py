"""Where a prompt that nobody has sent would be looked up: under which namespace, by which hashes."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvcore.api import ConfigError, KVCoreError
from kvcore.control import StorageManager
from kvcore.engine.identity import Identity
from kvcore.explain import specs
from kvcore.explain.cache import Cache
from kvcore.explain.keys import chunk_hashes, keys_tell
from kvcore.explain.models import Question
from kvcore.observe.decisions import tenant_shown


class Place(NamedTuple):
    """A namespace and what it stands for, the prompt's chunk hashes there, and what else there is to say."""

    namespace: bytes
    identity: Identity
    hashes: Sequence[bytes]
    notes: list[str]


def looked_for(cache: Cache, question: Question) -> Place:
    """Where a prompt would be looked up. Raises `ConfigError` where nobody can tell."""
    if cache.manager is None:
        raise ConfigError("this cache is a server's: explain the prompt at the server")
    known = cache.identities()
    if question.hashes:
        namespace = bytes.fromhex(question.namespace)
        if namespace not in known:
            raise ConfigError(f"no model has been registered under the namespace {question.namespace}")
        return Place(namespace, known[namespace], [bytes.fromhex(h) for h in question.hashes], [])
    of_model, notes = _of_model(known, question.model)
    fit = {n: i for n, i in of_model.items() if _serves(cache.manager, i, question)}
    if not fit:
        raise ConfigError(_no_identity(cache, list(of_model.values()), question))
    places, faults = list[Place](), list[ConfigError]()
    for namespace, identity in reversed(fit.items()):  # of equals the latest
        try:
            hashes = chunk_hashes(cache.manager, identity, question.tokens, question.salt, question.adapter)
            places.append(Place(namespace, identity, hashes, notes))
        except ConfigError as fault:  # such as of a pool that an engine keeps beside KV
            faults.append(fault)
    if not places:
        raise faults[0]
    best = max(places, key=lambda place: _there(cache, place)) if len(places) > 1 else places[0]
    if len(places) > 1:
        notes.append(
            f"this model is registered in {len(places)} ways that differ: of these the one that has most of it"
        )
    for namespace, identity in of_model.items():
        if namespace not in fit:
            notes += _alternative(cache, namespace, identity, question, best.identity)
    return best


def _of_model(known: Mapping[bytes, Identity], model: str) -> tuple[Mapping[bytes, Identity], list[str]]:
    """What is registered of a model."""
    models = sorted({i.spec.model for i in known.values()})
    found = {n: i for n, i in known.items() if model in ("", i.spec.model)}
    if found:
        return found, []
    if len(models) == 1:  # the engine has it by another name, such as another folder's
        return known, [f"the cache has one model, {models[0]!r}: taken for {model!r}"]
    raise ConfigError(f"no model {model!r} is registered with this cache: {', '.join(models) or 'none yet'}")


def _serves(manager: StorageManager, identity: Identity, question: Question) -> bool:
    """Would such a request be looked for under this identity?"""
    if keys_tell(manager, identity):
        return identity.tenant == question.tenant
    return identity.tenant in _tenants(question) and _adapter(identity) == question.adapter.partition("=")[0]


def _there(cache: Cache, place: Place) -> int:
    """How many of the chunks are in L1; where there is none, how many of the front tiers have."""
    if cache.manager is not None and cache.manager.arena is None:
        presence = cache.presence(place.namespace, place.identity, place.hashes)
        return presence.prefix if presence is not None else 0
    return cache.in_l1(place.namespace, place.identity, place.hashes).count(True)


def _alternative(cache: Cache, namespace: bytes, identity: Identity, question: Question, here: Identity) -> list[str]:
    """What another tenant has of the same tokens."""
    assert cache.manager is not None
    if _adapter(identity):  # the path of its weights, which vLLM's hashes cover, is not known here
        return []
    salt, adapter = identity.tenant, ""
    if keys_tell(cache.manager, identity):
        salt, adapter = question.salt, question.adapter
    try:
        hashes = chunk_hashes(cache.manager, identity, question.tokens, salt, adapter)
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
    tenants = sorted({tenant_shown(s.tenant, cache.named_tenants) or "none" for s in identities})
    adapters = sorted({_adapter(s) or "none" for s in identities})
    wanted = tenant_shown(question.tenant or question.salt, cache.named_tenants)
    return (
        f"nobody has asked for this model as the tenant (or with the salt) {wanted or 'none'} and with the adapter "
        f"{question.adapter or 'none'}, so nothing can be there; tenants: {', '.join(tenants)}; adapters: "
        f"{', '.join(adapters)}"
    )
