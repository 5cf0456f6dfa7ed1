"""kvcore-zstd: lossless compression of KV cache, byte planes and Zstandard in one stage."""

__version__ = "0.1.0"
