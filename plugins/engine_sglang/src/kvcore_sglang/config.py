"""The backend's own options, as `kvcore plugins show sglang` and the documentation tell them."""

from kvcore.api import PluginConfig


class SglangConfig(PluginConfig):
    """Keys of SGLang's `--hicache-storage-backend-extra-config`, with or without the prefix `kvcore.`."""

    config: str | None = None
    """Path of kvcore's YAML file. Default: the file that `KVCORE_CONFIG` names, else kvcore's defaults."""

    tenant: str = ""
    """Whom all that this engine computes belongs to: engines share within a tenant only, and quotas go by it."""
