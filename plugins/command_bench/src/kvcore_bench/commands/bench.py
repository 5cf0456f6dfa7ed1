"""Command `bench`: what a cache is measured with."""

import argparse

from kvcore.api import ApiVersion, Command, Component, hookimpl


class Bench(Command):
    """`kvcore bench`."""

    help = "measure speed against this machine's limits"
    words_follow = True
    """Those of the engine that `kvcore bench engine` starts."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See `Command`."""
        from kvcore_bench.speed import command

        command.add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        """See `Command`."""
        from kvcore_bench.speed import command

        return command.run(args)


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Bench)
