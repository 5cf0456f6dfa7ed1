"""The engine's spaces in the cache: one for the base model and one per adapter, for each tenant."""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from kvcore.engine import Engine, ModelSpec, Space, weights_fingerprint
from kvcore_vllm import _compat, handover, model_spec
from kvcore_vllm.metadata import WorkerLayout

MAX_SPACES = 256
"""The least recently used are forgotten, here only: the same tenant's next request finds its objects again."""
MAX_TENANT = 256
"""Characters of a tenant's name."""


def tenant_of(request: Any) -> str | None:
    """Whose request it is: `kv_transfer_params["tenant"]`, else what a producer's promise says, else vLLM's
    `cache_salt`, else "". None where the name given is not fit to be one: such a request is not cached at all, because
    it must not be taken for somebody else's."""
    return tenant_named(request.kv_transfer_params, str(request.cache_salt or ""))


def tenant_named(params: Any, salt: str = "") -> str | None:
    """The same, of a request's `kv_transfer_params` and salt."""
    given = params.get("tenant") if isinstance(params, dict) else None
    if given is None and (promised := handover.read(params)) is not None:
        given = promised.tenant or None
    if given is not None:
        return given if isinstance(given, str) and _is_name(given) else None
    return salt if _is_name(salt) else hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()


def _is_name(text: str) -> bool:
    return len(text) <= MAX_TENANT and text.isprintable()


class Spaces:
    """Registers models as requests ask for them. Not thread-safe."""

    def __init__(self, engine: Engine, vllm_config: Any, kv_cache_config: Any) -> None:
        self._engine = engine
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._workers: dict[int, WorkerLayout] = {}
        self._epoch: dict[str, str] = {}
        self._specs: dict[Any, ModelSpec] = {}
        self._spaces: dict[Any, Space] = {}

    def __bool__(self) -> bool:
        return bool(self._spaces)

    def set_workers(self, workers: Mapping[int, WorkerLayout]) -> Space:
        """What the ranks' paged KV looks like; the base model's space. Raises a `KVCoreError` for a model that cannot
        be cached."""
        self._workers = dict(workers)
        return self.of(None, "")

    def of(self, adapter: Any, tenant: str) -> Space:
        """The space of the base model, or of one adapter, for a tenant."""
        spec_key = (adapter.lora_name, adapter.lora_path) if adapter is not None else None
        if adapter is not None and adapter.load_inplace:  # its weights may be others now
            self._specs.pop(spec_key, None)
        spec = self._specs.get(spec_key)
        if spec is None:
            spec = self._specs[spec_key] = self._spec(adapter)
        space = self._spaces.pop((spec_key, tenant), None)
        if space is None or space.spec is not spec:
            space = self._engine.register(spec, tenant)
        self._spaces[spec_key, tenant] = space  # the last is the most recently used
        while len(self._spaces) > MAX_SPACES:
            del self._spaces[next(iter(self._spaces))]
        while len(self._specs) > MAX_SPACES:
            del self._specs[next(iter(self._specs))]
        return space

    def clear(self) -> None:
        """Forget what L1 holds of them."""
        for space in self._spaces.values():
            self._engine.clear(space)

    def renew(self) -> None:
        """Leave everything behind that was cached so far: clear it, and use names that nothing was stored under."""
        self.clear()
        self._spaces.clear()
        self._specs.clear()
        self._epoch = {"reset": secrets.token_hex(8)}
        if self._workers:
            self.of(None, "")

    def _spec(self, adapter: Any) -> ModelSpec:
        """vLLM's block hashes name an adapter, not its weights."""
        extra = dict(self._epoch)
        if adapter is not None:
            extra["lora"] = f"{adapter.lora_name}:{weights_fingerprint(_compat.adapter_path(adapter))}"
        return model_spec.build_spec(self._vllm_config, self._kv_cache_config, self._workers, extra)
