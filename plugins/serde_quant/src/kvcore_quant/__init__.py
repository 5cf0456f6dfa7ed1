"""kvcore-quant: lossy compression of KV cache, to fp8 or to four bits."""

__version__ = "0.1.0"
