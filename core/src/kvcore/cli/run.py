"""`kvcore run ENGINE -- WORDS`: start an engine with kvcore. What that takes is the engine plugin's to know."""

import argparse
import os
import shlex
import signal
import sys
from textwrap import indent
from typing import NoReturn

from kvcore.api.engine import EngineIntegration, Launch, LaunchRequest
from kvcore.api.errors import ConfigError, PluginError
from kvcore.cli import held
from kvcore.cli.kit.configured import add_file, add_set, flags
from kvcore.plugins import PluginSpec, Registry, registry_from_env

words_follow = True
"""What stands behind `--` is the engine's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvcore run`."""
    parser.usage = "kvcore run [OPTIONS] ENGINE -- WORDS OF THE ENGINE'S OWN COMMAND"
    parser.epilog = "example: kvcore run vllm --config kvcore.yaml -- serve MODEL --port 8000"
    parser.add_argument("engine", metavar="ENGINE", help="an engine plugin: see kvcore plugins list --kind engine")
    add_file(parser, word=False)
    add_set(parser)
    parser.add_argument("--via", metavar="WAY", help="how the engine uses kvcore, where it can in several ways")
    parser.add_argument(
        "--role",
        choices=("both", "prefill", "decode"),
        default="both",
        help="compute prompts for other engines, or decode what they computed (default: both)",
    )
    parser.add_argument("--untested", action="store_true", help="start an engine version that was not tested, too")
    parser.add_argument("--print", action="store_true", help="print the command line on stdout, and start nothing")


def run(args: argparse.Namespace) -> int:
    """Become the engine: its signals and its exit status are its own. With `--print` 0."""
    registry = registry_from_env()
    integration: EngineIntegration = registry.create("engine", PluginSpec(args.engine, {}, "engine"))
    via = _way(args.engine, integration, args.via)
    if not args.words:
        raise ConfigError(
            f"the words of {args.engine}'s own command are missing: write them behind `--`, as in "
            f"kvcore run {args.engine} -- serve MODEL"
        )
    request = _request(args, via, registry)
    for finding in integration.check():
        if finding.level == "error":
            raise PluginError(f"{finding.subject}: {finding.text}. Next: {finding.remedy}")
    launch = integration.launch(request)
    if launch.untested and not args.untested:
        raise ConfigError(f"{launch.untested} (--untested starts it all the same)")
    if not args.print:
        print(f"kvcore adds: {shlex.join(launch.added) or 'nothing, it is all there'}", file=sys.stderr)
        print(f"kvcore runs: {_line(launch)}", file=sys.stderr)
        _become(launch)
    print(_line(launch))
    return 0


def _way(name: str, integration: EngineIntegration, wanted: str | None) -> str:
    ways = integration.ways
    if not ways:
        raise PluginError(f"kvcore run cannot start {name!r}. Start it so:\n\n{indent(integration.usage(), '    ')}\n")
    if wanted is not None and wanted not in ways:
        raise ConfigError(f"--via {wanted}: {name} uses kvcore via {' or '.join(ways)}")
    return wanted or ways[0]


def _request(args: argparse.Namespace, via: str, registry: Registry) -> LaunchRequest:
    """Raises `ConfigError` for what is wrong in the file: the engine would say so only after half a minute."""
    from kvcore.config import load_config
    from kvcore.control.manager import l1_bytes

    values = flags(args)
    config = load_config(args.config, flags=values, registry=registry)
    return LaunchRequest(
        words=tuple(args.words),
        via=via,
        role=args.role,
        config=os.path.abspath(config.file) if config.file is not None else None,
        values=values,
        l1_bytes=l1_bytes(config.l1),
    )


def _line(launch: Launch) -> str:
    """As a shell takes it."""
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in launch.env.items()), shlex.join(launch.command)])


def _become(launch: Launch) -> NoReturn:
    if held():
        raise KeyboardInterrupt
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and what is ignored stays so
        signal.signal(ignored, signal.SIG_DFL)
    sys.stderr.flush()
    os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.env})  # noqa: S606
