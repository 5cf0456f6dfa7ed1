"""Text becomes the same tokens as by transformers, and without them where `tokenizer.json` says all."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import explain_demo
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Plain

from kvcore.api import ConfigError
from kvcore.cli import main
from kvcore.cli.kit.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    "", " ", "Rule 1 : be kind and brief .", "Café 12345, naïve e\u0301!\n\n  def f(x):\n\treturn x  # 日本語 🙂",
    "<s> and </s>, <|im_start|>user\nhi<|im_end|> <image>[UNK] <|endoftext|>", explain_demo.TUESDAY * 30,
)  # fmt: skip
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BOS = {"__type": "AddedToken", "content": "<|im_start|>", "special": True, "normalized": False}

Make = Callable[..., str]


@pytest.fixture(scope="module")
def test_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of the engines' tests, and one of this page's."""
    given = os.environ.get("KVCORE_TEST_MODELS")
    folder = Path(given) if given else tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(ROOT / "examples/models/tiny.py"), str(folder), "tiny", "swa"], check=True)
    return folder


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A model's folder with a tokenizer of bytes, as Qwen's and Llama 3's are."""

    def made(settings: "dict[str, Any]", bos: bool = False, model_type: str = "") -> str:
        plain = Plain(models.BPE())
        plain.normalizer = normalizers.NFC()
        plain.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        plain.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        plain.train_from_iterator([*TEXTS], trainer)
        plain.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
        ident = plain.token_to_id("<|im_start|>")
        if bos:
            plain.post_processor = processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", ident)]
            )
        plain.enable_truncation(8)
        plain.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **settings}))
        if model_type:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        return str(tmp_path)

    return made


def same(folder: str, plain: bool) -> None:
    """The ids of transformers, which are asked where `plain` is not."""
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    mine = Tokenizer(folder)
    for text in TEXTS:
        ids = mine.encode(text)
        assert ids == [int(i) for i in whole.encode(text)], text
        assert mine.decode(ids) == whole.decode(ids, skip_special_tokens=False)
    assert (mine._whole is None) == plain


@pytest.mark.parametrize("name", ["tiny", "swa"])
def test_models_of_the_tests(test_models: Path, name: str) -> None:
    same(str(test_models / name), plain=True)


@pytest.mark.parametrize(
    ("settings", "bos", "model_type"),
    [
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False}, False, "qwen3"),
        ({"tokenizer_class": "Qwen2TokenizerFast", "extra_special_tokens": ["<|im_start|>"]}, False, "qwen2"),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _BOS}, True, "llama"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, True, ""),
    ],
    ids=["qwen3", "qwen2", "llama3", "no-model"],
)
def test_what_the_file_says_is_all(make: Make, settings: "dict[str, Any]", bos: bool, model_type: str) -> None:
    same(make(settings, bos, model_type), plain=True)


@pytest.mark.parametrize(
    ("settings", "model_type"),
    [
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_eos_token": True}, ""),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<brand new>"}, ""),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "gpt2"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "mistral"),
        ({}, ""),
    ],
    ids=["adds-eos", "new-token", "another-class", "mistral", "no-class"],
)
def test_transformers_are_asked_for_what_they_change(make: Make, settings: "dict[str, Any]", model_type: str) -> None:
    same(make(settings, model_type=model_type), plain=False)


def test_transformers_are_not_imported_where_they_are_not_needed(tmp_path: Path) -> None:
    model = explain_demo.write_model(tmp_path / "qwen3")
    code = (
        "import sys; from kvcore.cli import main; "
        f"main(['diff', '--text', 'Today is', 'Today', '--model', {str(model)!r}, '--chunk-tokens', '1']); "
        "print([m for m in ('transformers', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "the first 1 token" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    model = str(explain_demo.write_model(tmp_path / "qwen3"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    plain = Tokenizer(model)
    assert plain.decode(plain.encode("Today is Monday")) == "Today is Monday"
    assert plain.model == "qwen3"
    with pytest.raises(ConfigError, match="--chat needs transformers"):
        plain.encode("x", chat=True)
    with pytest.raises(ConfigError, match=r"transformers is needed, as its tokenizer\.json is absent or not all"):
        Tokenizer(make({"tokenizer_class": "T5Tokenizer"})).encode("x")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    "text",
    [b'{"a":1}x', b"version https://git-lfs\n\xff", b"", b"[" * 100_000, b"[1]"],
    ids=["half", "pointer", "empty", "deep", "list"],
)
def test_a_damaged_file_is_named(make: Make, capsys: pytest.CaptureFixture[str], file: str, text: bytes) -> None:
    folder = Path(make({"tokenizer_class": "Qwen2Tokenizer"}))
    (folder / file).write_bytes(text)
    assert main(["diff", "--text", "a", "b", "--chunk-tokens", "1", "--model", str(folder)]) == 1
    said = capsys.readouterr().err
    assert f"{folder / file} is damaged, not wholly downloaded, or of another kind: " in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "odd",
    [{"added_tokens_decoder": [1]}, {"added_tokens_decoder": {"1": 2}}, {"bos_token": {"x": 1}}, {"bos_token": 5}],
    ids=str,
)
def test_transformers_are_asked_of_settings_that_are_not_known(make: Make, odd: "dict[str, Any]") -> None:
    folder = make({"tokenizer_class": "Qwen2Tokenizer", **odd})
    with pytest.raises(
        ConfigError, match=r"transformers reads \(tokenizer.json and tokenizer_config.json say what it is"
    ):
        Tokenizer(folder).encode("x")
    with pytest.raises(ConfigError, match=r"--chat: .* has no chat template that works: Cannot use chat template"):
        Tokenizer(make({"tokenizer_class": "Qwen2Tokenizer"})).encode("x", chat=True)
