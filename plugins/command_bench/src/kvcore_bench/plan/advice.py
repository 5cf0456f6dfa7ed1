"""What follows for `kvcore.yaml`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from kvcore.api.units import format_size
from kvcore.plugins.known import BUILTINS, PACKAGES
from kvcore_bench.plan.costs import Kv, Store

GIB = 1 << 30
IN_FLIGHT = 16
"""So many objects a storage usually loads at once."""
PROMPTS = 4
"""So many of the longest prompts shall be on their way through L1 at once."""
MAX_CHUNK_TOKENS = 256
LOOKUP_TIMEOUT_S = 2.0
"""kvcore's default."""
OWN_CAPACITY = ("disk", "memory")
"""Storages whose `capacity` is an option of their own; of `mooncake` it is the pool's."""


REQUIRED = {"s3": ("bucket",)}
"""Options that a storage cannot do without. A plan is made without the plugins."""


class Advice(NamedTuple):
    """Settings, as a mapping for `kvcore.yaml`, and why: path -> reason."""

    settings: dict[str, Any]
    reasons: dict[str, str]


def advise(
    kv: Kv,
    stores: Sequence[tuple[Store, int | None]],
    prompt_tokens: int,
    tokens: int | None,
    min_object_bytes: int,
    *,
    configured: bool,
) -> Advice:
    """What to write.

    Args:
        stores: the tiers with their break-even lengths, those that never pay with None.
        prompt_tokens: the longest prompt.
        tokens: of the working set, where it was said.
        configured: the tiers are there: only what is wrong with them is said.
    """
    prompt_bytes = kv.stored_bytes(prompt_tokens)
    settings: dict[str, Any] = {"l1": {"size": _gib(PROMPTS * prompt_bytes)}}
    reasons = {
        "l1": f"{PROMPTS} prompts of {prompt_tokens} tokens, {format_size(prompt_bytes)} each, on their way at once"
    }
    useful = sorted((s for s, length in stores if length is not None), key=lambda s: kv.load_seconds(prompt_tokens, s))
    slow = max((kv.load_seconds(prompt_tokens, s) for s in useful), default=0.0)
    if slow > LOOKUP_TIMEOUT_S:
        settings["lookup_timeout"] = f"{int(slow * 1.25) + 1}s"
        reasons["lookup_timeout"] = f"a prompt of {prompt_tokens} tokens takes {slow:.1f} s to load"
    wanted = max((s.bytes_per_s * s.latency_s / IN_FLIGHT for s in useful), default=0.0)
    largest = kv.token_bytes * MAX_CHUNK_TOKENS
    if wanted > max(min_object_bytes, *(g.object_bytes for g in kv.groups)) and kv.chunk_tokens < MAX_CHUNK_TOKENS:
        size = min(1 << (int(wanted) - 1).bit_length(), largest)
        settings["min_object_size"] = format_size(size).replace(" ", "")
        reasons["min_object_size"] = (
            f"larger objects than the {format_size(max(g.object_bytes for g in kv.groups))} above: at this latency, "
            f"{IN_FLIGHT} such at once do not fill the bandwidth"
        )
    if stores and not configured:
        needed = None if tokens is None else kv.stored_bytes(tokens)
        settings["l2"] = [_tier(store.name, needed) for store in useful]
    ordered = useful == [store for store, length in stores if length is not None]
    why = [] if ordered and (configured or len(useful) < 2) else ["the fastest first"]
    if configured and not ordered:
        why = [f"the fastest first: {', '.join(store.name for store in useful)}"]
    why += ["room for the working set"] if "l2" in settings and useful and tokens is not None else []
    if left := [store.name for store, length in stores if length is None]:
        why.append(f"without {', '.join(left)}: computing is faster")
    reasons["l2"] = "; ".join(why)
    return Advice(settings, {k: v for k, v in reasons.items() if v})


def as_yaml(advice: Advice) -> str:
    """The settings as they stand in a file, each with its reason."""
    parts = []
    for key, value in advice.settings.items():
        if key in advice.reasons:
            parts.append(f"# {advice.reasons[key]}\n")
        parts.append(_explained(yaml.safe_dump({key: value}, sort_keys=False)))
    parts += [f"# {key}: {why}\n" for key, why in advice.reasons.items() if key not in advice.settings]
    return "".join(parts)


def _explained(text: str) -> str:
    """What is to be filled in says so."""
    for options in REQUIRED.values():
        for option in options:
            text = text.replace(
                f"{option}: {option.upper()}\n", f"{option}: {option.upper()}  # write the name of yours\n"
            )
    return text


def _tier(name: str, nbytes: int | None) -> dict[str, Any]:
    known = name in BUILTINS["storage"] or ("storage", name) in PACKAGES
    storage = name if known else "PLUGIN"
    tier: dict[str, Any] = {} if known else {"name": name}
    options = {option: option.upper() for option in REQUIRED.get(name, ())}
    if options:
        tier["storage"] = {"plugin": storage, **options}
        if nbytes is not None:
            tier["capacity"] = _gib(nbytes)
    elif nbytes is None or name == "mooncake":
        tier["storage"] = storage
    elif name in OWN_CAPACITY:
        tier["storage"] = {"plugin": storage, "capacity": _gib(nbytes)}
    else:
        tier |= {"storage": storage, "capacity": _gib(nbytes)}
    return tier


def _gib(nbytes: int) -> str:
    return f"{max(1, -(-nbytes // GIB))}GiB"
