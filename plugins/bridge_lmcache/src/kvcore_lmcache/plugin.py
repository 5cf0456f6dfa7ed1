"""Engine `lmcache`: an L2 adapter of LMCache's server. Its options are the adapter's `adapter_params`."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_engine() -> Component:
    """The L2 adapter, for people: what `kvcore doctor` says about it."""
    from kvcore_lmcache.config import LMCacheConfig
    from kvcore_lmcache.integration import LMCacheIntegration

    return Component(api=ApiVersion(1, 0), factory=LMCacheIntegration, config=LMCacheConfig)
