"""kvcore-from-lmcache: LMCache's YAML, environment variables or server flags as a kvcore.yaml."""

__version__ = "0.1.0"
