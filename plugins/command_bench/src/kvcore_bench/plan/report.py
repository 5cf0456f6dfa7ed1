"""A plan for people and for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.api.units import format_size
from kvcore.cli.kit.output import paint, table
from kvcore_bench.plan.advice import Advice, as_yaml
from kvcore_bench.plan.costs import Kv, Prefill, Store, lengths
from kvcore_bench.plan.model import Model


@dataclass(frozen=True, slots=True)
class Plan:
    """All that was reckoned.

    Args:
        how: what `prefill` is from.
        break_even: tier -> tokens, or None where computing is always faster, or nothing is known of it.
        tokens: of the working set, where it was said.
    """

    model: Model
    kv: Kv
    stores: Sequence[Store]
    prefill: Prefill | None
    how: str
    break_even: Mapping[str, int | None]
    tokens: int | None
    advice: Advice

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes, times in seconds."""
        model, kv = self.model, self.kv
        shown = lengths(model.max_tokens)
        return {
            "model": {
                "attention": model.attention,
                "layers": model.depth,
                "dtype": model.dtype,
                "max_tokens": model.max_tokens,
                "active_parameters": model.parameters,
            },
            "kv": {
                "token_bytes": kv.token_bytes,
                "token_bytes_once": kv.once_bytes,
                "chunk_tokens": kv.chunk_tokens,
                "chunk_bytes": kv.stored_bytes(kv.chunk_tokens),
                "groups": [
                    {
                        "layers": g.layers,
                        "window": g.window,
                        "token_bytes": g.token_bytes,
                        "object_bytes": g.object_bytes,
                    }
                    for g in kv.groups
                ],
            },
            "prefill": None
            if self.prefill is None
            else {"from": self.how, "seconds": {str(n): self.prefill(n) for n in shown}},
            "tiers": [
                {
                    "name": s.name,
                    "bytes_per_second": s.bytes_per_s,
                    "latency_seconds": s.latency_s,
                    "load_seconds": {str(n): kv.load_seconds(n, s) for n in shown},
                    "break_even_tokens": self.break_even[s.name],
                }
                for s in self.stores
            ],
            "working_set": None
            if self.tokens is None
            else {"tokens": self.tokens, "bytes": kv.stored_bytes(self.tokens)},
            "settings": self.advice.settings,
            "reasons": self.advice.reasons,
            "notes": list(model.notes),
        }


def print_plan(plan: Plan) -> None:
    """Tables, and then what to write."""
    _print_kv(plan)
    print()
    _print_times(plan)
    if plan.tokens is not None:
        size = format_size(plan.kv.stored_bytes(plan.tokens))
        print(f"\nA working set of {plan.tokens:,} tokens takes {size}.")
    print(f"\n{paint('kvcore.yaml', 'bold')}\n\n{as_yaml(plan.advice)}", end="")
    for note in plan.model.notes:
        print(f"{paint('note:', 'note')} {note}")


def _print_kv(plan: Plan) -> None:
    model, kv = plan.model, plan.kv
    blocks = f"; with blocks of {kv.block_tokens} tokens (--block-size)"
    rows = [
        ("attention", f"{model.attention}; {model.depth} layers, {model.dtype}"),
        ("a token", format_size(kv.token_bytes) + _copies(kv)),
        ("a chunk", f"{kv.chunk_tokens} tokens, {format_size(kv.stored_bytes(kv.chunk_tokens))}{blocks}"),
    ]
    kinds: dict[tuple[str, str], int] = {}
    for group in kv.groups:
        window = "all tokens" if group.window is None else f"a window of {group.window} tokens"
        text = (f"{group.layers} layers, {window}", format_size(group.object_bytes))
        kinds[text] = kinds.get(text, 0) + 1
    for (what, size), count in kinds.items():
        rows.append(("an object", f"{size}: {what}" + (f" ({count} such for each chunk)" if count > 1 else "")))
    table(("KV", ""), rows)


def _copies(kv: Kv) -> str:
    if kv.token_bytes == kv.once_bytes:
        return ""
    return f": {kv.ranks} ranks hold {kv.token_bytes / kv.once_bytes:g} times its {format_size(kv.once_bytes)}"


def _print_times(plan: Plan) -> None:
    shown = lengths(plan.model.max_tokens)
    rows = []
    if plan.prefill is not None:
        rows.append(("computing", *(_time(plan.prefill(n)) for n in shown), ""))
    for store in plan.stores:
        length = plan.break_even[store.name]
        pays = "-" if plan.prefill is None else "never" if length is None else f"{length:,} tokens"
        rows.append((store.name, *(_time(plan.kv.load_seconds(n, store)) for n in shown), pays))
    if rows:
        table(("TOKENS", *(f"{n:,}" for n in shown), "PAYS FROM"), rows)
    if plan.prefill is not None:
        print(paint(f"computing: {plan.how}", "dim"))
    for store in plan.stores:
        speed = f"{store.bytes_per_s / 1e9:.3g} GB/s after {_time(store.latency_s)}"
        print(paint(f"{store.name}: {speed}", "dim"))
    if plan.prefill is None:
        print("For the length from which loading pays, say how fast the engine is: --prefill, --gpu or --flops.")
    if not plan.stores:
        print("For load times, say how fast the tiers are: --tier NAME=GB/s,LATENCY, or --config kvcore.yaml.")


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
