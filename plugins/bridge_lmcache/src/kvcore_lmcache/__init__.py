"""kvcore under LMCache: a kvcore tier list as an L2 adapter of LMCache's multiprocess server."""

__version__ = "0.1.0"
