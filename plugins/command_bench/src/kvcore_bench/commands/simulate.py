"""Command `simulate`: a trace through policies."""

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore_bench.commands import Later


class Simulate(Later):
    """`kvcore simulate`."""

    help = "replay a trace through eviction policies: hit rate against capacity"
    module = "kvcore_bench.simulate.command"


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Simulate)
