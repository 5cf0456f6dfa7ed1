"""What is wrong with `tenants:` that no type can say: places that are not there, quotas larger than the place."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvcore.api.units import brief, format_size, parse_size
from kvcore.config.tree import Fault, Path, Tree, show
from kvcore.plugins.registry import nearest

MAX_NAME = 256
"""Characters of a tenant's name."""
DEFAULT_TENANT = "default"
"""The name under which `tenants:` says what all tenants have that it does not name."""


def quota_faults(data: Mapping[str, Any], tree: Tree) -> Iterator[Fault]:
    """Faults of `tenants` in a configuration whose tiers have their names, before its types are checked."""
    tenants, l1, l2 = data.get("tenants"), data.get("l1"), data.get("l2")
    if not isinstance(tenants, dict):
        return
    sizes = {"l1": _bytes(l1.get("size")) if isinstance(l1, dict) else None}
    for tier in l2 if isinstance(l2, list) else ():
        if isinstance(tier, dict) and isinstance(tier.get("name"), str):
            sizes[tier["name"]] = _bytes(tier.get("capacity"))
    for name, quotas in tenants.items():
        if not isinstance(name, str):
            continue
        if not 0 < len(name) <= MAX_NAME:
            text = f"a tenant's name has 1 to {MAX_NAME} characters, not {len(name)}: see `{DEFAULT_TENANT}` for others"
            yield Fault(tree.source(("tenants", name)).at_key(), f"tenants.{brief(name)}", text)
        for place, quota in quotas.items() if isinstance(quotas, dict) else ():
            path = ("tenants", name, place)
            if place not in sizes:
                near = nearest(str(place), sizes)
                text = f"no such place, the places are {', '.join(sizes)}" + (
                    f"; did you mean {near!r}?" if near else ""
                )
                yield Fault(tree.source(path).at_key(), show(path), text)
                continue
            nbytes, size = _bytes(quota), sizes[place]
            if nbytes is not None and size is not None and nbytes > size:
                what = "l1.size" if place == "l1" else "the tier's capacity"
                text = f"{brief(quota)} is more than {what}, {format_size(size)}: write at most that"
                yield Fault(str(tree.source(path)), show(path), text)


def listed_for(i: int, name: object, capacity: object, ttl: object, tenants: object) -> list[Path]:
    """Where stands what the tier `l2[i]` of this name must know its objects for: capacity, time to live, quotas."""
    paths: list[Path] = [("l2", i, key) for key, value in (("capacity", capacity), ("ttl", ttl)) if value is not None]
    if isinstance(tenants, Mapping) and isinstance(name, str):
        paths += [
            ("tenants", str(t), name) for t, quotas in tenants.items() if isinstance(quotas, Mapping) and name in quotas
        ]
    return paths


def _bytes(value: Any) -> int | None:
    try:
        return parse_size(value)
    except ValueError:
        return None  # absent, `auto`, or wrong, which the types say
