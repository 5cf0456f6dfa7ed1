"""How a worker reaches the arena, whoever owns it."""

from typing import Any

from kvcore.api import ArenaError
from kvcore.l1.arena import ArenaView


def attach_arena(descriptor: dict[str, Any] | None) -> ArenaView:
    """Map the arena of an `Engine.descriptor()`, in this or another process. Raises `ArenaError`."""
    if descriptor is None:
        raise ArenaError("there is no arena: the server is away; ask the engine for its descriptor again later")
    return ArenaView.attach(descriptor)
