"""Arguments, the engine, and what is told."""

import argparse
import secrets
from contextlib import ExitStack, closing
from statistics import quantiles
from typing import Any

from kvcore.api import format_size
from kvcore.api.errors import ConfigError
from kvcore.cli.kit.arguments import positive, token_bytes
from kvcore.cli.kit.configured import add_file, add_set, flags
from kvcore.cli.kit.output import error, print_json
from kvcore.engine import Engine
from kvcore_bench.replay.replaying import Replay, model
from kvcore_bench.simulate.trace import Trace, read_trace

CONNECT_S = 10.0
DRAIN_S = 30.0
SLACK_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore replay`."""
    parser.add_argument(
        "trace", metavar="TRACE", help="as `kvcore record` writes it, or in a format of `kvcore simulate`"
    )
    add_file(parser, "the cache: a YAML file (default: KVCORE_CONFIG)", word=False)
    parser.add_argument(
        "--bytes-per-token", metavar="SIZE", type=token_bytes,
        help="KV of one token, such as 128KiB: `kvcore plan --model MODEL` says it (default: what a trace of "
        "`kvcore record` says)",
    )  # fmt: skip
    parser.add_argument(
        "--speed", metavar="X", type=_speed, default=1.0,
        help="times as fast as it was recorded; `max`: each as soon as the one before is done (default: 1)",
    )  # fmt: skip
    parser.add_argument("--requests", metavar="N", type=positive, help="only the first N requests")
    parser.add_argument(
        "--block-tokens", metavar="N", type=positive, help="tokens per block, where the trace is silent"
    )
    parser.add_argument(
        "--name", metavar="WORD", help="find what an earlier replay of this name stored (default: nothing)"
    )
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    add_set(parser)


def run(args: argparse.Namespace) -> int:
    """Replay and tell. Status 1 when a block came back with other bytes than were stored."""
    trace = read_trace(args.trace, block_tokens=args.block_tokens, limit=args.requests)
    args.bytes_per_token = args.bytes_per_token or trace.token_bytes
    if args.bytes_per_token is None:
        raise ConfigError(
            f"{trace.name} does not say how large the KV of a token is: --bytes-per-token SIZE, such as 128KiB, which "
            "`kvcore plan --model MODEL` says"
        )
    name = args.name or secrets.token_hex(6)
    with ExitStack() as stack:
        engine = _engine(args, trace.block_tokens, stack)
        space = engine.register(model(name, trace.block_tokens, args.bytes_per_token))
        patience_s = _patience_s(engine) + SLACK_S
        replay = stack.enter_context(closing(Replay(engine, space, trace, name, patience_s)))
        seconds = replay.run(args.speed)
        waiting = engine.drain(DRAIN_S)
        told = _told(args, trace, replay, seconds, waiting, name, space.namespace.hex())
    if args.json:
        print_json(told)
    else:
        _show(told)
    if replay.wrong:
        error(f"{replay.wrong:,} blocks came back with other bytes than were stored: report it")
    return 1 if replay.wrong else 0


def _engine(args: argparse.Namespace, block_tokens: int, stack: ExitStack) -> Engine:
    """The cache, ready. Raises `ConfigError`."""
    from kvcore.service import open_engine
    from kvcore.service.client import RemoteEngine
    from kvcore.service.several import SeveralEngine

    given = {**flags(args), "chunk_tokens": block_tokens, "keys": "engine"}
    engine = stack.enter_context(closing(open_engine(args.config, flags=given, name="replay")))
    if isinstance(engine, SeveralEngine):
        raise ConfigError("server: is a list: a trace is replayed into one cache, so give it one address")
    if isinstance(engine, RemoteEngine) and not engine.wait_ready(CONNECT_S):
        raise ConfigError(f"no server answers at {engine.address}: start it with kvcore serve --config FILE")
    return engine


def _patience_s(engine: Engine) -> float:
    from kvcore.engine import CacheEngine
    from kvcore.service.client import RemoteEngine

    if isinstance(engine, CacheEngine):
        return engine.manager.config.lookup_timeout
    assert isinstance(engine, RemoteEngine)
    return engine.lookup_timeout_s


def _told(
    args: argparse.Namespace, trace: Trace, replay: Replay, seconds: float, waiting: int, name: str, namespace: str
) -> dict[str, Any]:
    tokens = trace.input_tokens
    share = {place: n * trace.block_tokens / tokens for place, n in replay.sources.items()}
    return {
        "trace": trace.name,
        "name": name,
        "namespace": namespace,
        "requests": len(replay.lookups),
        "tokens": tokens,
        "block_tokens": trace.block_tokens,
        "bytes_per_token": args.bytes_per_token,
        "seconds": round(seconds, 3),
        "speed": args.speed,
        "late": len(replay.late),
        "latest_s": round(max(replay.late, default=0.0), 3),
        "hit_rate": replay.hits * trace.block_tokens / tokens,
        "hit_rate_by_place": share,
        "misses": replay.misses,
        "lookup_seconds": _spread(replay.lookups),
        "copied_out": _copied(replay.copied_out),
        "copied_in": _copied(replay.copied_in),
        "stored": replay.stored,
        "not_stored": replay.skipped,
        "waiting": waiting,
        "wrong": replay.wrong,
    }


def _spread(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}


def _copied(total: tuple[int, float]) -> dict[str, float]:
    nbytes, seconds = total
    return {"bytes": nbytes, "bytes_per_second": nbytes / seconds if nbytes and seconds else 0.0}


def _show(told: dict[str, Any]) -> None:
    pace = "as fast as it goes" if told["speed"] is None else f"at {told['speed']:g} times its speed"
    late = f", {told['late']:,} began late, by up to {told['latest_s']:.3g} s" if told["late"] else ""
    print(
        f"{told['trace']}: {told['requests']:,} requests of {told['tokens']:,} tokens in {told['seconds']:.1f} s, "
        f"{pace}{late}"
    )
    places = ", ".join(f"{place} {share:.1%}" for place, share in told["hit_rate_by_place"].items())
    print(f"hit rate    {told['hit_rate']:.1%} of tokens{f': {places}' if places else ''}")
    misses = ", ".join(f"{reason} {n:,}" for reason, n in sorted(told["misses"].items(), key=lambda item: -item[1]))
    print(f"misses      {misses or 'none'}, in blocks of {told['block_tokens']} tokens")
    times = ", ".join(f"{name} {value * 1e3:.3g} ms" for name, value in told["lookup_seconds"].items())
    print(f"lookups     {times}")
    for name, text in (("copied_out", "out of L1 "), ("copied_in", "into L1   ")):
        moved = told[name]
        print(f"{text}  {format_size(moved['bytes'])} at {format_size(moved['bytes_per_second'])}/s")
    skipped = ", ".join(f"{reason} {n:,}" for reason, n in told["not_stored"].items())
    print(f"stored      {told['stored']:,} blocks{f'; not stored: {skipped}' if skipped else ''}")
    if told["waiting"]:
        print(f"waiting     {told['waiting']:,} objects that the tiers had not taken {DRAIN_S:g} s after the end")
    print(
        f"namespace   {told['namespace']}: what tiers keep of it goes with "
        f"`kvcore store rm --namespace {told['namespace'][:8]}`"
    )


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.0 < speed < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no speed: a number above 0, such as 1 or 0.5, or `max`")
    return speed
