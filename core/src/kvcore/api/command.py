"""The interface of a command of the command line, `kvcore NAME`: what a plugin of the kind `command` offers."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import argparse


class Command(ABC):
    """One command. Its name is the entry point's."""

    help: ClassVar[str]
    """A line for `kvcore NAME --help`: what it does, as a verb, without a full stop."""
    words_follow: ClassVar[bool] = False
    """What stands behind `--` is another program's, and becomes `args.words`, a list."""

    def __init__(self, config: Any = None, context: Any = None) -> None:
        """A command has its arguments instead of options: `config` is None."""

    @abstractmethod
    def add_arguments(self, parser: "argparse.ArgumentParser") -> None:
        """Declare its arguments. Called when it was named."""

    @abstractmethod
    def run(self, args: "argparse.Namespace") -> int:
        """Do it, and return the exit status: 0, or 1 for what was found wrong. A `KVCoreError` or an `OSError` becomes
        a line on stderr, and status 1."""
