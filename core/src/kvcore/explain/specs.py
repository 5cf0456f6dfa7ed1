"""In what two namespaces differ, in words: the fields that `kvcore.engine.space.namespace` fingerprints."""

from collections.abc import Mapping, Set

from kvcore.engine.identity import Identity
from kvcore.explain.models import DifferenceModel
from kvcore.observe.decisions import tenant_shown

MAX_TOLD = 3
"""Fields in a sentence."""
_MAX_SHOWN = 120
_WORDS = {"extra.lora": "lora", "extra.hash": "prefix hash", "extra.hf_config": "model config", "extra.reset": "reset"}


def fields(identity: Identity, known_tenants: Set[str] = frozenset()) -> dict[str, str]:
    """What this namespace is made of. Tenants that the configuration does not name are shown as a short hash:
    they may be a request's cache salt."""
    spec = identity.spec
    found = {
        "engine": spec.engine,
        "model": spec.model,
        "weights": spec.weights,
        "dtype": spec.dtype,
        "element_bytes": str(spec.element_bytes),
        "layout": spec.layout,
        "attention backend": spec.backend,
        "instruction set": spec.isa,
        "block_tokens": str(spec.block_tokens),
        "chunk_tokens": str(identity.chunk_tokens),
        "ranks": str(spec.ranks),
        "keys": identity.scheme,
        "tenant": tenant_shown(identity.tenant, known_tenants),
        "salt of the configuration": f"#{identity.salt}" if identity.salt else "",
        "lossy serde": ", ".join(identity.lossy),
    }
    found |= {f"parallel {name}": str(size) for name, size in spec.parallel.items()}
    found |= {_WORDS.get(f"extra.{name}", name): value for name, value in spec.extra.items()}
    found["KV groups"] = "; ".join(
        f"{len(g.layers)} layers of {sum(g.block_bytes)} bytes a block"
        + (f", window {g.window_tokens}" if g.window_tokens is not None else "")
        for g in spec.groups
    )
    return found


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[DifferenceModel]:
    """The fields that differ."""
    return [
        DifferenceModel(field=name, here=_shown(here.get(name, "")), there=_shown(there.get(name, "")))
        for name in dict.fromkeys((*here, *there))
        if here.get(name, "") != there.get(name, "")
    ]


def told(found: list[DifferenceModel]) -> str:
    """The same in half a sentence."""
    words = [f"{d.field} ({d.here or 'none'} here, {d.there or 'none'} there)" for d in found[:MAX_TOLD]]
    if len(found) > MAX_TOLD:
        words.append(f"{len(found) - MAX_TOLD} more that follow from it, or stand in the JSON")
    return ", ".join(words) or "nothing"


def _shown(value: str) -> str:
    return value if len(value) <= _MAX_SHOWN else f"{value[: _MAX_SHOWN - 1]}…"
