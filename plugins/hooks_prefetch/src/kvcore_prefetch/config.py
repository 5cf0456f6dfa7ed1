"""The options of loading ahead."""

from pydantic import Field

from kvcore.api import PluginConfig


class PrefetchConfig(PluginConfig):
    """Options of `hooks: [{plugin: prefetch, ...}]`."""

    queued: bool = True
    """Load for requests that wait for their turn, where the engine says so: vLLM does."""

    next_turn: bool = True
    """Load for the next turn of conversations."""

    min_used: float = Field(default=0.25, gt=0, le=1)
    """The share of what is brought that must be used. Where less is, nothing is brought."""

    chunks: int = Field(default=262_144, ge=1024)
    """How many chunks of conversations are remembered, at some 100 bytes each."""
