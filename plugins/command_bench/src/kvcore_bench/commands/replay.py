"""Command `replay`: a trace through a cache."""

import argparse

from kvcore.api import ApiVersion, Command, Component, hookimpl


class Replay(Command):
    """`kvcore replay`."""

    help = "send a trace through a real cache: hit rate by tier, and lookup latency"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See `Command`."""
        from kvcore_bench.replay import command

        command.add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        """See `Command`."""
        from kvcore_bench.replay import command

        return command.run(args)


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Replay)
