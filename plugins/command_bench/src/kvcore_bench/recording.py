"""`kvcore record`: the lookups of running caches as a trace, which tells no more than what they have in common.

Hashes are hashed again, with a key that nobody has: it is made for the recording and thrown away. So a trace cannot be
compared with prompts, nor with another trace.
"""

import argparse
import hashlib
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TextIO

from kvcore.api.errors import ConfigError, KVCoreError
from kvcore.cli.kit import arguments, asking
from kvcore.cli.kit.output import error, print_json
from kvcore.cli.kit.progress import Progress
from kvcore_bench.trace_file import TraceFile

if TYPE_CHECKING:
    from kvcore.service.inspect import Cache

EVERY_S = 1.0
PATIENCE_S = 0.5
"""So long a round waits for answers: a cache that closes is to be read in time, whoever else hangs."""
SILENT = (TimeoutError, BlockingIOError)
"""Why one has not answered that may do so later."""
PAGE = 1000
ID_BYTES = 7
"""Of a block's name in a trace: two of 10 million blocks have the same with a probability of 0.1 %."""
Entry = tuple[float, bool, Mapping[str, Any]]
"""When a request was, whether its hashes begin at its front, and the request."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore record`."""
    parser.add_argument("out", metavar="OUT", help="the trace to write, packed when it ends with .gz; - is stdout")
    parser.add_argument(
        "--seconds", metavar="N", type=arguments.seconds, help="end after so long (default: with Ctrl-C)"
    )
    parser.add_argument("--past", action="store_true", help="begin with the requests that are on record already")
    parser.add_argument("--json", action="store_true", help="what was recorded, as JSON on stdout")
    asking.add_caches(parser)


def run(args: argparse.Namespace) -> int:
    """Record until it is time. Status 1 when nothing was recorded."""
    if args.json and args.out == "-":
        raise ConfigError("--json and the trace cannot both go to stdout: write the trace to a file")
    sources = entrances(asking.chosen(args), all_of_them=bool(args.cache or args.url))
    with ExitStack() as stack:
        recording = Recording(_opened(args.out, stack))
        followed = [Followed(cache, kind, past=args.past) for cache, kind in sources]
        progress = stack.enter_context(Progress("recording", None, "requests"))
        begun = time.monotonic()
        over = _end_of_signals(stack)
        rounds = Rounds(followed)
        while True:
            next_at = time.monotonic() + EVERY_S
            if args.seconds is not None:
                next_at = min(next_at, begun + args.seconds)
            ending = over.is_set() or (args.seconds is not None and time.monotonic() - begun >= args.seconds)
            progress.add(_write(recording, rounds.read(goes_on=not ending)))
            if ending or rounds.over:
                break
            over.wait(max(0.0, next_at - time.monotonic()))
    return _tell(args, recording, followed, time.monotonic() - begun)


class Recording:
    """A trace that is being written.

    Attributes:
        requests, tokens: recorded so far.
        other_size: requests left out, because their chunks are longer or shorter than those of the first one.
        headless: requests left out, because it is not known what is before their first hash.
    """

    def __init__(self, out: TextIO | TraceFile) -> None:
        self._out = out
        self._key = secrets.token_bytes(32)
        self._began: float | None = None
        self._before: dict[int, int] = {}
        self.block_tokens = 0
        self.requests = self.tokens = self.other_size = self.headless = 0

    def add(self, request: Mapping[str, Any], at: float, *, headed: bool = True) -> None:
        """One request, as of `/requests?hashes=1`. `at`: seconds since 1970. `headed`: its hashes begin at its front;
        else the front, which an engine held itself, is put before them from what was asked for earlier."""
        self.block_tokens = self.block_tokens or request["chunk_tokens"]
        if request["chunk_tokens"] != self.block_tokens:
            self.other_size += 1
            return
        blocks = [self._name(request["namespace"], chunk_hash) for chunk_hash in request["hashes"]]
        if not headed:
            head = self._head(blocks, request["begin"])
            if head is None:
                self.headless += 1
                return
            self._before.update(zip(blocks[1:], blocks, strict=False))
            blocks = head + blocks
        if self._began is None:
            self._began = at
        tokens = request["tokens"] or len(blocks) * self.block_tokens
        line = {
            "timestamp": round(max(0.0, at - self._began) * 1e3),
            "input_length": tokens,
            "hash_ids": blocks,
            "block_tokens": self.block_tokens,
        }
        if request.get("token_bytes"):  # a cache of another release does not say it
            line["token_bytes"] = request["token_bytes"]
        self._out.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.requests += 1
        self.tokens += tokens

    def flush(self) -> None:
        """Let what was recorded arrive."""
        self._out.flush()

    def _name(self, namespace: str, chunk_hash: str) -> int:
        data = bytes.fromhex(namespace) + bytes.fromhex(chunk_hash)
        return int.from_bytes(hashlib.blake2b(data, digest_size=ID_BYTES, key=self._key).digest(), "big")

    def _head(self, blocks: Sequence[int], count: int) -> list[int] | None:
        """The `count` blocks before these; None when they are not known."""
        if count and not blocks:
            return None
        head: list[int] = []
        for _ in range(count):
            before = self._before.get(head[-1] if head else blocks[0])
            if before is None:
                return None
            head.append(before)
        return head[::-1]


