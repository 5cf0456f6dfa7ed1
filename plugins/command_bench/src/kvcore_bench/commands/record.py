"""Command `record`: from running caches to a trace."""

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore_bench.commands import Later


class Record(Later):
    """`kvcore record`."""

    help = "record the lookups of running caches as an anonymous trace"
    module = "kvcore_bench.recording"


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Record)
