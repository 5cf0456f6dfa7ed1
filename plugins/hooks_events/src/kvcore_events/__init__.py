"""kvcore-events: what a kvcore cache holds, as a stream of KV events in vLLM's format."""

__version__ = "0.1.0"
