"""Command `plan`: from a model to sizes."""

from kvcore.api import ApiVersion, Component, hookimpl
from kvcore_bench.commands import Later


class Plan(Later):
    """`kvcore plan`."""

    help = "a model's KV: its size, load against compute time, and what to configure"
    module = "kvcore_bench.plan.command"


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Plan)
