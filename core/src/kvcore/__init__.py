"""kvcore: keep and share the KV cache of LLM inference, through plugins."""

__version__ = "0.1.0"
