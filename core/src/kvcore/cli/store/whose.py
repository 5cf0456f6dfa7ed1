"""Whose a namespace is. A store cannot say: a namespace is a fingerprint, from which nothing can be read."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from kvcore.cli.kit import asking
from kvcore.explain.catalog import Catalog
from kvcore.service.inspect import NoAnswer, Refusal, ask, caches, folder

if TYPE_CHECKING:
    from kvcore.service.inspect import Cache

ASK_S = 2.0
"""A cache that hangs is waited for no longer: what it knows is not needed."""


def owners(wanted: Collection[bytes]) -> dict[bytes, tuple[str, str]]:
    """Namespace -> model and tenant as it is shown, of those of `wanted` that this user's caches on this machine know:
    without a tenant also those that have ended, with one those that are open and have a request on record."""
    found: dict[bytes, tuple[str, str]] = {}
    for place in folder.folders():
        try:
            folder.check(place, asking=True)
        except OSError:
            continue
        found |= {namespace: (known.spec.model, "") for namespace, known in Catalog(place).all().items()}
    if not found.keys() >= set(wanted):
        for _, said in asking.each(caches(), _asked_for):
            if not isinstance(said, (NoAnswer, Refusal)):
                found |= said
    return {namespace: found[namespace] for namespace in wanted if namespace in found}


def _asked_for(cache: "Cache") -> dict[bytes, tuple[str, str]]:
    said: Any = ask(cache, "/requests?limit=1000", timeout_s=ASK_S)
    with asking.understood(cache):
        return {
            bytes.fromhex(r["namespace"]): (str(r["model"]), str(r["tenant"])) for r in said["requests"] if r["model"]
        }
