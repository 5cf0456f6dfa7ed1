"""Which caches a command asks, and what they say."""

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.parse import urlencode

from kvcore.api.errors import ConfigError, KVCoreError
from kvcore.cli.output import error
from kvcore.service.inspect.client import ASK_S, Cache, NoAnswer, Refusal, ask, at_url, caches
from kvcore.service.inspect.folder import hidden

LATE_S = 5.0
"""So long the slowest of several caches is waited for, once one has answered."""
NOT_HERE = (404, 422)
"""The statuses by which a cache says that another one has to answer this."""
T = TypeVar("T")


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
    why = "".join(f"; {fault}" for fault in hidden())
    raise ConfigError(
        "no cache of this user is open on this machine: start an engine with kvcore, or ask a server elsewhere by "
        f"--url; a cache with `inspect: {{requests: 0}}` is not to be asked{why}"
    )


def answers(asked: Sequence[Cache], path: str, body: Any = None) -> list[Any]:
    """What each of them says, or the `NoAnswer` or `Refusal` that it is. All are asked at once, and those that hang are
    waited for no longer than `LATE_S` once another has answered."""
    if len(asked) == 1:
        return [_said(asked[0], path, body)]
    came: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    for n, cache in enumerate(asked):
        asks = partial(_put, came, n, cache, path, body)
        threading.Thread(target=asks, name="kvcore-ask", daemon=True).start()  # nobody joins one that hangs
    found: dict[int, Any] = {}
    begun = time.monotonic()
    give_up = begun + 2 * ASK_S
    while len(found) < len(asked):
        try:
            n, found_here = came.get(timeout=max(0.0, give_up - time.monotonic()))
        except Empty:
            break
        found[n] = found_here
        if not isinstance(found_here, Exception):
            give_up = min(give_up, time.monotonic() + LATE_S)
    late = f"has not answered for {time.monotonic() - begun:.0f} s: see what its process is doing"
    return [found[n] if n in found else NoAnswer(f"{cache.label} {late}") for n, cache in enumerate(asked)]


def _put(came: "SimpleQueue[tuple[int, Any]]", n: int, cache: Cache, path: str, body: Any) -> None:
    came.put((n, _said(cache, path, body)))


def _said(cache: Cache, path: str, body: Any) -> Any:
    try:
        return ask(cache, path, body)
    except (NoAnswer, Refusal) as fault:
        return fault


def first_answers(
    asked: Sequence[Cache], path: str, body: Any = None, read: Callable[[Any], T] = lambda said: said
) -> list[tuple[Cache, T]]:
    """What those say that have an answer, as `read` makes it of theirs. Who does not answer is told. Raises what all
    said when none has one."""
    found: list[tuple[Cache, T]] = []
    faults: list[KVCoreError] = []
    for cache, said in zip(asked, answers(asked, path, body), strict=True):
        try:
            if isinstance(said, KVCoreError):
                raise said
            with understood(cache):
                found.append((cache, read(said)))
        except (NoAnswer, Refusal) as fault:
            faults.append(fault)
    if not found:
        raise ConfigError("\n".join(map(str, faults)))
    for left_out in faults:
        if not (isinstance(left_out, Refusal) and left_out.status in NOT_HERE):
            error(f"{left_out}; left out")
    return found


@contextmanager
def understood(cache: Cache) -> Iterator[None]:
    """Raises `Refusal` where an answer is not what a kvcore says."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as fault:
        what = f"its answer is not understood ({type(fault).__name__}): it is no kvcore, or one of another release"
        raise Refusal(f"{cache.label}: {what}", 0) from fault


def query(path: str, **values: str) -> str:
    """A path with these values behind it."""
    return f"{path}?{urlencode(values, errors='replace')}"
