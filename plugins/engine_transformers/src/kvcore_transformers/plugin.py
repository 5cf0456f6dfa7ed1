"""Engine `transformers`: prefix reuse for `generate()`. It is used from Python; this is what `kvcore doctor` says."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_engine() -> Component:
    """The `PrefixCache`, for people."""
    from kvcore_transformers.integration import TransformersIntegration

    return Component(api=ApiVersion(1, 0), factory=TransformersIntegration)
