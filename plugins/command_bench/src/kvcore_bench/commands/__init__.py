"""What the entry points name."""

import argparse
from importlib import import_module
from types import ModuleType
from typing import ClassVar

from kvcore.api import Command


class Later(Command):
    """A command whose module is imported when it is used."""

    module: ClassVar[str]
    """It has `add_arguments(parser)` and `run(args)`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See `Command`."""
        self._module().add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        """See `Command`."""
        status: int = self._module().run(args)
        return status

    def _module(self) -> ModuleType:
        return import_module(self.module)
