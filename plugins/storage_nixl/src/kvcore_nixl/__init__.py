"""kvcore storage through NVIDIA NIXL."""

__version__ = "0.1.0"
