"""Options of the zstd serde."""

from kvcore.api import PluginConfig
from pydantic import Field


class ZstdConfig(PluginConfig):
    """Options of `serde: [zstd]`. They steer encoding only: any config decodes what any other wrote."""

    level: int = Field(default=1, ge=1, le=2)
    """1: fastest. 2: about 0.5 % smaller, a quarter slower to encode. Zstandard's higher levels look for repeats, which
    KV has none of: they measure slower *and* larger, so they are not offered."""
