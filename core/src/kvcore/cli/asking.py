"""Which caches a command asks, and what they say."""

import argparse
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from kvcore.api.errors import ConfigError
from kvcore.service.inspect.client import Cache, NoAnswer, Refusal, ask, at_url, caches


def add_caches(parser: argparse.ArgumentParser) -> None:
    """The options that choose caches."""
    group = parser.add_argument_group("which cache (default: all open ones of this user)")
    group.add_argument("--cache", metavar="NAME", help="of this name, such as vllm, or vllm-PID")
    group.add_argument(
        "--url", metavar="URL", help="that of a `kvcore serve --http`; its token from KVCORE_SERVER__HTTP__TOKEN"
    )


def chosen(args: argparse.Namespace) -> list[Cache]:
    """The caches to ask. Raises `ConfigError` when there is none."""
    if args.url is not None:
        return [at_url(args.url)]
    found = caches()
    fit = [c for c in found if args.cache in (None, c.name, c.label)]
    if fit:
        return fit
    if found:
        raise ConfigError(f"--cache {args.cache}: there are {', '.join(c.label for c in found)}")
    raise ConfigError(
        "no cache of this user is open on this machine: start an engine with kvcore, or ask a server elsewhere by "
        "--url; a cache with `inspect: {requests: 0}` is not to be asked"
    )


def first_answers(asked: Sequence[Cache], path: str, body: Any = None) -> list[tuple[Cache, Any]]:
    """What those say that have an answer. Raises what the last one said when none has."""
    found: list[tuple[Cache, Any]] = []
    said: list[str] = []
    for cache in asked:
        try:
            found.append((cache, ask(cache, path, body)))
        except (NoAnswer, Refusal) as error:
            said.append(str(error))
    if not found:
        raise ConfigError("\n".join(said))
    return found


def query(path: str, **values: str) -> str:
    """A path with these values behind it."""
    return f"{path}?{urlencode(values, errors='replace')}"
