"""kvcore-prefetch: what a request will need is brought into memory before it is scheduled."""

__version__ = "0.1.0"
