"""What can go wrong with a storage: the options of `faulty`. Imports pydantic: keep it out of start-up."""

from typing import Annotated, Literal

from pydantic import Field

from kvcore.api import Duration, PluginConfig, StorageSpec

Operation = Literal["exists", "load", "store", "delete"]
Rate = Annotated[float, Field(ge=0, le=1)]


class Faults(PluginConfig):
    """Which faults, and how often: a rate is a probability, 0 to 1.

    The same seed gives the same faults. Those of an object depend on its key and on how many times it was loaded or
    stored; those of a call on how many came before it.
    """

    operations: tuple[Operation, ...] = ("exists", "load", "store", "delete")
    """The calls that are touched."""

    latency: Duration = 0.0
    """What each call takes longer."""

    hang_rate: Rate = 0.0
    """Calls that do not return. A blocking one holds its thread and its buffers until the storage is closed, or given
    other faults."""

    error_rate: Rate = 0.0
    """Calls that fail as a whole, as when a connection breaks."""

    fail_rate: Rate = 0.0
    """Objects that cannot be loaded, or stored, while the others of their batch can."""

    lost_rate: Rate = 0.0
    """Objects that `exists` finds and that are gone when they are loaded: evicted or expired in between."""

    torn_rate: Rate = 0.0
    """Objects of which only the front is stored, although the store says that it has them."""

    flip_rate: Rate = 0.0
    """Objects that are loaded with one bit changed."""

    crash_after: int | None = Field(default=None, ge=0)
    """How many calls are served before the store is gone. A store that it interrupts keeps half of its batch, the last
    object torn; every later call fails."""

    seed: int = 0
    """Another seed, other faults."""


class FaultyConfig(Faults):
    """Options of the `faulty` storage."""

    storage: StorageSpec
    """The storage that is made to fail: its name, or a mapping with `plugin` and its options."""
