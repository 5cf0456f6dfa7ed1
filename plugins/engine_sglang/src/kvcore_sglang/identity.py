"""What SGLang's pages depend on beside their tokens: from its configuration to kvcore's `ModelSpec`.

SGLang's page keys cover tokens, adapters and salts. All else that KV must not be mixed across goes into the namespace.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcore.api import LayoutError
from kvcore.engine import GroupSpec, ModelSpec, weights_fingerprint
from kvcore_sglang import _compat
from kvcore_sglang.pages import Pages


@dataclass(frozen=True, slots=True)
class Model:
    """A model as an engine runs it. `settings`: all of its arguments that KV depends on."""

    name: str
    weights: str
    backend: str
    settings: Mapping[str, str]


def running_model() -> Model:
    """The model of this engine. Reads samples of its weights."""
    args = _compat.server_args()
    name = str(args.model_path)
    settings = _compat.run_settings(args)
    draft = args.speculative_draft_model_path
    if draft:
        settings["draft"] = _weights(str(draft), args.speculative_draft_model_revision)
    adapters = sorted(_compat.adapter_paths(args).items())
    if adapters:
        settings["adapters"] = ";".join(f"{adapter}={_weights(path, None)}" for adapter, path in adapters)
    return Model(
        name=os.path.basename(os.path.normpath(name)) if os.path.exists(name) else name,
        weights=_weights(name, args.revision),
        backend=_compat.attention_backends(args),
        settings=settings,
    )


def pool_spec(model: Model, config: Any, name: str, pool: Any, pages: Pages, page_tokens: int, era: str) -> ModelSpec:
    """The identity of one pool's pages on this rank.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
        page_tokens: tokens of a page of KV, which is what keys stand for, also of a pool whose own pages are others.
        era: see `Eras`.
    """
    parallel = {"tp": config.tp_size, "pp": config.pp_size, "pp_rank": config.pp_rank}
    for kind in ("attn_cp", "dcp"):
        size = int(getattr(config, f"{kind}_size", 1))
        if size > 1:
            parallel |= {kind: size, f"{kind}_rank": int(getattr(config, f"{kind}_rank"))}
    if not _compat.shared_by_ranks(config, name, pool):
        parallel["tp_rank"] = config.tp_rank
    extra = {
        **model.settings,
        "pool": name,
        "pool_class": type(pool).__name__,
        "pool_page": str(pool.page_size),
        "path": pages.path,
        "layers": f"{getattr(pool, 'start_layer', '')}:{getattr(pool, 'end_layer', '')}",
        "heads": f"{getattr(pool, 'head_num', '')}x{getattr(pool, 'head_dim', '')}",
        "format": str(getattr(pool, "storage_format_tag", None)),
    }
    if era:
        extra["era"] = era
    if page_tokens < 1:
        raise LayoutError(f"SGLang's page size is {page_tokens}")
    return ModelSpec(
        engine="sglang",
        model=model.name,
        weights=model.weights,
        dtype=str(pool.dtype).removeprefix("torch."),
        element_bytes=int(pool.dtype.itemsize),
        layout=str(pool.layout),
        backend=model.backend,
        isa="",
        block_tokens=page_tokens,
        ranks=1,
        groups=(GroupSpec(tuple(f"range{i}" for i in range(len(pages.sizes))), pages.sizes),),
        parallel=parallel,
        extra=extra,
    )


class Eras:
    """What makes all that was stored so far unfindable for this engine, and for no other: `clear` names no keys.

    All ranks of a machine are in the same era, for they are children of one process; a new start begins anew.

    Attributes:
        now: the era's name; "" until the first `clear`.
    """

    def __init__(self) -> None:
        self.now = ""
        self._count = 0

    def begin(self) -> None:
        """Begin another."""
        parent = os.getppid()
        # Behind the name, which may hold anything, the 20th field is the time of the start, in ticks since that boot.
        with open(f"/proc/{parent}/stat") as stat, open("/proc/sys/kernel/random/boot_id") as boot:
            launch = f"{boot.read().strip()}:{parent}:{stat.read().rpartition(')')[2].split()[19]}"
        self._count += 1
        self.now = f"{hashlib.sha256(launch.encode()).hexdigest()[:32]}:{self._count}"


def page_hash(key: str) -> bytes:
    """A page's key as a hash of 32 bytes: SGLang's keys are SHA-256 in hexadecimal, any other is hashed."""
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    return raw if len(raw) == 32 and raw.hex() == key else hashlib.sha256(key.encode()).digest()


def _weights(name: str, revision: str | None) -> str:
    return weights_fingerprint(_compat.weights_path(name, revision), revision)
