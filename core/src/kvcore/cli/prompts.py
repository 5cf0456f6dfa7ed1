"""Prompts as people give them: text, a file, token ids; and the tokenizer that makes tokens of them."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcore.api.errors import ConfigError

MAX_BYTES = 64 << 20


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """The options that say how text becomes tokens."""
    group = parser.add_argument_group("tokens")
    group.add_argument(
        "--model",
        metavar="DIR",
        help="the model's folder, or the hub name of one in the hub's cache: its tokenizer, and which model is meant",
    )
    group.add_argument("--chat", action="store_true", help="the text is a user's message: the chat template is applied")


class Tokenizer:
    """That of a model: transformers' where it is installed, as engines use it, else what `tokenizer.json` says."""

    def __init__(self, model: str) -> None:
        self.model = os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model
        """As engines name it."""
        self._where = model
        self._made: Any = None
        self._plain: Any = None

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """The token ids of a text. Raises `ConfigError` without a tokenizer."""
        self._load()
        if self._made is None:
            if chat:
                raise ConfigError("--chat needs transformers, which knows chat templates: pip install transformers")
            return [int(i) for i in self._plain.encode(text).ids]
        if chat:
            messages = [{"role": "user", "content": text}]
            shown = self._made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return [int(i) for i in self._made.encode(shown, add_special_tokens=False)]
        return [int(i) for i in self._made.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        self._load()
        if self._made is None:
            return str(self._plain.decode(list(ids), skip_special_tokens=False))
        return str(self._made.decode(list(ids), skip_special_tokens=False))

    def _load(self) -> None:
        if self._made is not None or self._plain is not None:
            return
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            self._load_plain()
            return
        try:
            self._made = AutoTokenizer.from_pretrained(self._where, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            if not os.path.isdir(self._where):
                raise ConfigError(
                    f"--model {self._where}: it is no folder, and the hub's cache of this machine and user has no "
                    "tokenizer of that name: give the model's folder, as the engine was given it"
                ) from error
            text = str(error).strip().split("\n")[0]
            raise ConfigError(f"--model {self._where}: it has no tokenizer that transformers reads: {text}") from error

    def _load_plain(self) -> None:
        file = Path(self._where) / "tokenizer.json"
        try:
            from tokenizers import Tokenizer as Plain
        except ImportError:
            raise ConfigError("no tokenizer is installed: pip install transformers, or tokenizers") from None
        if not file.is_file():
            raise ConfigError(f"--model {self._where}: there is no {file.name} in it; give the model's folder")
        self._plain = Plain.from_file(str(file))


def tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Of `--model`. Raises `ConfigError` when it is not given."""
    if args.model is None:
        raise ConfigError(
            "--model is missing: the model's folder or hub name, whose tokenizer makes tokens of the text"
        )
    return Tokenizer(args.model)


def read(word: str) -> str | list[int]:
    """The text of a file, or its token ids where it is a JSON list of whole numbers; `-` is standard input."""
    if word == "-":
        text = sys.stdin.read(MAX_BYTES + 1)
    else:
        with open(word, encoding="utf-8", errors="strict") as file:
            try:
                text = file.read(MAX_BYTES + 1)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{word} is no text in UTF-8: {error}") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{word} has more than {MAX_BYTES >> 20} MiB: no prompt is so long")
    if text.lstrip().startswith("["):
        try:
            ids = json.loads(text)
        except ValueError:
            return text
        if isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids):
            return ids
    return text


def tokens(prompt: str | list[int], args: argparse.Namespace) -> list[int]:
    """The token ids of what `read` has read."""
    if isinstance(prompt, list):
        return prompt
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise ConfigError("the prompt is no text in UTF-8")
    return tokenizer(args).encode(prompt, args.chat)
