"""The tokenizer of a model: its `tokenizer.json` where that says all, else by transformers, as engines load it.

Importing transformers takes seconds, so it is asked only for what it alone knows: chat templates, tokenizers that it
builds anew by code of its own, and models without a `tokenizer.json`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.api.errors import ConfigError
from kvcore.cli.kit.hub import cached, why_not

_CLASSES = ("TokenizersBackend", "PreTrainedTokenizer", "Qwen2Tokenizer")
"""Those that take a `tokenizer.json` as it is, or build the same again. Others may change it."""
_CHANGED = ("mistral", "mistral3", "mixtral", "ministral", "ministral3", "pixtral", "voxtral")
"""Models whose tokenizers transformers corrects."""
_SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "additional_special_tokens", "extra_special_tokens",
)  # fmt: skip
"""Tokens of `tokenizer_config.json` that are found in a text as a whole."""
_DAMAGED = "is damaged, not wholly downloaded, or of another kind"


class Tokenizer:
    """That of a model's folder, or of a hub name that the hub's cache of this machine has.

    Attributes:
        model: as engines name it.
    """

    def __init__(self, model: str) -> None:
        self.model = os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model
        self._where = model
        self._plain: Any = None
        self._looked = False
        self._special = True
        self._whole: Any = None

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """The token ids of a text; with `chat`, of a user's message. Raises `ConfigError` without a tokenizer."""
        if chat:
            whole = self._transformers(chat=True)
            messages = [{"role": "user", "content": text}]
            try:
                shown = whole.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # of a template that is absent, or does something of its own
                raise ConfigError(f"--chat: {self._where} has no chat template that works: {_first(error)}") from error
            return [int(i) for i in whole.encode(shown, add_special_tokens=False)]
        if (plain := self._file()) is not None:
            return [int(i) for i in plain.encode(text, add_special_tokens=self._special).ids]
        return [int(i) for i in self._transformers().encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        by = self._file() or self._transformers()
        return str(by.decode(list(ids), skip_special_tokens=False))

    def _file(self) -> Any:
        """What `tokenizer.json` says, or None where that is not all."""
        if not self._looked:
            self._looked = True
            self._plain = self._load()
        return self._plain

    def _load(self) -> Any:
        try:
            from tokenizers import AddedToken
            from tokenizers import Tokenizer as Plain
        except ImportError:
            return None
        folder = self._folder()
        if folder is None or not (folder / "tokenizer.json").is_file() or (folder / "tekken.json").exists():
            return None
        settings = _read(folder / "tokenizer_config.json")
        if not _as_it_is(settings, str(_read(folder / "config.json").get("model_type", ""))):
            return None
        try:
            plain = Plain.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # it raises no other
            raise ConfigError(f"{folder / 'tokenizer.json'} {_DAMAGED}: {_first(error)}") from error
        named = _named(settings)
        if named is None or any(plain.token_to_id(token) is None for token in named):
            return None
        plain.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])
        plain.no_truncation()
        plain.no_padding()
        self._special = not {"add_bos_token", "add_eos_token"} & settings.keys()
        return plain

    def _folder(self) -> Path | None:
        if os.path.isdir(self._where):
            return Path(self._where)
        found = cached(self._where, "tokenizer.json")
        return found.parent if found is not None else None

    def _transformers(self, chat: bool = False) -> Any:
        if self._whole is None:
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
            try:
                from transformers import AutoTokenizer
            except ImportError:
                what = "--chat needs transformers, which knows chat templates"
                if not chat:
                    what = f"--model {self._where}: transformers is needed, as its tokenizer.json is absent or not all"
                raise ConfigError(f"{what}: pip install transformers") from None
            try:
                self._whole = AutoTokenizer.from_pretrained(self._where, local_files_only=True)
            except Exception as error:  # any, of a file that is not as it expects
                raise ConfigError(self._unreadable(error)) from error
        return self._whole

    def _unreadable(self, error: Exception) -> str:
        if not os.path.isdir(self._where) and self._folder() is None:
            return (
                f"--model {self._where}: it is no folder, and {why_not('tokenizer')}: give the model's folder, as the "
                "engine was given it"
            )
        files = "(tokenizer.json and tokenizer_config.json say what it is)"
        return f"--model {self._where}: it has no tokenizer that transformers reads {files}: {_first(error)}"


def _as_it_is(settings: Mapping[str, Any], model_type: str) -> bool:
    """Does transformers take the `tokenizer.json` of such a model as it is, but for what is done here, too?"""
    kind = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    changed = any(settings.get(name) for name in ("auto_map", "split_special_tokens", "add_bos_token", "add_eos_token"))
    return kind in _CLASSES and not changed and model_type not in _CHANGED


def _named(settings: Mapping[str, Any]) -> list[str] | None:
    """The special tokens of a `tokenizer_config.json`; None where they are not told as is known here."""
    lists = [given if isinstance(given, list) else [given] for given in map(settings.get, _SPECIAL) if given]
    added = settings.get("added_tokens_decoder") or {}
    try:
        lists.append([token for token in added.values() if token.get("special")])
        contents = [token["content"] if isinstance(token, dict) else token for tokens in lists for token in tokens]
    except (AttributeError, KeyError):
        return None
    return list(dict.fromkeys(contents)) if all(isinstance(content, str) for content in contents) else None


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none. Raises `ConfigError` for a file that is something else."""
    try:
        found = json.loads(file.read_bytes())
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} {_DAMAGED}: {_first(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} {_DAMAGED}: it is no JSON object")
    return found


def _first(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).strip().split("\n")[0] or type(error).__name__
