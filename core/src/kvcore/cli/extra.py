"""Commands of packages of their own: plugins of the kind `command`."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvcore.api.command import Command
from kvcore.api.errors import PluginError

if TYPE_CHECKING:
    from kvcore.plugins import Registry


class NoSuchCommand(PluginError):
    """Nobody offers it. The text says what was meant, or what to install."""


def installed() -> Iterator[tuple[str, str]]:
    """Name and help of each that there is. What is wrong with one stands in the place of its help."""
    from kvcore.plugins import registry_from_env

    registry = registry_from_env()
    for name in sorted({info.name for info in registry.available("command") if info.status in ("ready", "clash")}):
        try:
            yield name, str(_made(registry, name).help)
        except PluginError as e:
            yield name, f"cannot be used: {e}"


def to_install(there: Iterable[str]) -> str | None:
    """Which of our packages bring more commands; `there`: those that need none."""
    from kvcore.plugins.known import PACKAGES

    lacking: dict[str, list[str]] = {}
    for (kind, name), distribution in PACKAGES.items():
        if kind == "command" and name not in there:
            lacking.setdefault(distribution, []).append(name)
    lines = [f"  {', '.join(names)}: pip install {distribution}" for distribution, names in lacking.items()]
    return "\n".join(["in packages of their own:", *lines]) if lines else None


def command(name: str, own: Iterable[str]) -> Command:
    """The command of that name; `own`: those of the core. Raises `NoSuchCommand`, `PluginError`."""
    from kvcore.plugins import registry_from_env
    from kvcore.plugins.known import PACKAGES, how_to_install
    from kvcore.plugins.registry import nearest

    registry = registry_from_env()
    there = {info.name for info in registry.available("command")}
    if name.partition("@")[0] in there:
        return _made(registry, name)
    if ("command", name) in PACKAGES:
        raise NoSuchCommand(f"kvcore {name} is in a package of its own: {how_to_install('command', name)}")
    near = nearest(name, {*own, *there, *(known for kind, known in PACKAGES if kind == "command")})
    meant = f"did you mean kvcore {near}?" if near else "`kvcore --help` lists them"
    raise NoSuchCommand(f"there is no command {name!r}: {meant}")


def _made(registry: "Registry", name: str) -> Command:
    from kvcore.plugins import PluginSpec

    made: Command = registry.create("command", PluginSpec(name))
    return made
