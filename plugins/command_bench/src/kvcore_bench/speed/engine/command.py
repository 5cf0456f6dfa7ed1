"""The command line of `kvcore bench engine`."""

import argparse
import os
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kvcore.api.errors import ConfigError
from kvcore.cli.kit.arguments import duration, positive, rate, size, svg_file
from kvcore.cli.kit.configured import add_set, flags
from kvcore.cli.kit.output import print_json, write_file
from kvcore_bench.speed import machine
from kvcore_bench.speed.engine.ending import Ending
from kvcore_bench.speed.engine.measuring import Settings, measure
from kvcore_bench.speed.engine.show import show
from kvcore_bench.speed.engine.subjects import Subject, Vllm, given
from kvcore_bench.speed.engine.svg import svg
from kvcore_bench.speed.engine.workloads import WORKLOADS, Workload

WAYS = ("plain", "kvcore")
_HELP = {
    "documents": "how many documents",
    "length": "tokens of a document, or of a shared beginning",
    "questions": "questions about a document after the first",
    "question": "tokens of a question, or of what follows a shared beginning",
    "output": "tokens of an answer, at most",
    "inflight": "requests at once, at most",
    "order": "of the requests after the first round",
    "users": "how many users",
    "turns": "questions of each user",
    "system": "tokens of the beginning that all users share",
    "history": "tokens that each user begins with",
    "qps": "questions a second, of all users together",
    "prefixes": "how many beginnings",
    "requests": "requests for each beginning",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore bench engine WORKLOAD`."""
    workloads = parser.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    for kind in WORKLOADS:
        child = workloads.add_parser(kind.name, help=kind.help, description=kind.help, allow_abbrev=False)
        child.usage = f"kvcore bench engine {kind.name} (--url URL | --vllm MODEL) [OPTIONS] [-- WORDS OF VLLM SERVE]"
        child.set_defaults(words_follow=True, make=kind)
        _add_servers(child)
        _add_sizes(child, kind)
        _add_output(child)


def run(args: argparse.Namespace) -> int:
    """Measure and print. JSON: {machine, workload, seed, tokens_per_word, subjects: [{name, command, phases: {first,
    again}, all, cost, behind_share, counters, requests}]}. Status 1 when a request failed. Raises `ConfigError` and
    `EngineError`."""
    settings = Settings(
        workload=_workload(args),
        seed=args.seed or secrets.token_hex(4),
        turns=args.repeat,
        settle_s=args.settle,
        timeout_s=args.timeout,
        model=args.model,
        key=os.environ.get("OPENAI_API_KEY", ""),
        chat=args.api == "chat",
        more={"ignore_eos": True} if args.ignore_eos or args.vllm else {},
        say=_say,
    )
    _check(args)
    with tempfile.TemporaryDirectory(prefix="kvb") if not args.logs else nullcontext(args.logs) as logs:
        Path(logs).mkdir(parents=True, exist_ok=True)
        ending = Ending()
        subjects = _subjects(args, Path(logs).absolute(), ending)
        described = machine.describe(Path(logs), None)
        begun = time.monotonic()
        with ending:
            outcome = measure(subjects, settings)
    described["seconds"] = round(time.monotonic() - begun, 1)
    if args.plot:
        write_file(args.plot, svg(outcome))
    if args.json:
        print_json({"machine": described, **outcome.as_json()})
    else:
        print(", ".join(f"{key} {value}" for key, value in described.items() if value is not None))
        show(outcome)
    return 1 if any(result.numbers().failed for result in outcome.results) else 0


def _add_servers(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--url", action="append", default=[], metavar="[NAME=]URL",
        help="an OpenAI-compatible server that runs already; may be given several times",
    )  # fmt: skip
    servers.add_argument("--vllm", metavar="MODEL", help="start vLLM with this model instead, once for each --with")
    servers.add_argument(
        "--with", dest="ways", action="append", default=[], metavar="WAY",
        help="plain, kvcore, offloading (vLLM's own), lmcache, or NAME='more words of vLLM'; may be given several "
        f"times (default: {' and '.join(WAYS)})",
    )  # fmt: skip
    servers.add_argument("--memory", type=size, default="4GiB", metavar="SIZE", help="host memory of each cache (4GiB)")
    servers.add_argument("--config", metavar="FILE", help="kvcore's YAML file")
    add_set(parser)
    servers.add_argument(
        "--lmcache", type=shlex.split, default="lmcache", metavar="COMMAND",
        help="LMCache's command, and more words of its server: 'lmcache --chunk-size 128'",
    )  # fmt: skip
    servers.add_argument("--logs", metavar="DIR", help="keep the logs of what is started here")
    servers.add_argument("--ready", type=duration, default="15min", metavar="TIME", help="for a start (15min)")


def _add_sizes(parser: argparse.ArgumentParser, kind: type[Workload]) -> None:
    sizes = parser.add_argument_group("workload")
    for each in fields(kind):
        assert each.default is not MISSING
        default: Any = each.default
        if each.name == "order":
            kinds: dict[str, Any] = {"choices": ("random", "tile")}
        else:
            kinds = {"type": rate if isinstance(default, float) else positive, "metavar": "N"}
        text = f"{_HELP[each.name]} ({default})"
        sizes.add_argument(f"--{each.name}", default=default, help=text, **kinds)
    sizes.add_argument(
        "--repeat", type=positive, default=1, metavar="N", help="all of it, so many times, servers in turn"
    )
    sizes.add_argument("--settle", type=duration, default="0s", metavar="TIME", help="wait before a next round (0s)")
    sizes.add_argument("--seed", metavar="TEXT", help="of the texts (default: a new one, so that nothing is found)")
    sizes.add_argument("--model", metavar="NAME", help="the model's name (default: the first that the server names)")
    sizes.add_argument("--api", choices=("chat", "completions"), default="chat", help="what is asked by (chat)")
    sizes.add_argument(
        "--ignore-eos", action="store_true", help="full answers, where the server can; always with --vllm"
    )
    sizes.add_argument("--timeout", type=duration, default="10min", metavar="TIME", help="of a whole request (10min)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE.svg", type=svg_file, help="draw how TTFT and ITL are spread")
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="JSON on stdout")


def _workload(args: argparse.Namespace) -> Workload:
    kind: type[Workload] = args.make
    return kind(**{each.name: getattr(args, each.name) for each in fields(kind)})


def _check(args: argparse.Namespace) -> None:
    if args.only or args.path or args.peer or args.peer_scripts or args.quick:
        raise ConfigError("bench engine: --quick, --only, --path and --peer belong to `kvcore bench` without engine")
    if bool(args.url) == bool(args.vllm):
        raise ConfigError("bench engine: give --url of a server that runs, or --vllm MODEL to start vLLM")
    if args.url and (args.ways or args.words or args.config or args.set or args.logs):
        raise ConfigError("bench engine: --with, --config, --set, --logs and words behind `--` belong to --vllm")
    if "lmcache" in args.ways and shutil.which(args.lmcache[0] if args.lmcache else "") is None:
        command = shlex.join(args.lmcache)
        raise ConfigError(f"--with lmcache: no command {command!r} is here: install it, or name it with --lmcache")


def _subjects(args: argparse.Namespace, logs: Path, ending: Ending) -> list[Subject]:
    if args.url:
        return given(args.url)
    vllm = Vllm(
        args.vllm,
        args.words,
        args.memory,
        logs,
        args.ready,
        _say,
        ending.check,
        args.config,
        flags(args),
        tuple(args.lmcache),
    )
    return vllm.ways(args.ways or WAYS)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
