"""Fake distributions: a folder with `.dist-info` metadata and plugin modules, as pip would leave them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent

STORAGE = '''
from kvcore.api import ApiVersion, Component, hookimpl, BlockingStorage, PluginConfig, Size, MISSING, STORED
from pydantic import SecretStr

class Config(PluginConfig):
    bucket: str
    """Where the objects are kept."""
    secret_key: SecretStr | None = None
    """Never shown."""
    part: Size = 8 * 1024**2
    """Bytes of one part."""
    retries: int = 3
    """Attempts."""

class Store(BlockingStorage):
    label = "{label}"
    def __init__(self, config, context):
        self.config, self.context = config, context
    def exists(self, keys):
        return [False] * len(keys)
    def load(self, items):
        return [MISSING] * len(items)
    def store(self, items):
        return [STORED] * len(items)
    def delete(self, keys):
        pass

@hookimpl
def kvcore_storage():
    return Component(api=ApiVersion(1, 0), config=Config, factory=Store)
'''
"""A storage plugin with options, one of them secret. `{label}` tells copies apart."""


def write_distribution(
    root: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "1.0",
    requires: Sequence[str] = (),
) -> None:
    """Put a distribution into `root`. `entry_points`: group -> name -> target. `modules`: module name -> source."""
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    text = ""
    for group, names in entry_points.items():
        text += f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items())
    (info / "entry_points.txt").write_text(text)
    for module, source in (modules or {}).items():
        path = root / Path(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))


def storage(label: str = "acme") -> str:
    """The source of a storage plugin."""
    return STORAGE.replace("{label}", label)
