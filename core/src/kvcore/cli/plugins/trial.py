"""Whether a plugin's component can be made, as far as that shows without its options. Runs in a child."""

from inspect import isabstract
from typing import Any

from kvcore.api.errors import ConfigError, PluginError
from kvcore.plugins import PluginSpec, Registry

WHERE = "made with its default options"


def make(registry: Registry, kind: str, name: str) -> Any:
    """The component that `name` selects, with default options; None where it has options that must be given.

    Nothing is opened. Raises `PluginError` when it cannot be made, whatever the options.
    """
    component = registry.component(kind, name)
    if isabstract(component.factory):
        info, lacks = registry.find(kind, name), sorted(component.factory.__abstractmethods__)  # type: ignore[attr-defined]
        raise PluginError(
            f"{kind} plugin {info.name!r} ({info.distribution} {info.version}): "
            f"{component.factory.__name__} does not implement {', '.join(lacks)}: it cannot be made"
        )
    try:
        return registry.create(kind, PluginSpec(name, {}, WHERE))
    except ConfigError:
        return None
    except PluginError as e:
        if isinstance(e.__cause__, ConfigError):  # options that are no fault each, but some must be given
            return None
        raise
