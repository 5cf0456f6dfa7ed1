"""Options of the zstd serde."""

from pydantic import Field

from kvcore.api import PluginConfig


class ZstdConfig(PluginConfig):
    """Options of `serde: [zstd]`. They steer encoding only: any config decodes what any other wrote."""

    level: int = Field(default=1, ge=1, le=2)
    """1: fastest. 2: about 0.5 % smaller, a fifth slower to encode. Zstandard's higher levels look for repeats, which
    KV hardly has: they measure many times slower for at most 0.2 % more, so they are not offered."""
