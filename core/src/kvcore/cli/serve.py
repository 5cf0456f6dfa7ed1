"""`kvcore serve`: one cache for all engines of this machine, until SIGTERM or Ctrl-C."""

import argparse
import logging
import signal
import sys
from contextlib import suppress

from kvcore.api import ConfigError, format_size
from kvcore.cli.config import add_set, flags
from kvcore.plugins import registry_from_env


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore serve`."""
    parser.add_argument("--config", metavar="FILE", help="a YAML file with `server`; default: KVCORE_CONFIG")
    add_set(parser)


def run(args: argparse.Namespace) -> int:
    """Serve. Prints one line when it is ready; 0 when it was asked to end."""
    from kvcore.config import load_config

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    registry = registry_from_env()
    config = load_config(args.config, flags=flags(args), registry=registry)
    if config.server is None:
        raise ConfigError("server: is missing: say where to listen, such as `server: unix:///run/kvcore/kvcore.sock`")
    if len(config.server.url) > 1:
        raise ConfigError("server: is a list, which is for engines: give each server a file with its own address")
    from kvcore.engine import CacheEngine
    from kvcore.service.address import Listener
    from kvcore.service.server import Server

    token = config.server.token.get_secret_value() if config.server.token is not None else None
    listeners = [Listener(address) for address in config.server.url]  # before anything of another server is touched
    try:
        engine = CacheEngine.of(config, registry, name="server")
        try:
            server = Server(engine, listeners, token)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: server.stop())
            size = format_size(engine.l1.arena.size)
            where = " and ".join(map(str, config.server.url))
            print(f"kvcore is ready on {where}: L1 of {size}, tiers: {', '.join(engine.tiers) or 'none'}", flush=True)
            with suppress(KeyboardInterrupt):
                server.run()
            server.close()
        finally:
            engine.close()
    finally:
        for listener in listeners:
            listener.close()
    return 0
