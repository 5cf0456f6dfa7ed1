"""kvcore storage on a local file system."""

__version__ = "0.1.0"
