"""The adapter's options, as `kvcore plugins show lmcache` and the documentation tell them."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from kvcore.api import ConfigError, PluginConfig, Size


class LMCacheConfig(PluginConfig):
    """Keys of `adapter_params` in LMCache's `--l2-adapter`."""

    config: str | None = None
    """Path of kvcore's YAML file. Default: the file that `KVCORE_CONFIG` names, else kvcore's defaults."""

    set: dict[str, Any] = {}
    """Single values laid over it, such as `{"l2[0].storage.path": "/cache"}`."""

    weights: str = ""
    """What tells this model's weights from others of the same name: a revision, a digest. LMCache's keys say only the
    model's name, so two revisions of it would share their KV."""

    queue_size: Size = Field(default=1 << 30, gt=0)
    """Bytes that may wait to be stored. LMCache holds them locked in its L1 meanwhile; more is not stored, and
    counted."""


def parse(params: Mapping[str, Any]) -> LMCacheConfig:
    """The options. Raises `ConfigError`, which names the option, what was given and what is allowed."""
    try:
        return LMCacheConfig.model_validate(dict(params))
    except ValidationError as e:
        allowed = ", ".join(LMCacheConfig.model_fields)
        faults = "; ".join(
            f"adapter_params.{'.'.join(map(str, fault['loc']))}: {fault['msg']} (given: {fault['input']!r})"
            for fault in e.errors(include_url=False)
        )
        raise ConfigError(f"{faults}. The options are {allowed}: kvcore plugins show lmcache") from None
