"""What is wrong or idle in a configuration whose values are all valid, for `kvcore config check`."""

from contextlib import suppress

from kvcore.api.errors import KVCoreError
from kvcore.config.model import OWN_CAPACITY, Config
from kvcore.config.tree import Fault
from kvcore.plugins import Registry

NO_TIER = "no l2 tier is configured: what leaves L1 is lost"


def capacities(config: Config, registry: Registry) -> list[Fault]:
    """Tiers with a `capacity` whose storage, once it is made, says that it keeps to one of its own. Opens nothing."""
    faults = []
    for i, tier in enumerate(config.l2):
        if tier.capacity is None:
            continue
        with suppress(KVCoreError):  # that it cannot be made here is for `kvcore doctor` to say
            spec = tier.storage
            if registry.create("storage", spec, registry.context(spec.where, passive=True)).evicts:
                path = f"l2[{i}].capacity"
                faults.append(Fault(str(config.sources[path]), path, OWN_CAPACITY.format(spec.where)))
    return faults


def notes_on(config: Config) -> list[str]:
    """What was written and has no effect, each with its place; or that there is no tier."""
    notes = [] if config.l2 else [NO_TIER]
    written = config.sources
    for i, tier in enumerate(config.l2):
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
