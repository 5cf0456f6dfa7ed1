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

from kvcore.api.errors import ConfigError
from kvcore.cli.kit.output import error
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
    asks = partial(ask, path=path, body=body)
    if len(asked) == 1:
        return [_said(asks, asked[0])]
    came = _side_by_side(asked, asks)
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
    return [found[n] if n in found else NoAnswer(f"{cache.label} {late}", late=True) for n, cache in enumerate(asked)]


def each(asked: Sequence[Cache], work: Callable[[Cache], T]) -> Iterator[tuple[Cache, T | NoAnswer | Refusal]]:
    """What becomes of `work` with each of them, all side by side, as it comes."""
    came = _side_by_side(asked, work)
    for _ in asked:
        n, said = came.get()
        if isinstance(said, Exception) and not isinstance(said, (NoAnswer, Refusal)):
            raise said
        yield asked[n], said


def _side_by_side(asked: Sequence[Cache], work: Callable[[Cache], Any]) -> "SimpleQueue[tuple[int, Any]]":
    """What comes of each, with its index."""
    came: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    for n, cache in enumerate(asked):
        put = partial(_put, came, n, work, cache)
        threading.Thread(target=put, name="kvcore-ask", daemon=True).start()  # nobody joins one that hangs
    return came


def _put(came: "SimpleQueue[tuple[int, Any]]", n: int, work: Callable[[Cache], Any], cache: Cache) -> None:
    came.put((n, _said(work, cache)))


def _said(work: Callable[[Cache], Any], cache: Cache) -> Any:
    try:
        return work(cache)
    except Exception as fault:  # raised where it is waited for
        return fault


def without(fault: NoAnswer | Refusal, *, changes: bool) -> str:
    """That a cache is left out. `changes`: it was asked to do something."""
    return f"{fault}; left out{_begun(fault) if changes else ''}"


def _begun(fault: NoAnswer | Refusal) -> str:
    return ". What it may have begun it does all the same" if isinstance(fault, NoAnswer) and fault.late else ""


def first_answers(
    asked: Sequence[Cache],
    path: str,
    body: Any = None,
    read: Callable[[Any], T] = lambda said: said,
    *,
    changes: bool = False,
) -> list[tuple[Cache, T]]:
    """What those say that have an answer, as `read` makes it of theirs. Who does not answer is told. `changes`: they
    are asked to do something. Raises what all said when none has one."""
    found: list[tuple[Cache, T]] = []
    faults: list[NoAnswer | Refusal] = []
    for cache, said in zip(asked, answers(asked, path, body), strict=True):
        try:
            if isinstance(said, Exception):
                raise said
            with understood(cache):
                found.append((cache, read(said)))
        except (NoAnswer, Refusal) as fault:
            faults.append(fault)
    if not found:
        raise ConfigError("\n".join(f"{fault}{_begun(fault) if changes else ''}" for fault in faults))
    for left_out in faults:
        if not elsewhere(left_out):
            error(without(left_out, changes=changes))
    return found


def elsewhere(fault: NoAnswer | Refusal) -> bool:
    """Whether a cache says that another one has to answer this."""
    return isinstance(fault, Refusal) and fault.status in NOT_HERE


@contextmanager
def understood(cache: Cache) -> Iterator[None]:
    """Raises `Refusal` where an answer is not what a kvcore says."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as fault:
        what = f"its answer is not understood ({type(fault).__name__}): it is no kvcore, or one of another release"
        raise Refusal(f"{cache.label}: {what}", 0) from fault


def query(path: str, **values: str) -> str:
    """A path with these values behind it."""
    return f"{path}?{urlencode(values, errors='replace')}"
