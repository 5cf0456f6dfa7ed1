"""kvcore storage on Mooncake Store."""

__version__ = "0.1.0"
