"""What kvcore-quant costs in quality: a real model goes on from a prefix whose KV went through the serde.

    python examples/models/smollm2.py /tmp/smollm2
    python benchmarks/quant_quality.py /tmp/smollm2 [--prompts 48] [--json FILE]

Prompts are pieces of this repository's documentation. Each one's first 512 tokens are computed once. Their KV, rounded
to bfloat16 and laid out as vLLM's CPU backend does (chunks of 128 tokens, keys transposed), goes through `encode` and
`decode`; the model then goes on in float32, so that nothing but the KV differs. Against what it says with the KV that
it computed:

logit error   root of the mean square of the difference, in parts of the logits' own deviation, over the next 64 tokens
same token    how often the likeliest token is the same there
perplexity    of these 64 tokens of the text, and by how much it is higher
same answer   of how many prompts the next 32 tokens that the model says are all the same

Two rows are no option of the serde but say what its axes are worth: `int4, KIVI's axes` has scales per channel for keys
and per token for values whatever the KV is like; `int4, all per token` has them per token for keys, too.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvcore.api import Context, ObjectLayout
from kvcore_quant.config import QuantConfig
from kvcore_quant.cuts import Cut, Plan
from kvcore_quant.serde import QuantSerde

ROOT = Path(__file__).resolve().parents[1]
BLOCK, PREFIX, NEXT, ANSWER = 128, 512, 64, 32
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, `[heads, tokens, size]`."""
Through = Callable[[memoryview, ObjectLayout], tuple[bytes, int]]
"""A payload through a serde and back, and its encoded size."""


