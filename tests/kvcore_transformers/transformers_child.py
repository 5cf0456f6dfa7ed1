"""One process that generates with a model from disk: `CONFIG MODEL TOKENS`. Prints one line of JSON."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcore_transformers import PrefixCache

TEXT = "The licence grants each contributor's rights, and says what must stand in every copy. "


def main(config: str, folder: str, count: int) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prefix = tokenizer(TEXT * (count // 8), return_tensors="pt").input_ids[:, :count]
    question = tokenizer("\nWho grants rights, in one sentence?", return_tensors="pt").input_ids
    ids = torch.cat([prefix, question], dim=1)
    with PrefixCache(model, config) as cache:
        began = time.perf_counter()
        out = cache.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        seconds = time.perf_counter() - began
        last = cache.last
        waiting = cache.drain(60)
    answer = {
        "text": tokenizer.decode(out[0, ids.shape[1] :]), "reused": last.reused_tokens, "prompt": last.prompt_tokens,
        "refused": last.refused, "seconds": seconds, "waiting": waiting,
    }  # fmt: skip
    if last.reused_tokens == 0:
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        answer["plain"] = tokenizer.decode(plain[0, ids.shape[1] :])
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
