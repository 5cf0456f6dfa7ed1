"""kvcore under Hugging Face transformers: `PrefixCache` lets `generate()` reuse prefixes across calls and processes."""

from typing import Any

__version__ = "0.1.0"

__all__ = ["PrefixCache", "Reuse", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("PrefixCache", "Reuse"):
        from kvcore_transformers import cache

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
