"""kvcore-aesgcm: KV cache encrypted at rest, and nothing forged taken from a store."""

__version__ = "0.1.0"
