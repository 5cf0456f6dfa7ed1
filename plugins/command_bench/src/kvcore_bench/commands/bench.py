"""Command `bench`: what a cache is measured with."""

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore_bench.commands import Later


class Bench(Later):
    """`kvcore bench`."""

    help = "measure speed against this machine's limits"
    module = "kvcore_bench.speed.command"
    words_follow = True
    """Those of the engine that `kvcore bench engine` starts."""


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Bench)
