"""Command `simulate`: a trace through policies."""

import argparse

from kvcore.api import ApiVersion, Command, Component, hookimpl


class Simulate(Command):
    """`kvcore simulate`."""

    help = "replay a trace through eviction policies: hit rate against capacity"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See `Command`."""
        from kvcore_bench.simulate import command

        command.add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        """See `Command`."""
        from kvcore_bench.simulate import command

        return command.run(args)


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Simulate)
