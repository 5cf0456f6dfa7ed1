"""Prompts as people give them: text, a file, token ids; and which tokenizer makes tokens of them."""

import argparse
import json
import os
from contextlib import nullcontext

from kvcore.api.errors import ConfigError
from kvcore.cli.kit import arguments, asking
from kvcore.cli.kit.tokenizer import Tokenizer

__all__ = ["Tokenizer", "add_tokenizer", "read", "served", "tokenizer", "tokens"]

MAX_BYTES = 64 << 20


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """The options that say how text becomes tokens."""
    group = parser.add_argument_group("tokens")
    group.add_argument(
        "--model",
        metavar="DIR",
        help="the model's folder, or the hub name of one in the hub's cache: its tokenizer, and which model is meant "
        "(default: the one that is served)",
    )
    group.add_argument("--chat", action="store_true", help="the text is a user's message: the chat template is applied")


def none_given(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for an option that says more of a prompt, where there is none."""
    for name in ("salt", "tenant", "adapter", "chat"):
        if getattr(args, name):
            raise ConfigError(f"--{name} says more of a prompt, and none is given: leave it out")


def tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Of `--model`, or of the one model that is served. Raises `ConfigError` when there is none."""
    model = args.model or served(args)
    if model is None:
        raise ConfigError(
            "--model is missing: the model's folder or hub name, whose tokenizer makes tokens of the text; it may be "
            "left out where open caches serve one model alone, from a folder of this machine"
        )
    return Tokenizer(model)


def served(args: argparse.Namespace) -> str | None:
    """The folder of the one model that the chosen caches serve; None where there is none, or more than one."""
    try:
        found = asking.first_answers(asking.chosen(args), "/status", read=lambda said: dict(said["models"]))
    except ConfigError:
        return None
    models = {name for _, said in found for name in said}
    folders = {folder for _, said in found for folder in said.values() if folder}
    if len(models) != 1 or len(folders) != 1:
        return None
    (folder,) = folders
    return folder if os.path.isdir(folder) else None


def read(word: str) -> str | list[int]:
    """The text of a file, or its token ids where it is a JSON list of whole numbers; `-` is standard input."""
    with nullcontext(arguments.standard_input()) if word == "-" else open(word, encoding="utf-8") as file:
        try:
            text = file.read(MAX_BYTES + 1)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{word} is no text in UTF-8: {error}") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{word} has more than {MAX_BYTES >> 20} MiB: no prompt is so long")
    if text.lstrip().startswith("["):
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids):
            return ids
    return text


def tokens(prompt: str | list[int], args: argparse.Namespace) -> list[int]:
    """The token ids of what `read` has read."""
    from kvcore.explain.models import MAX_TOKENS, too_long

    if isinstance(prompt, str):
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ConfigError("the prompt is no text in UTF-8")
        prompt = tokenizer(args).encode(prompt, args.chat)
    if len(prompt) > MAX_TOKENS:
        raise ConfigError(too_long(len(prompt)))
    return prompt
