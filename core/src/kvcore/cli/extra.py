"""Commands of packages of their own: plugins of the kind `command`."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from kvcore.api.command import Command
from kvcore.api.errors import ConfigError, KVCoreError, PluginError
from kvcore.cli.kit.output import cut, printable

if TYPE_CHECKING:
    from kvcore.plugins import Registry

T = TypeVar("T")


class NoSuchCommand(PluginError):
    """Nobody offers it. The text says what was meant, or what to install."""


class Offered:
    """A command of a plugin, whose faults are told with its name.

    Attributes:
        help: its line, for a terminal.
        words_follow: see `Command`.
    """

    def __init__(self, registry: "Registry", name: str) -> None:
        """Import and make it. Raises `PluginError`."""
        from kvcore.plugins import PluginSpec

        self._info = registry.find("command", name)
        try:
            self._made: Command = registry.create("command", PluginSpec(name))
        except ConfigError as e:
            raise PluginError(f"{self} cannot be made: {e}") from e
        self.help = printable(" ".join(self._made.help.split()))
        self.words_follow = bool(self.guarded(lambda: self._made.words_follow))

    def __str__(self) -> str:
        return f"command plugin {self._info.name!r} ({self._info.distribution} {self._info.version})"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `Command`."""
        self.guarded(lambda: self._made.add_arguments(parser))

    def run(self, args: Namespace) -> int:
        """See `Command`."""
        return self.guarded(lambda: self._made.run(args))

    def guarded(self, call: Callable[[], T]) -> T:
        """What `call` returns. What it raises that no command should is a `PluginError`; under `python -X dev` it is
        what it was, with its traceback."""
        from kvcore.plugins.load import where

        try:
            return call()
        except (KVCoreError, OSError):
            raise
        except Exception as e:
            if sys.flags.dev_mode:
                raise
            cause = f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
            place = where(e, self._info.module)
            raise PluginError(f"{self} failed: {cause}{f', at {place}' if place else ''}") from e


def guarded(command: Any, call: Callable[[], T]) -> T:
    """What `call` returns, which may run code of `command`: its types of arguments, say."""
    return command.guarded(call) if isinstance(command, Offered) else call()


def others() -> str:
    """For `kvcore --help`: what there is, from metadata alone, and what our packages would bring."""
    from kvcore.plugins import registry_from_env
    from kvcore.plugins.known import PACKAGES, how_to_install

    commands = registry_from_env().available("command")
    there: dict[str, list[str]] = {}
    for info in commands:
        if info.status in ("ready", "clash"):
            there.setdefault(info.distribution, []).append(info.name)
    known = {info.name for info in commands}
    lacking: dict[str, list[str]] = {}
    for kind, name in PACKAGES:
        if kind == "command" and name not in known:
            lacking.setdefault(how_to_install(kind, name), []).append(name)
    lines = []
    for distribution, names in there.items():
        lines.append(f"  {printable(', '.join(names))} ({printable(distribution)})")
        if summary := _summary(distribution):
            lines.append(f"    {summary}")
    more = [f"  {', '.join(names)}: {how}" for how, names in lacking.items()]
    return "\n".join(
        (["commands of other packages (kvcore NAME --help):", *lines] if lines else [])
        + (["more commands:", *more] if more else [])
    )


def command(name: str, own: Iterable[str]) -> Offered:
    """The command of that name; `own`: those of the core. Raises `NoSuchCommand`, `PluginError`."""
    from kvcore.plugins import registry_from_env
    from kvcore.plugins.known import PACKAGES, how_to_install
    from kvcore.plugins.registry import nearest

    registry = registry_from_env()
    there = {info.name for info in registry.available("command")}
    if name.partition("@")[0] in there:
        return Offered(registry, name)
    if ("command", name) in PACKAGES:
        raise NoSuchCommand(f"kvcore {name} is in a package of its own: {how_to_install('command', name)}")
    near = nearest(name, {*own, *there, *(known for kind, known in PACKAGES if kind == "command")})
    meant = f"did you mean kvcore {near}?" if near else "`kvcore --help` lists them"
    raise NoSuchCommand(f"there is no command {name!r}: {meant}")


def _summary(distribution: str) -> str:
    """What a package says of itself, in a line."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        fields = metadata(distribution)
    except PackageNotFoundError:
        return ""
    return cut(" ".join(fields["Summary"].split()), 110) if "Summary" in fields else ""
