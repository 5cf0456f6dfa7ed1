"""What is wrong or idle in a configuration whose values are all valid, for `kvcore config check`."""

from contextlib import suppress
from pathlib import PurePath
from typing import Any

from kvcore.api.errors import KVCoreError
from kvcore.api.storage import can_list
from kvcore.config.http import http_faults
from kvcore.config.model import CANNOT_LIST, OWN_CAPACITY, Config
from kvcore.config.scripts import TOLD
from kvcore.config.tenants import listed_for
from kvcore.config.tree import DEFAULT, Fault, show
from kvcore.plugins import Registry

NO_TIER = "no l2 tier is configured: what leaves L1 is lost"
NOT_SERVED = "is run by `kvcore serve` only, which needs `server`: an engine with this file runs none of it"

REPLACED = "the program is told this value and not the server's own: leave it out, if it is to find the server"
RELATIVE = "begins at the working directory of each process that reads the file ({!r}): write an absolute path"


def capacities(config: Config, registry: Registry) -> list[Fault]:
    """Tiers with a `capacity` (or a `ttl`, or quotas) whose storage, once it is made, says that it keeps to one of its
    own, or cannot list what it holds. Opens nothing."""
    faults = []
    for i, tier in enumerate(config.l2):
        needs = [show(path) for path in listed_for(i, tier.name, tier.capacity, tier.ttl, config.tenants)]
        if not needs:
            continue
        with suppress(KVCoreError):  # that it cannot be made here is for `kvcore doctor` to say
            spec, path = tier.storage, f"l2[{i}].capacity"
            made = registry.create("storage", spec, registry.context(spec.where, passive=True))
            if made.evicts and tier.capacity is not None:
                faults.append(Fault(str(config.sources[path]), path, OWN_CAPACITY.format(spec.where)))
            if not can_list(type(made)):
                text = CANNOT_LIST.format(spec.plugin)
                faults += [Fault(str(config.sources.get(path, "")), path, text) for path in needs]
    return faults


def unusable(config: Config, registry: Registry) -> list[str]:
    """Serdes that cannot be made on this machine: a key that is not there, a library that is not installed. No faults:
    the file may be for another."""
    notes = []
    for i, tier in enumerate(config.l2):
        for j, spec in enumerate(tier.serde):
            try:
                registry.create("serde", spec)
            except KVCoreError as error:
                path = f"l2[{i}].serde[{j}]"
                place = next((str(s) for p, s in config.sources.items() if p.startswith(path)), DEFAULT)
                notes.append(str(Fault(str(place), path, f"cannot be used here, and stops a start: {error}")))
    return notes


def notes_on(config: Config) -> list[str]:
    """What was written and has no effect, or one that surprises, each with its place; or that there is no tier."""
    notes = [] if config.l2 else [NO_TIER]
    written = config.sources
    if config.plugins.run and config.server is None:
        notes.append(str(Fault(str(written["plugins.run[0].path"]), "plugins.run", NOT_SERVED)))
    if config.server is not None:
        notes += [f"{fault}; `kvcore serve` refuses it so" for fault in http_faults(config.server.http, written)]
    for i, script in enumerate(config.plugins.run):
        for name in (name for name in TOLD if name in script.env):
            path = f"plugins.run[{i}].env.{name}"
            notes.append(str(Fault(str(written.get(path, DEFAULT)), path, REPLACED)))
    for i, tier in enumerate(config.l2):
        for option, value in _relative(tier.storage.options):
            path = f"l2[{i}].storage.{option}"
            notes.append(str(Fault(str(written.get(path, DEFAULT)), path, RELATIVE.format(str(value)))))
        promote, eviction = f"l2[{i}].promote", f"l2[{i}].eviction"
        if tier.promote and tier.write != "all" and promote in written:
            why = f"has no effect with `write: {tier.write}`, only with `write: all`"
            notes.append(str(Fault(str(written[promote]), promote, why)))
        divided = any(tier.name in quotas for quotas in config.tenants.values())
        if tier.capacity is None and not divided and eviction in written:
            why = (
                "has no effect without `capacity` beside it or a tenant's quota; a storage's own policy is an option "
                "of the storage"
            )
            notes.append(str(Fault(str(written[eviction]), eviction, why)))
    return notes


def _relative(options: Any) -> list[tuple[str, PurePath]]:
    """Options that are paths below whatever directory a process runs in."""
    found = [(name, getattr(options, name)) for name in getattr(type(options), "model_fields", ())]
    return [(n, v) for n, v in found if isinstance(v, PurePath) and not v.is_absolute() and not str(v).startswith("~")]
