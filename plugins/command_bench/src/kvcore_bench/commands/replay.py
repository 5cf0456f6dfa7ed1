"""Command `replay`: a trace through a cache."""

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore_bench.commands import Later


class Replay(Later):
    """`kvcore replay`."""

    help = "send a trace through a real cache: hit rate by tier, and lookup latency"
    module = "kvcore_bench.replay.command"


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Replay)
