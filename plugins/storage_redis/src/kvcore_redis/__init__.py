"""kvcore storage in Redis and Valkey."""

__version__ = "0.1.0"
