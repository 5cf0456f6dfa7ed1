"""Command `plan`: from a model to sizes."""

import argparse

from kvcore.api import ApiVersion, Command, Component, hookimpl


class Plan(Command):
    """`kvcore plan`."""

    help = "a model's KV: its size, load against compute time, and what to configure"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See `Command`."""
        from kvcore_bench.plan import command

        command.add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        """See `Command`."""
        from kvcore_bench.plan import command

        return command.run(args)


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Plan)