class Fixed(QuantSerde):
    """Keys with groups at one stride, values at another, whatever the KV is like."""

    def __init__(self, keys: Cut, values: Cut) -> None:
        super().__init__(QuantConfig(format="int4"), Context())
        self._fixed = (keys, values)

    def _plan(self, payload, layout, kind):
        region = BLOCK * self.size
        parts = layout.layer_block_bytes[0] // (kind.width * region)
        table = np.tile(np.array([1, 2], np.uint8), (len(layout.layer_block_bytes), parts // 2))
        return Plan(self._fixed, (region,), (table,))


def variants(size: int) -> dict[str, Through]:
    """Ways for the KV to go, by what the table calls them. `size` is that of a head."""

    def by(serde: QuantSerde) -> Through:
        def through(payload, layout):
            encoded, into = serde.encode(payload, layout), bytearray(layout.nbytes)
            serde.decode(encoded, memoryview(into), layout)
            return bytes(into), len(encoded)

        return through

    Fixed.size = size
    row = Cut(32, 1, 1)
    return {
        "bfloat16": lambda payload, layout: (bytes(payload), layout.nbytes),
        "fp8": by(QuantSerde(QuantConfig(format="fp8"), Context())),
        "int4": by(QuantSerde(QuantConfig(format="int4"), Context())),
        "int4, KIVI's axes": by(Fixed(row, row)),
        "int4, all per token": by(Fixed(Cut(32, 1, BLOCK), row)),
    }


def go(layers: Layers, through: Through) -> tuple[Layers, int]:
    """`layers` through a serde, chunk by chunk, and the encoded size of all."""
    heads, tokens, size = layers[0][0].shape
    layout = ObjectLayout(1, 1, (2 * heads * BLOCK * size * 2,) * len(layers), "bfloat16", 2)
    back = [(torch.empty(heads, tokens, size), torch.empty(heads, tokens, size)) for _ in layers]
    total = 0
    for first in range(0, tokens, BLOCK):
        part = slice(first, first + BLOCK)
        blocks = torch.stack(
            [torch.stack([k[:, part].transpose(1, 2).flatten(1), v[:, part].flatten(1)], dim=1) for k, v in layers]
        )
        payload = blocks.bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
        decoded, nbytes = through(memoryview(payload), layout)
        total += nbytes
        blocks = torch.frombuffer(bytearray(decoded), dtype=torch.bfloat16).float().view(blocks.shape)
        for i, (keys, values) in enumerate(back):
            keys[:, part] = blocks[i, :, 0].view(heads, size, BLOCK).transpose(1, 2)
            values[:, part] = blocks[i, :, 1].view(heads, BLOCK, size)
    return back, total


def logits_and_answers(model, ways: list[Layers], ids: torch.Tensor) -> tuple[torch.Tensor, list[list[int]]]:
    """Of each way's KV the logits that predict the tokens after the prefix, and what the model itself goes on with."""

    def cache() -> DynamicCache:
        rows = DynamicCache()
        for i in range(len(ways[0])):
            rows.update(*(torch.stack([way[i][kind][:, : PREFIX - 1] for way in ways]) for kind in (0, 1)), i)
        return rows

    follows = ids[:, PREFIX - 1 : PREFIX + NEXT - 1].expand(len(ways), -1)
    logits = model(follows, past_key_values=cache()).logits
    token, past, said = follows[:, :1], cache(), []
    for _ in range(ANSWER):
        token = model(token, past_key_values=past).logits[:, -1].argmax(-1, keepdim=True)
        said.append(token[:, 0])
    return logits, torch.stack(said, dim=1).tolist()


def measure(model, prompts: list[torch.Tensor]) -> list[dict]:
    """A row for each variant."""
    config = model.config
    ways = variants(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    sums = {name: {"bytes": 0, "square": 0.0, "same": 0, "loss": 0.0, "answers": 0} for name in ways}
    spread = loss = 0.0
    for number, ids in enumerate(prompts):
        computed = model(ids[:, :PREFIX], use_cache=True).past_key_values.layers
        layers = [(layer.keys[0], layer.values[0]) for layer in computed]
        went = [go(layers, through) for through in ways.values()]
        (logits, *others), (said, *says) = logits_and_answers(model, [layers, *(back for back, _ in went)], ids)
        targets = ids[0, PREFIX : PREFIX + NEXT]
        spread += float(logits.var(dim=-1).mean())
        loss += float(torch.nn.functional.cross_entropy(logits, targets))
        for row, (_, nbytes), other, says_so in zip(sums.values(), went, others, says, strict=True):
            row["bytes"] += nbytes
            row["square"] += float((other - logits).square().mean())
            row["same"] += int((other.argmax(-1) == logits.argmax(-1)).sum())
            row["loss"] += float(torch.nn.functional.cross_entropy(other, targets))
            row["answers"] += says_so == said
        print(f"{number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    n, plain = len(prompts), sums["bfloat16"]["bytes"]
    return [
        {
            "variant": name,
            "ratio": plain / row["bytes"],
            "logit_error": (row["square"] / spread) ** 0.5,
            "same_token": row["same"] / (n * NEXT),
            "perplexity": float(np.exp(row["loss"] / n)),
            "perplexity_computed": float(np.exp(loss / n)),
            "same_answer": row["answers"],
            "prompts": n,
        }
        for name, row in sums.items()
    ]


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        "| KV of the prefix | size of bfloat16's | logit error | same token | perplexity | same answer |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        more = row["perplexity"] / row["perplexity_computed"] - 1
        lines.append(
            f"| {row['variant']} | 1 / {row['ratio']:.2f} | {row['logit_error']:.4f} | {row['same_token']:.1%} "
            f"| {row['perplexity']:.3f} ({more:+.2%}) | {row['same_answer']} of {row['prompts']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of a real model on KV that kvcore-quant has kept.")
    parser.add_argument("model", help="the model directory that examples/models/smollm2.py made")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    args = parser.parse_args()
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids
    step = (ids.shape[1] - PREFIX - NEXT) // args.prompts
    prompts = [ids[:, i * step : i * step + PREFIX + NEXT] for i in range(args.prompts)]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = measure(model, prompts)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
