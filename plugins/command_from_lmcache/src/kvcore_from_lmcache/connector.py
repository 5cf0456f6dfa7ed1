"""The engine's side: what LMCache's connectors read in vLLM's `kv_connector_extra_config`."""

import re
from collections.abc import Iterable

from kvcore_from_lmcache.draft import Draft, Setting, yes

NO_DECODE = (
    "not in this file: kvcore run vllm --config kvcore.yaml -- serve MODEL --kv-transfer-config "
    """'{"kv_connector_extra_config":{"kvcore.save_decode":false}}'"""
)
ROLES = {"kv_both": "both", "kv_producer": "prefill", "kv_consumer": "decode"}
SERVER = "engines find their machine's server by the file's `server:`"
WHY_NOT = (
    (r"kv_connector_module_path|kv_load_failure_policy|kv_parallel_size|kv_buffer_.*|kv_rank|kv_ip|kv_port|engine_id",
     "kvcore run writes what its connector needs"),
    (r"discard_partial_chunks|lmcache\.mp\.(transfer_intermediate_tensors|mp_transfer_mode|isolated_ipc|use_vmm_api)"
     r"|lmcache_rpc_port|skip_last_n_tokens", "kvcore's connector has its own way with its engine"),
    (r"lmcache\.mp\.(mq_timeout|heartbeat_interval)",
     "a client of kvcore's connects again by itself, and computes meanwhile"),
    (r"lmcache\.mp\.(nonblocking_lookup_status|eager_prefetch)",
     "a lookup never blocks vLLM's scheduler; tiers load from a request's first lookup on"),
    (r"lmcache\.mp\.autostart.*", "kvcore serve is started by you; or leave `server:` out, for a cache in the engine"),
    (r"lmcache\.mp\.lazy_offload.*", "what is computed is kept as it is computed; `write:` says what goes to a tier"),
    (r"cb\..*", "kvcore reuses prefixes only: it never changes what a model computes"),
)  # fmt: skip
OTHER = "of the engine's connector, and nothing that kvcore's reads"


def convert(settings: Iterable[Setting], draft: Draft) -> None:
    """Say what becomes of each; all of it stands on the engine's command line, not in the file."""
    for setting in settings:
        name = setting.name
        if name in ("kv_connector", "kv_offloading_backend"):
            _connector(setting, draft)
        elif name == "kv_role" and setting.value in ROLES:
            draft.serves(setting, f"kvcore run --role {ROLES[setting.value]}")
        elif name in ("lmcache.mp.host", "lmcache.mp.port", "lmcache.mp.server_urls"):
            draft.serves(setting, "server.url", SERVER, "changed")
        elif name == "lmcache.mp.save_decode_cache":
            save_decode(setting, draft)
        else:
            draft.leave(setting, next((why for pattern, why in WHY_NOT if re.fullmatch(pattern, name)), OTHER))


def save_decode(setting: Setting, draft: Draft) -> None:
    """Whether what the model generates is kept, too."""
    if yes(setting.value):
        draft.default(setting, "kvcore.save_decode: true")
    else:
        draft.serves(setting, "kvcore.save_decode: false", NO_DECODE, "changed")


def _connector(setting: Setting, draft: Draft) -> None:
    name = str(setting.value)
    if name.lower().startswith("lmcache"):
        draft.serves(setting, "kvcore run vllm", "which writes vLLM's flag", "changed")
    elif name == "CBKVConnector":
        draft.leave(setting, "kvcore reuses prefixes only: it never changes what a model computes")
    else:
        why = "vLLM's own, it may stay beside kvcore's in a MultiConnector: docs/server.md#prefill-and-decode-apart"
        draft.leave(setting, why)
