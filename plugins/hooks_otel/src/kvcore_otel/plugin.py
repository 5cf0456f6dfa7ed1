"""Hooks `otel`: one tree of spans per request, sent by OTLP, within the engine's own trace where it has one."""

from kvcore.api import ApiVersion, Component, hookimpl


@hookimpl
def kvcore_observer() -> Component:
    """The observer that sends."""
    from kvcore_otel.config import OtelConfig
    from kvcore_otel.observer import OtelObserver

    return Component(api=ApiVersion(1, 0), config=OtelConfig, factory=OtelObserver)
