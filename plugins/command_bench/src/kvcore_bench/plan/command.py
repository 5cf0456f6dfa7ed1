"""The command line of `kvcore plan`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcore.api import ConfigError
from kvcore.cli.kit.configured import add_set, flags
from kvcore.cli.kit.hub import cached, why_not
from kvcore.cli.kit.output import print_json
from kvcore_bench.plan import costs, speeds
from kvcore_bench.plan.advice import advise
from kvcore_bench.plan.costs import Prefill, Store
from kvcore_bench.plan.model import Model, read_model
from kvcore_bench.plan.report import Plan, print_plan

MAX_FILE_BYTES = 16 << 20
MIN_OBJECT_BYTES = 1 << 20
"""kvcore's default `min_object_size`."""
USUAL_TOKENS = 32768
"""Settings are for prompts up to this length, where the model takes longer ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore plan`."""
    parser.usage = "kvcore plan (MODEL | --model MODEL) [OPTIONS]"
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("file", metavar="MODEL", nargs="?", help="a model's config.json, or the folder it lies in")
    model.add_argument("--model", metavar="MODEL", help="the same, as other commands take it")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--dtype", default="auto", help="of the KV: bf16, fp16, fp32 or fp8 (default: the model's)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="the engine's, in tokens (default: 16)")
    tiers = parser.add_argument_group("tiers")
    tiers.add_argument(
        "--tier", action="append", default=[], metavar="NAME=GB/s,LATENCY",
        help="a tier's bandwidth and latency, such as disk=2.5,100us; repeatable",
    )  # fmt: skip
    tiers.add_argument("--config", metavar="FILE", help="a YAML file whose tiers are measured, but those of --tier")
    add_set(tiers)  # type: ignore[arg-type]
    prefill = parser.add_argument_group("the engine: one of")
    one = prefill.add_mutually_exclusive_group()
    one.add_argument("--prefill", metavar="TOKENS/s", help="its measured prefill speed, such as 12k")
    one.add_argument("--flops", metavar="FLOP/s", help="the peak of one device, such as 989T")
    one.add_argument("--gpu", metavar="NAME", help=f"a device whose peak is known: {', '.join(speeds.GPUS)}")
    prefill.add_argument(
        "--mfu", type=float, default=0.5, help="the share of the peak that prefill reaches (default: 0.5)"
    )
    parser.add_argument("--tokens", metavar="N", help="of the working set: how large must a tier be? such as 50M")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Reckon and print. JSON: {model, kv, prefill, tiers, working_set, settings, reasons, notes}, sizes in bytes and
    times in seconds. Status 1 when a tier could not be measured. Raises `ConfigError` for what it cannot use."""
    if args.block_size < 1:
        raise ConfigError(f"--block-size {args.block_size}: write the engine's number of tokens in a block, such as 16")
    model = read_model(_read(args.file if args.model is None else args.model), args.dtype)
    tokens = None if args.tokens is None else round(speeds.parse_number("--tokens", args.tokens, "tokens"))
    prefill, how = _prefill(args, model)
    known = _stated(args.tier)
    missing = 0
    if args.config is None:
        if args.set:
            raise ConfigError("--set changes what --config reads: give --config FILE, too")
        min_object_bytes = MIN_OBJECT_BYTES
        kv = costs.weigh(model, args.tp, args.block_size, "auto", min_object_bytes)
        stores = list(known.values())
    else:
        from kvcore.cli.kit.opened import read_config
        from kvcore_bench.plan.measured import measure

        source = read_config(args.config, flags(args))
        config = source.config
        min_object_bytes = int(config.min_object_size)
        kv = costs.weigh(model, args.tp, args.block_size, config.chunk_tokens, min_object_bytes)
        unknown = [t for t in config.l2 if t.name not in known]
        found = {s.name: s for s in measure(source, unknown, max(g.object_bytes for g in kv.groups))}
        missing = len(unknown) - len(found)
        in_order = [s for t in config.l2 if (s := found.get(t.name) or known.pop(t.name, None))]
        stores = [*in_order, *known.values()]
    lengths = {s.name: costs.break_even(kv, prefill, s, model.max_tokens) if prefill else None for s in stores}
    advice = advise(
        kv,
        [(s, lengths[s.name] if prefill else 0) for s in stores],
        min(model.max_tokens, USUAL_TOKENS),
        tokens,
        min_object_bytes,
        configured=args.config is not None,
    )
    plan = Plan(model, kv, stores, prefill, how, lengths, tokens, advice)
    if args.json:
        print_json(plan.as_json())
    else:
        print_plan(plan)
    return 1 if missing else 0


def _stated(texts: Sequence[str]) -> dict[str, Store]:
    """The tiers of `--tier`, by name."""
    found: dict[str, Store] = {}
    for text in texts:
        store = speeds.parse_store(text)
        if store.name in found:
            raise ConfigError(f"--tier {store.name} is given twice: once is enough")
        found[store.name] = store
    return found


def _prefill(args: argparse.Namespace, model: Model) -> tuple[Prefill | None, str]:
    """Seconds for a prompt, and what they are from."""
    if args.prefill is not None:
        speed = speeds.parse_number("--prefill", args.prefill, "tokens/s")
        return costs.at_speed(speed), f"{speed:,.0f} tokens/s, as stated"
    if args.flops is None and args.gpu is None:
        return None, ""
    if not 0 < args.mfu <= 1:
        raise ConfigError(f"--mfu {args.mfu:g}: write a share above 0 and at most 1, such as 0.5")
    peak = speeds.parse_gpu(args.gpu) if args.gpu is not None else speeds.parse_number("--flops", args.flops, "FLOP/s")
    what = f"{args.tp} x {peak / 1e12:g} TFLOP/s, {args.mfu:.0%} used"
    return costs.by_flops(
        model, peak * args.tp * args.mfu
    ), f"estimated from {model.parameters / 1e9:.3g}G parameters, {what}"


def _read(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    if file.is_dir():
        file /= "config.json"
    elif not file.exists() and (of_hub := cached(path, "config.json")) is not None:
        file = of_hub
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"MODEL {path}: {file} is not there, and {why_not('model')}: give its config.json, or the folder of it"
        ) from None
    except OSError as e:
        raise ConfigError(f"MODEL {path}: {file} cannot be read: {e.strerror}") from None
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        config = json.loads(data)
        if not isinstance(config, dict):
            raise ValueError("it holds no mapping")
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"MODEL {path}: {file} is no config.json: {e}") from None
    return config
