"""kvcore under SGLang: a HiCache storage backend. SGLang loads `kvcore_sglang.backend`, the only module here that
imports SGLang when it is imported."""

__version__ = "0.1.0"

__all__ = ["__version__"]
