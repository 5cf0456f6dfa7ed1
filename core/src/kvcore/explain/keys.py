"""The chunk hashes of a prompt that no engine has sent: made as the engine that registered the space makes them."""

from collections.abc import Sequence

from kvcore.api import EngineIntegration, KeySource, KVCoreError, Prompt
from kvcore.builtin.keys_engine import EngineKeys
from kvcore.builtin.keys_tokens import TokenKeys
from kvcore.engine import Space
from kvcore.explain.specs import scheme_of
from kvcore.plugins import PluginSpec, Registry


def chunk_hashes(registry: Registry, space: Space, tokens: Sequence[int], salt: str, adapter: str) -> list[bytes]:
    """The hashes of all whole chunks. Raises `KVCoreError` where nobody can tell."""
    scheme = scheme_of(space)
    prompt = Prompt(tokens, space.spec.block_tokens, space.chunk_tokens, space.spec.extra, adapter, salt)
    engine = space.spec.engine
    if any(info.name == engine for info in registry.available("engine")):
        integration: EngineIntegration = registry.create("engine", PluginSpec(engine, {}, "engine"))
        source = integration.key_source(prompt)
    else:
        source = KeySource(space.chunk_tokens, space.spec.block_tokens, tokens)
    for generator in (EngineKeys, TokenKeys):
        if generator.scheme == scheme:
            return generator({}, None).extend(source)
    if space._keys.scheme == scheme:
        return space.hashes(source)
    raise KVCoreError(f"keys of the scheme {scheme!r} are another process's to make: explain a request by its id")
