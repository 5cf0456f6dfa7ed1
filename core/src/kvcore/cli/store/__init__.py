"""`kvcore store`: what the tiers hold, examined, moved and removed. Nothing is decoded, and no engine has to stop."""

from kvcore.cli.store.command import add_arguments, run

__all__ = ["add_arguments", "run"]
