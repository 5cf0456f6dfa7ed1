"""The chunk hashes of a prompt that no engine has sent: made as the engine that registered the model makes them."""

from collections.abc import Sequence

from kvcore.api import ConfigError, EngineIntegration, KeyGenerator, KeySource, Prompt
from kvcore.builtin.keys_engine import EngineKeys
from kvcore.builtin.keys_tokens import TokenKeys
from kvcore.control import StorageManager
from kvcore.engine.identity import Identity
from kvcore.plugins import PluginSpec


def _integration(manager: StorageManager, engine: str) -> EngineIntegration | None:
    """That of an engine; None where no plugin for it is here."""
    registry = manager.registry
    if not any(info.name == engine for info in registry.available("engine")):
        return None
    found: EngineIntegration = registry.create("engine", PluginSpec(engine, {}, "engine"))
    return found


def keys_tell(manager: StorageManager, identity: Identity) -> bool:
    """Do its keys alone tell salts and adapters apart, and its namespaces do not?"""
    integration = _integration(manager, identity.spec.engine)
    return integration is not None and identity.scheme in integration.schemes


def chunk_hashes(
    manager: StorageManager, identity: Identity, tokens: Sequence[int], salt: str, adapter: str
) -> list[bytes]:
    """The hashes of all whole chunks. Raises `ConfigError` where nobody can tell."""
    spec = identity.spec
    integration = _integration(manager, spec.engine)
    source = KeySource(identity.chunk_tokens, spec.block_tokens, tokens)
    if integration is not None:
        prompt = Prompt(tokens, spec.block_tokens, identity.chunk_tokens, spec.extra, adapter, salt)
        source = integration.key_source(prompt)
    if integration is not None and identity.scheme in integration.schemes:
        hashes = list(source.block_hashes)
    else:
        hashes = _generator(manager, identity.scheme).extend(source)
    if len(hashes) < len(tokens) // identity.chunk_tokens:
        raise ConfigError(
            f"how {spec.engine} names the chunks of a prompt is not known here (keys: {identity.scheme}): explain a "
            "request by its id"
        )
    return hashes


def _generator(manager: StorageManager, scheme: str) -> KeyGenerator:
    for kind in (EngineKeys, TokenKeys):
        if kind.scheme == scheme:
            return kind({}, None)
    configured: KeyGenerator = manager.create("keys", manager.config.keys)
    if configured.scheme == scheme:
        return configured
    raise ConfigError(f"keys of the scheme {scheme!r} are another process's to make: explain a request by its id")
