"""The same chunk under another namespace: of another engine, of an earlier process, of another tenant."""

from collections.abc import Mapping
from typing import NamedTuple

from kvcore.api import ObjectKey
from kvcore.engine.identity import Identity
from kvcore.engine.space import namespace as fingerprint
from kvcore.explain import specs
from kvcore.explain.cache import Cache, needed
from kvcore.explain.models import DifferenceModel
from kvcore.observe.decisions import salt_word

MAX_ASKED = 64
"""Namespaces that tiers are asked about: those that differ least."""


class Elsewhere(NamedTuple):
    """Args: place: `l1` or a tier's name. differences: in what the namespace differs from the one that was asked."""

    place: str
    differences: list[DifferenceModel]


def elsewhere(cache: Cache, chunk_hash: bytes, here: bytes, known: Mapping[bytes, Identity]) -> Elsewhere | None:
    """Where the chunk lies under another namespace, the one that differs least; None when it is nowhere known."""
    tenants, mine = cache.named_tenants, known[here]
    others = {n: i for n, i in known.items() if n != here} | _past(cache, mine, known)
    fields = specs.fields(mine, tenants)
    found = {n: specs.differences(fields, specs.fields(i, tenants)) for n, i in others.items()}
    order = sorted(found, key=lambda n: len(found[n]))
    for namespace in order:
        if cache.in_l1(namespace, others[namespace], [chunk_hash])[0]:
            return Elsewhere("l1", found[namespace])
    asked = order[:MAX_ASKED]
    answers, _ = cache.ask([ObjectKey(n, chunk_hash, needed(others[n])[0]) for n in asked])
    for i, namespace in enumerate(asked):
        for tier, there in answers.items():
            if there[i]:
                return Elsewhere(tier, found[namespace])
    return None


def _past(cache: Cache, mine: Identity, known: Mapping[bytes, Identity]) -> dict[bytes, Identity]:
    """Namespaces of processes that have ended, and what they were for this one's tenant, whose name is not kept."""
    past = cache.past()
    found = past | (of_tenant(cache, mine.tenant, past) if mine.tenant else {})
    return {namespace: identity for namespace, identity in found.items() if namespace not in known}


def of_tenant(cache: Cache, tenant: str, known: Mapping[bytes, Identity]) -> dict[bytes, Identity]:
    """The namespaces that these models have for a tenant of this name, with the salt of this cache's configuration."""
    if cache.manager is None:
        return {}
    salt, found = cache.manager.config.salt, {}
    for i in known.values():
        if i.salt == salt_word(salt):
            name = fingerprint(i.spec, i.chunk_tokens, i.scheme, i.lossy, salt, tenant)
            found[name] = i._replace(tenant=tenant)
    return found
