"""The command `kvcore`."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the process's arguments. Returns the exit status: 0; 1 for what was found
    wrong; 2 for wrong usage; 130 when interrupted."""
    from kvcore.cli.app import run

    return run(argv)
