"""Plugin modules for fake distributions (`kvcore.testing.dist`)."""

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


def storage(label: str = "acme") -> str:
    """The source of a storage plugin."""
    return STORAGE.replace("{label}", label)
