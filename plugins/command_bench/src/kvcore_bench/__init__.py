"""kvcore-bench: what a cache costs and gives, measured, recorded and simulated."""

__version__ = "0.1.0"
