"""Make the small random models that the tests run under real vLLM, each with a tokenizer of its own.

    python examples/models/tiny.py OUTDIR [NAME...]

`tiny`: Llama, 4 layers of full attention, 2 KV heads (so it splits over two ranks).
`swa`: Gemma 3 text, 6 layers of which two in three see a sliding window of 128 tokens.
`idefics3`: `tiny` behind a vision tower of 2 layers; an image of any size is 225 tokens (15 x 15 patches of 14 pixels)
between three that mark its place.
Float32, a few MB each, the same bytes on every run. Needs torch, pillow and transformers >= 5, nothing from a
model hub.
OUTDIR/NAME appears whole or not at all; what is already there is kept.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
VOCABULARY = 1024
POSITIONS = 8192
IMAGE_WORDS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Tokens of `idefics3` beside the vocabulary, in this order."""
IMAGE_PIXELS = 210
PATCH_PIXELS = 14
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make small random models for tests.")
    parser.add_argument("outdir", type=Path, help="the folder that gets one model directory per name")
    parser.add_argument("names", nargs="*", default=list(MODELS), help=f"some of {', '.join(MODELS)}; default: all")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    disable_progress_bar()
    for name in args.names:
        print(make(args.outdir, name))


def make(outdir: Path, name: str) -> Path:
    """The model directory `outdir`/`name`, made unless it is there."""
    folder = outdir.absolute() / name
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        torch.manual_seed(0)
        MODELS[name]().to(torch.float32).save_pretrained(made)
        INPUTS.get(name, tokenizer)().save_pretrained(made)
        try:
            os.rename(made, folder)
        except OSError:  # another process has made it meanwhile
            if not (folder / "config.json").is_file():
                raise
    return folder


def tiny() -> LlamaForCausalLM:
    return LlamaForCausalLM(llama())


def llama(**changes: Any) -> LlamaConfig:
    # A wider initial range than the default, so that random attention differs visibly from token to token.
    settings = {"num_hidden_layers": 4, "intermediate_size": 704, "tie_word_embeddings": False}
    return LlamaConfig(**{**SHARED, **settings, "initializer_range": 0.06, **changes})


def swa() -> Gemma3ForCausalLM:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHARED,
            num_hidden_layers=6,
            intermediate_size=512,
            query_pre_attn_scalar=32,
            sliding_window=128,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        )
    )


def idefics3() -> Idefics3ForConditionalGeneration:
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_PIXELS,
        "patch_size": PATCH_PIXELS,
        "initializer_range": 0.06,
    }
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config=vision,
            text_config=llama(vocab_size=VOCABULARY + len(IMAGE_WORDS)),
            image_token_id=VOCABULARY,
            pad_token_id=SHARED["pad_token_id"],
            scale_factor=1,
            dtype="float32",
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the licence text: any string can be encoded."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT.read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: ",
    )


def processor() -> Idefics3Processor:
    """What turns text and images into the inputs of `idefics3`."""
    with_images = tokenizer()
    with_images.add_special_tokens({"additional_special_tokens": list(IMAGE_WORDS)})
    edge = {"longest_edge": IMAGE_PIXELS}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    return Idefics3Processor(images, with_images, image_seq_len=(IMAGE_PIXELS // PATCH_PIXELS) ** 2)


MODELS: dict[str, Callable[[], Any]] = {"tiny": tiny, "swa": swa, "idefics3": idefics3}
INPUTS: dict[str, Callable[[], Any]] = {"idefics3": processor}

if __name__ == "__main__":
    main()
