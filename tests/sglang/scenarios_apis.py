"""Whether SGLang still is what kvcore-sglang relies on. Imported by `scenarios.py` only, never by pytest."""

import hashlib
import importlib
import inspect
import struct
import tempfile
from array import array
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from apis import APIS, POOL_ATTRIBUTES


def apis(model: Path) -> dict[str, str]:
    """API -> what is wrong with it, or ""."""
    return {api: _fault(api) for api in APIS}


def _fault(api: str) -> str:
    try:
        _check(api)
    except (ImportError, AttributeError, AssertionError) as error:
        return str(error) or type(error).__name__
    return ""


def _check(api: str) -> None:
    module, _, name = api.partition(":")
    name, _, value = name.partition(" = ")
    name, called, parameters = name.partition("(")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        names = _fields(found)
        if part in names:
            return
        found = getattr(found, part)
    if value:
        assert found.value == value, f"it is {found.value!r}"
    if called:
        there = list(inspect.signature(found).parameters)
        assert there == [p for p in parameters.rstrip(")").split(", ") if p], f"its parameters are {', '.join(there)}"


def _fields(found: Any) -> set[str]:
    if is_dataclass(found):
        return {field.name for field in fields(found)}
    return set(getattr(found, "__struct_fields__", ()))


def pool_attributes(model: Path) -> dict[str, list[str]]:
    """Kind of pool -> what it lacks."""
    from caches import cache, disk

    missing = {}
    for kind, mla in (("mha", False), ("mla", True)):
        with tempfile.TemporaryDirectory() as folder, cache(model, {"kvcore.l2": disk(Path(folder))}, mla=mla) as one:
            pool = one.backend.mem_pool_host
            names = [name for name in POOL_ATTRIBUTES if not (mla and name.startswith("head_"))]
            missing[kind] = [name for name in names if not hasattr(pool, name)]
    return missing


def page_keys(model: Path) -> dict[str, bool]:
    """What SGLang's page keys cover, and whether kvcore can tell them of a prompt."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_hash_str, get_storage_hash_str

    from kvcore.api import Prompt
    from kvcore_sglang.prompts import key_source

    page = 16
    tokens = list(range(5, 5 + 3 * page))
    chain, before = [], b""
    for start in range(0, len(tokens), page):
        text = b"".join(struct.pack("<I", token) for token in tokens[start : start + page])
        before = hashlib.sha256(before + text).digest()
        chain.append(before.hex())

    def keys(extra: str | None = None, salt: str | None = None) -> list[str]:
        return list(get_storage_hash_str(RadixKey(array("q", tokens), extra, cache_salt=salt), None, page))

    def told(salt: str = "", adapter: str = "") -> list[str]:
        prompt = Prompt(tokens, page, page, {"speculative_algorithm": "None"}, adapter, salt)
        return [chunk.hex() for chunk in key_source(prompt).block_hashes]

    adapter = LoRARef.deterministic_id("french", "/loras/french")
    return {
        "explained": told() == keys(),
        "explained_with_a_salt": told("a") == keys(salt="a"),
        "explained_with_an_adapter": told("\u00fc", "french=/loras/french") == keys(adapter, "\u00fc"),
        "chained": get_hash_str(tokens, None, page) == chain == keys(),
        "adapters_and_salts_apart": len({keys()[0], keys(extra="a")[0], keys(salt="a")[0], keys(salt="b")[0]}) == 4,
    }
