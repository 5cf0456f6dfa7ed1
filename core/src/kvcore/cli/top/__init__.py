"""`kvcore top`: what open caches are doing, live."""

from kvcore.cli.top.command import add_arguments, run

__all__ = ["add_arguments", "run"]
