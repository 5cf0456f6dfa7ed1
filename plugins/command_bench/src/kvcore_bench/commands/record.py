"""Command `record`: from running caches to a trace."""

import argparse

from kvcore.api import ApiVersion, Command, Component, hookimpl


class Record(Command):
    """`kvcore record`."""

    help = "record the lookups of running caches as an anonymous trace"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See `Command`."""
        from kvcore_bench import recording

        recording.add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        """See `Command`."""
        from kvcore_bench import recording

        return recording.run(args)


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=Record)
