"""Make the small random models that the tests run under real vLLM, each with a tokenizer of its own.

    python examples/models/tiny.py OUTDIR [NAME...]

`tiny`: Llama, 4 layers of full attention, 2 KV heads (so it splits over two ranks).
`swa`: Gemma 3 text, 6 layers of which two in three see a sliding window of 128 tokens.
`llava`: a CLIP tower of 2 layers before `tiny`; an image of any size is 225 tokens (15 x 15 patches of 14 pixels).
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
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
VOCABULARY = 1024
POSITIONS = 8192
IMAGE_TOKEN = VOCABULARY
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
        os.rename(made, folder)
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


def llava() -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_PIXELS,
        patch_size=PATCH_PIXELS,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=llama(vocab_size=VOCABULARY + 1),
            image_token_index=IMAGE_TOKEN,
            image_seq_length=(IMAGE_PIXELS // PATCH_PIXELS) ** 2,
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


def processor() -> LlavaProcessor:
    """What turns text and images into the inputs of `llava`: the tokenizer has `<image>` beside."""
    pixels = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    with_image = tokenizer()
    with_image.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert with_image.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    return LlavaProcessor(
        CLIPImageProcessorPil(size=pixels, crop_size=pixels),
        with_image,
        patch_size=PATCH_PIXELS,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


MODELS: dict[str, Callable[[], Any]] = {"tiny": tiny, "swa": swa, "llava": llava}
INPUTS: dict[str, Callable[[], Any]] = {"llava": processor}

if __name__ == "__main__":
    main()