class Followed:
    """One cache whose requests are recorded.

    Attributes:
        missed: requests that it had forgotten before they could be read.
        gone: why it cannot be asked any more.
        silent_since: when it was asked (monotonic) what it has not answered in time; None: it answers.
        silent_s: for how many seconds it did not answer, in all, before it did again.
    """

    def __init__(self, cache: "Cache", kind: str, *, past: bool) -> None:
        from kvcore.service.inspect import ask

        self.cache = cache
        self.headed = kind != "server"
        self.missed = 0
        self.gone = ""
        self.silent_since: float | None = None
        self.silent_s = 0.0
        known = ask(cache, "/requests?limit=1")
        with asking.understood(cache):
            self._since = int(max(0, known["oldest"] - 1) if past else known["newest"])

    def read(self, goes_on: bool = False) -> list[dict[str, Any]]:
        """What was asked since the last time. `goes_on`: it is read again, also where the cache is being closed."""
        from kvcore.service.inspect import ask

        found: list[dict[str, Any]] = []
        follow = "&follow=1" if goes_on else ""
        while not self.gone:
            asked_at = time.monotonic()
            try:
                page = ask(self.cache, f"/requests?hashes=1&limit={PAGE}&since={self._since}{follow}")
                with asking.understood(self.cache):
                    some = page["requests"]
                    if some:
                        self.missed += some[0]["seq"] - self._since - 1
                        self._since = some[-1]["seq"]
            except KVCoreError as e:
                if not isinstance(e.__cause__, SILENT):
                    self.gone = str(e)
                elif self.silent_since is None:
                    self.silent_since = asked_at
                break
            if self.silent_since is not None:
                self.silent_s += time.monotonic() - self.silent_since
                self.silent_since = None
            found += some
            if len(some) < PAGE:
                break
        return found


class Rounds:
    """Reads caches side by side. While one of them hangs, the others are read all the same, and what they say is kept
    until it is known what comes before it, or that one is late: that one is asked on, and waited for no more."""

    def __init__(self, followed: Sequence[Followed]) -> None:
        self._followed = followed
        self._asked: dict[Followed, Future[list[dict[str, Any]]]] = {}
        self._read: list[Entry] = []

    @property
    def over(self) -> bool:
        """Nobody can be read any more."""
        return not self._asked and all(f.gone for f in self._followed)

    def read(self, goes_on: bool) -> "list[Entry]":
        """What is new, in order; nothing while one hangs that is not late yet. `goes_on`: this is not the last time,
        when who hangs is waited for."""
        hung = list(self._asked)
        for one in self._followed:
            if one not in self._asked and not one.gone and (goes_on or one.silent_since is None):
                self._asked[one] = _reading(one, goes_on)
        wait([self._asked[one] for one in self._awaited()], PATIENCE_S if goes_on else None)
        if not goes_on:
            wait(self._asked.values(), PATIENCE_S)
        for one in [one for one, answer in self._asked.items() if answer.done()]:
            self._read += [(_at(r), one.headed, r) for r in self._asked.pop(one).result()]
        if not goes_on and any(one not in self._asked for one in hung):
            return self.read(goes_on)  # who hung was asked before the end
        if self._awaited():
            return []
        read, self._read = sorted(self._read, key=itemgetter(0)), []
        return read

    def _awaited(self) -> list[Followed]:
        return [one for one in self._asked if one.silent_since is None]


