"""`kvcore run sglang`: SGLang's command line with the flags of a HiCache storage backend that is kvcore."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.api import ConfigError, LaunchRequest
from kvcore_sglang.options import PREFIX

CACHE = "--enable-hierarchical-cache"
BACKEND = "--hicache-storage-backend"
EXTRA = "--hicache-storage-backend-extra-config"
MODULE = "kvcore_sglang.backend"
OURS = {"backend_name": "kvcore", "module_path": MODULE, "class_name": "KVCoreHiCache", "interface_v1": 1}


def with_kvcore(request: LaunchRequest) -> tuple[list[str], list[str]]:
    """The user's words with what SGLang needs, and what of them is new. Raises `ConfigError` where they cannot go
    together."""
    if request.role != "both":
        raise ConfigError(
            f"--role {request.role}: SGLang hands KV to other engines by itself (--disaggregation-mode): leave it out"
        )
    words = _model(list(request.words))
    _not_in_a_file(words)
    added = [] if CACHE in words else [CACHE]
    backend = _value(words, BACKEND)
    if backend is None:
        added += [BACKEND, "dynamic"]
    elif backend != "dynamic":
        raise ConfigError(f"{BACKEND} names {backend!r}, and SGLang takes one: leave it out, or write dynamic")
    given = _value(words, EXTRA)
    if given is None:
        added += [EXTRA, _text(_extra(request))]
    elif (merged := _merged(given, _extra(request))) is not None:
        words = _without(words, EXTRA)
        added += [EXTRA, merged]
    return [*words, *added], added


def _extra(request: LaunchRequest) -> dict[str, Any]:
    file = {} if request.config is None else {"config": request.config}
    return {**OURS, **file, **{PREFIX + name: value for name, value in request.values.items()}}


def _merged(given: str, ours: Mapping[str, Any]) -> str | None:
    """What the user has written with what it lacks; None: nothing. Raises `ConfigError` where they differ."""
    if given.startswith("@"):
        if MODULE in _read(Path(given[1:])):
            return None
        raise ConfigError(f"{given[1:]} does not name kvcore: add {_text(ours)} to it, or write its values as JSON")
    try:
        extra = json.loads(given)
    except ValueError as error:
        raise ConfigError(f"{EXTRA} is no JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"{EXTRA} must be a JSON object, not {given[:60]}")
    for name, value in ours.items():
        if name in extra and extra[name] != value:
            text = f"{EXTRA} says {name}: {extra[name]!r}, and kvcore run would say {value!r}: give it in one place"
            raise ConfigError(text)
    return None if ours.items() <= extra.items() else _text({**ours, **extra})


# -- words -------------------------------------------------------------------------------------------------------------


def _model(words: list[str]) -> list[str]:
    """`serve MODEL`, as `sglang serve` takes it, too."""
    if words[:1] == ["serve"]:
        words = words[1:]
    if words and not words[0].startswith("-"):
        words = ["--model-path", *words]
    return words


def _places(words: Sequence[str], flag: str) -> list[int]:
    return [i for i, word in enumerate(words) if word.partition("=")[0] == flag]


def _value(words: Sequence[str], flag: str) -> str | None:
    places = _places(words, flag)
    if not places:
        return None
    if len(places) > 1:
        raise ConfigError(f"{flag} is given twice: write it once")
    _, equals, value = words[places[0]].partition("=")
    if not equals and places[0] + 1 == len(words):
        raise ConfigError(f"{flag}: its value is missing")
    return value if equals else words[places[0] + 1]


def _without(words: list[str], flag: str) -> list[str]:
    (at,) = _places(words, flag)
    return words[:at] + words[at + (1 if "=" in words[at] else 2) :]


def _not_in_a_file(words: Sequence[str]) -> None:
    """SGLang's own `--config FILE` may have these flags, too, and ours would silently replace them."""
    path = _value(words, "--config")
    if path is not None and re.search(r"^\s*['\"]?hicache-storage-backend", _read(Path(path)), re.M):
        raise ConfigError(f"{path} has hicache-storage-backend: take it out there, or write it behind `--`")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""  # SGLang says what is wrong with it


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), separators=(",", ":"))
