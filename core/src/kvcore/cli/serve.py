"""`kvcore serve`: one cache for all engines of this machine, until SIGTERM, SIGHUP or Ctrl-C."""

import argparse
import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcore.api import ConfigError, format_size
from kvcore.cli.kit.configured import add_file, add_set, flags
from kvcore.plugins import registry_from_env

if TYPE_CHECKING:
    from kvcore.config import ServerConfig
    from kvcore.config.tree import Fault
    from kvcore.service.http import HttpServer
    from kvcore.service.inspect import Subject
    from kvcore.service.server import Server

HTTP = "127.0.0.1:7601"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore serve`."""
    add_file(parser, "a YAML file with `server` (default: KVCORE_CONFIG)")
    parser.add_argument(
        "--http",
        metavar="ADDRESS",
        nargs="?",
        const=HTTP,
        help=f"serve HTTP, too, as `server.http.listen` says (default: {HTTP})",
    )
    add_set(parser)


def run(args: argparse.Namespace) -> int:
    """Serve. Prints one line when it is ready; 0 when it was asked to end."""
    from kvcore.config import InvalidConfigError, load_config
    from kvcore.config.http import http_faults
    from kvcore.config.scripts import script_faults

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # two for each engine, beside those of the tiers
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    registry = registry_from_env()
    given = flags(args)
    if args.http is not None:
        given["server.http.listen"] = args.http
    try:
        config = load_config(args.config, flags=given, registry=registry)
        if config.server is not None and (faults := http_faults(config.server.http, config.sources)):
            raise InvalidConfigError(faults)
    except InvalidConfigError as error:
        raise InvalidConfigError(
            [_as_typed(f) for f in error.faults] if args.http is not None else error.faults
        ) from None
    if config.server is None:
        raise ConfigError("server: is missing: say where to listen, such as `server: unix:///run/kvcore/kvcore.sock`")
    if len(config.server.url) > 1:
        raise ConfigError("server: is a list, which is for engines: give each server a file with its own address")
    if faults := script_faults(config.plugins, config.sources):
        raise InvalidConfigError(faults)
    if config.log_level is None:
        logging.getLogger("kvcore.run").setLevel(logging.INFO)  # what programs say shall be seen
    from kvcore.engine import CacheEngine
    from kvcore.service.address import Listener
    from kvcore.service.children import Children, environment
    from kvcore.service.inspect import Subject, show
    from kvcore.service.server import Server

    token = config.server.token.get_secret_value() if config.server.token is not None else None
    listeners = [Listener(address) for address in config.server.url]  # before anything of another server is touched
    children = Children(config.plugins.run)
    try:
        engine = CacheEngine.of(config, registry, name="server")
        try:
            server = Server(engine, listeners, token)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    signal.signal(number, lambda *_: server.stop())
            subject = Subject(
                engine, "server", engine.manager, (), str(server.addresses[0]), server.sessions, children.status
            )
            show(subject)
            http = _http(server, config.server, subject) if config.server.http is not None else None
            size = format_size(engine.l1.arena.size)
            where = " and ".join([*map(str, config.server.url), *([http.url] if http is not None else [])])
            print(f"kvcore is ready on {where}: L1 of {size}, tiers: {', '.join(engine.tiers) or 'none'}", flush=True)
            env = environment(
                os.environ, str(config.server.url[0]), config.file, http.url if http is not None else None
            )
            children.start(env, engine.metrics)
            with suppress(KeyboardInterrupt):
                server.run()
            children.stop()  # they end while what waits is written out
            if http is not None:
                http.close()
            server.close()
        finally:
            children.stop()
            engine.close()
    finally:
        children.close()
        for listener in listeners:
            listener.close()
    return 0


def _as_typed(fault: "Fault") -> "Fault":
    """What is wrong with `--http` under the name that it was given by."""
    return replace(fault, place="--http") if fault.place == "flag server.http.listen" else fault


def _http(server: "Server", config: "ServerConfig", subject: "Subject") -> "HttpServer":
    """HTTP beside the server. Raises `ConfigError`."""
    from kvcore.service.http import Node, serve_http

    assert config.http is not None
    return serve_http(Node(server.engine, loops={"serve": server.post}, subject=subject), config.http)
