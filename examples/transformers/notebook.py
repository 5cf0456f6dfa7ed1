"""A long document, several questions, one model: with transformers alone, and with kvcore. Run it twice.

    python examples/models/smollm2.py build/models/smollm2-f32 --dtype float32
    python examples/transformers/notebook.py --model build/models/smollm2-f32

Cells begin with `# %%`: editors open it as a notebook.
"""

# %% A model, as in any notebook
import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcore_transformers import PrefixCache  # the first of three lines

parser = argparse.ArgumentParser(description="A long document, several questions, with and without kvcore.")
parser.add_argument("--model", default="build/models/smollm2-f32")
parser.add_argument("--config", default=str(Path(__file__).with_name("kvcore.yaml")))
parser.add_argument("--tokens", type=int, default=2000, help="length of the document")
options = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(options.model).eval()
tokenizer = AutoTokenizer.from_pretrained(options.model)

# %% A document that every question is about
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
document = tokenizer(TEXT * (1 + options.tokens // 2000), return_tensors="pt").input_ids[:, : options.tokens]
questions = ("Who may use the work?", "What must a copy contain?", "Is there a warranty?")


def prompt(question: str) -> dict[str, torch.Tensor]:
    ids = torch.cat([document, tokenizer(f"\n\n{question}\n", return_tensors="pt").input_ids], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# %% The other two lines
cache = PrefixCache(model, options.config)
cache.generate(**prompt(questions[0]), max_new_tokens=1, do_sample=False)
print(f"document: {cache.last.reused_tokens} of {cache.last.prompt_tokens} tokens were there from an earlier run")

# %% Time to the first token, and the same answers
print(f"{'question':28}{'transformers':>14}{'kvcore':>10}{'reused':>10}  answers")
for question in questions:
    times = []
    for generate in (model.generate, cache.generate):
        began = time.perf_counter()
        generate(**prompt(question), max_new_tokens=1, do_sample=False)
        times.append(time.perf_counter() - began)
    reused = cache.last.reused_tokens
    answers = [g(**prompt(question), max_new_tokens=12, do_sample=False) for g in (model.generate, cache.generate)]
    same = "the same" if torch.equal(*answers) else "DIFFERENT"
    print(f"{question:28}{times[0]:>12.2f} s{times[1]:>8.2f} s{reused:>10}  {same}")

# %% What the cache holds is written out
print(f"{cache.drain(60)} objects not yet on disk")
cache.close()
