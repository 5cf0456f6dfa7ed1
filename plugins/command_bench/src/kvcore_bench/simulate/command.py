"""Arguments, and what is run in which order."""

import argparse

from kvcore.cli.kit.arguments import positive, svg_file, token_bytes
from kvcore.cli.kit.output import error, write_file
from kvcore.plugins import registry_from_env
from kvcore_bench.simulate import show
from kvcore_bench.simulate.capacity import capacities
from kvcore_bench.simulate.policies import chosen, installed
from kvcore_bench.simulate.simulation import simulate
from kvcore_bench.simulate.svg import svg
from kvcore_bench.simulate.trace import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvcore simulate`."""
    parser.add_argument(
        "trace", metavar="TRACE", help="JSON lines in Mooncake's or Bailian's format, gzipped or not; - reads stdin"
    )
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        action="append",
        help="a policy: lru, name:option=value, or its YAML form; may be given several times (default: all installed)",
    )
    parser.add_argument(
        "--capacity",
        metavar="LIST",
        help="capacities with commas between: 4GiB, 10%%, 2000000tokens, 4096blocks (default: the working set, and "
        "half of it seven times)",
    )
    parser.add_argument(
        "--bytes-per-token",
        metavar="SIZE",
        type=token_bytes,
        help="KV of one token, such as 128KiB, for sizes in bytes (default: what a trace of `kvcore record` says)",
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        type=positive,
        help="tokens per block of the trace (default: the format's, 512 for Mooncake and 16 for Bailian)",
    )
    parser.add_argument("--requests", metavar="N", type=positive, help="only the first N requests")
    parser.add_argument("--plot", metavar="FILE.svg", type=svg_file, help="write the plot to a file, too")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Simulate and show. Status 1 when a policy did not keep its contract."""
    registry = registry_from_env()
    candidates = chosen(registry, args.policy) if args.policy else installed(registry)
    trace = read_trace(args.trace, block_tokens=args.block_tokens, limit=args.requests)
    if trace.unlike:
        error(show.unlike(trace))
    result = simulate(trace, capacities(args.capacity, trace, args.bytes_per_token or trace.token_bytes), candidates)
    if args.plot:
        write_file(args.plot, svg(result))
    if args.json:
        show.as_json(result)
    else:
        show.as_text(result)
    for fault in result.faults:
        error(fault)
    return 1 if result.faults else 0
