"""vLLM and torch warn of their own deprecations when they are imported; tests turn warnings into errors."""

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import vllm.distributed.kv_transfer.kv_connector.v1.metrics
    import vllm.v1.kv_cache_interface  # noqa: F401
