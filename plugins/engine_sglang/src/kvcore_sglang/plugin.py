"""Engine `sglang`: the HiCache storage backend. Its options are keys of SGLang's
`--hicache-storage-backend-extra-config`; any key there that begins with `kvcore.` is a value of kvcore's configuration
(`kvcore.l2`)."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_engine() -> Component:
    """The SGLang backend, for people: what `kvcore doctor` says about it."""
    from kvcore_sglang.config import SglangConfig
    from kvcore_sglang.integration import SglangIntegration

    return Component(api=ApiVersion(1, 0), factory=SglangIntegration, config=SglangConfig)
