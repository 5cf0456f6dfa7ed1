"""Command `from-lmcache`: what LMCache was told, for kvcore."""

import argparse

from kvcore.api import ApiVersion, Command, Component, hookimpl


class FromLMCache(Command):
    """`kvcore from-lmcache`."""

    help = "turn LMCache's configuration into a kvcore.yaml, and say what became of every setting"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See `Command`."""
        from kvcore_from_lmcache import command

        command.add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        """See `Command`."""
        from kvcore_from_lmcache import command

        return command.run(args)


@hookimpl
def kvcore_command() -> Component:
    """The command."""
    return Component(api=ApiVersion(1, 0), factory=FromLMCache)
