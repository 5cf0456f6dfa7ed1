"""Make `kvcore/testing/data/kv_sample.bin.xz`, the real KV that the compression benchmarks and tests use.

    python examples/models/smollm2.py /tmp/smollm2
    python benchmarks/make_kv_sample.py /tmp/smollm2

The text is the Apache licence of this repository, the model SmolLM2-135M-Instruct (Apache-2.0). Another torch build may
differ in the last bits, so the file is kept, not made again.
`--all FILE` writes every full chunk of the text to FILE instead, uncompressed.
"""

import argparse
import lzma
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcore.testing.sample import LAYOUT, SAMPLE

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "core/src/kvcore/testing/data"
BLOCK_TOKENS = 128
CHUNK = 8  # tokens 1024 to 1151: the middle of the text, far from the first tokens, which look different


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the KV sample.")
    parser.add_argument("model", help="the model directory that examples/models/smollm2.py made")
    parser.add_argument("--all", type=Path, help="write all chunks of the text, as they are, to this file instead")
    args = parser.parse_args()
    objects = chunks(args.model, (ROOT / "LICENSE").read_text())
    if args.all:
        args.all.write_bytes(b"".join(objects))
        print(f"{len(objects)} objects of {LAYOUT.nbytes} bytes in {args.all}")
        return
    packed = lzma.compress(objects[CHUNK], preset=9)
    DATA.mkdir(exist_ok=True)
    (DATA / SAMPLE).write_bytes(packed)
    print(f"{len(objects[CHUNK])} bytes, {len(packed)} compressed, in {DATA / SAMPLE}")


def chunks(model_dir: str, text: str) -> list[bytes]:
    """The KV of `text` in bfloat16, one object per full block of tokens, as vLLM's CPU backend lays it out."""
    ids = AutoTokenizer.from_pretrained(model_dir)(text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    objects = []
    for first in range(0, ids.shape[1] - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        blocks = []
        for layer in layers:
            keys, values = (t[0, :, first : first + BLOCK_TOKENS] for t in (layer.keys, layer.values))
            packed = torch.stack([keys.transpose(1, 2).flatten(1), values.flatten(1)], dim=1)  # head, K or V, elements
            blocks.append(packed.contiguous().view(torch.uint8).numpy().tobytes())
        objects.append(b"".join(blocks))
        assert len(objects[-1]) == LAYOUT.nbytes
    return objects


if __name__ == "__main__":
    main()
