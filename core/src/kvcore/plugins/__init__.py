"""Plugins: found by metadata, imported only when selected. See `Registry`."""

from kvcore.plugins.discover import PluginInfo
from kvcore.plugins.hooks import Hooks
from kvcore.plugins.registry import PluginSpec, Registry, plugin_lists, registry_from_env

__all__ = ["Hooks", "PluginInfo", "PluginSpec", "Registry", "plugin_lists", "registry_from_env"]
