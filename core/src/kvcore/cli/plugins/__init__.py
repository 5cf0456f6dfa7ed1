"""`kvcore plugins`: what is installed, and how good it is."""

from kvcore.cli.plugins.command import add_arguments, run

__all__ = ["add_arguments", "run"]
