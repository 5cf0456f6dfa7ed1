"""kvcore under vLLM: a KV connector. vLLM loads it by its entry point; nothing here imports vLLM by itself."""

from typing import Any

__version__ = "0.1.0"

__all__ = ["KVCoreConnector", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "KVCoreConnector":
        from kvcore_vllm.connector import KVCoreConnector

        return KVCoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
