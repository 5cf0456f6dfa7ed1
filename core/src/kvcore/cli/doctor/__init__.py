"""`kvcore doctor`: this machine, the plugins, the engines and every tier, examined."""

from kvcore.cli.doctor.command import add_arguments, run

__all__ = ["add_arguments", "run"]