def _reading(one: Followed, goes_on: bool) -> "Future[list[dict[str, Any]]]":
    answer: Future[list[dict[str, Any]]] = Future()
    threading.Thread(target=_answer, args=(one, goes_on, answer), name="kvcore-ask", daemon=True).start()
    return answer


def _answer(one: Followed, goes_on: bool, answer: "Future[list[dict[str, Any]]]") -> None:
    try:
        answer.set_result(one.read(goes_on))
    except BaseException as error:  # a bug, which is to be seen where it is waited for
        answer.set_exception(error)


def _at(request: Mapping[str, Any]) -> float:
    from datetime import datetime

    return datetime.fromisoformat(request["at"]).timestamp()


def entrances(caches: "Sequence[Cache]", *, all_of_them: bool) -> "list[tuple[Cache, str]]":
    """Where requests come in, and as what: not the server of engines that are asked themselves, or their requests would
    stand there twice."""

    def read(said: Any) -> tuple[str, str]:
        return str(said["kind"]), str(said["address"])

    status = [(cache, *said) for cache, said in asking.first_answers(caches, "/status", read=read)]
    engines = {one for _, kind, address in status if kind == "client" for one in address.split(", ")}
    return [
        (cache, kind) for cache, kind, address in status if all_of_them or kind != "server" or address not in engines
    ]


def _write(recording: Recording, read: Sequence[Entry]) -> int:
    """How many requests that were."""
    before = recording.requests
    for at, headed, request in read:
        recording.add(request, at, headed=headed)
    recording.flush()
    return recording.requests - before


def _end_of_signals(stack: ExitStack) -> threading.Event:
    """Is set by Ctrl-C and SIGTERM, the usual ends of a recording, which then writes out what it has."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, lambda *_: over.set())
        stack.callback(signal.signal, number, before)
    return over


def _opened(path: str, stack: ExitStack) -> TextIO | TraceFile:
    if path == "-":
        return stack.enter_context(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    try:
        return stack.enter_context(closing(TraceFile(path)))
    except FileExistsError:
        raise ConfigError(f"{path} is there already: give another name, or remove it") from None


def _tell(args: argparse.Namespace, recording: Recording, followed: Sequence[Followed], seconds: float) -> int:
    missed = sum(f.missed for f in followed)
    if args.json:
        print_json(
            {
                "file": args.out, "seconds": round(seconds, 3), "caches": [f.cache.label for f in followed],
                "requests": recording.requests, "tokens": recording.tokens, "block_tokens": recording.block_tokens,
                "missed": missed, "other_size": recording.other_size, "headless": recording.headless,
            }
        )  # fmt: skip
    elif args.out != "-" and recording.requests:
        print(
            f"{args.out}: {recording.requests:,} requests of {recording.tokens:,} tokens, in blocks of "
            f"{recording.block_tokens}, from {', '.join(f.cache.label for f in followed)} in {seconds:.0f} s"
        )
    left_out = {
        "were forgotten by the cache before they could be read: raise `inspect.requests`": missed,
        "have chunks of another size than the first, and were left out: record one model": recording.other_size,
        "begin with what their engine held itself and asked for before the recording: they were left out": (
            recording.headless
        ),
    }
    for what, number in left_out.items():
        if number:
            error(f"{number:,} requests {what}")
    for f in followed:
        if f.silent_s:
            error(
                f"{f.cache.label} did not answer for {f.silent_s:.0f} s: what it still had of that time is recorded, "
                "behind what others were asked meanwhile"
            )
        if f.silent_since is not None:
            error(
                f"{f.cache.label} has not answered for {time.monotonic() - f.silent_since:.0f} s: see what its process "
                "is doing; what it was asked since is not recorded"
            )
        if f.gone:
            error(f.gone)
    if not recording.requests:
        error("nothing was recorded, and there is no trace: no request with a name came in, or none at all")
    return 0 if recording.requests else 1
