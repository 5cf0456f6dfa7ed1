"""SGLang's copies between device and host pools, as plain torch operations on CPU tensors. For the tests only.

Names and arguments are those with which `sglang.srt.mem_cache.pool_host.mha` and `.mla` (0.5.23) call them. A device
pool is a tensor `[token, heads, dim]` for each layer. Host pools: layer-first as the device's; page-first `[token,
layer, heads, dim]`; page-first-direct `[page, layer, token of the page, heads, dim]`; page-head `[page, head, token of
the page, layer, dim]`. Where a call names layers by a tensor of addresses, their rows are packed.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
]

Tensor = torch.Tensor


def rows(address: int, row_bytes: int, indices: Tensor) -> Tensor:
    """Packed rows of bytes that begin at an address, as many as `indices` reach."""
    count = int(indices.max()) + 1 if indices.numel() else 0
    memory = (ctypes.c_uint8 * (count * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, row_bytes) if count else torch.empty(0, row_bytes)


def as_bytes(tensor: Tensor, *shape: int) -> Tensor:
    """A contiguous tensor's bytes in another shape."""
    return tensor.reshape(-1).view(torch.uint8).view(*shape)


# -- one layer, host to device --------------------------------------------------------------------------------------


def transfer_kv_per_layer_mla(*, src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, **_: Any) -> None:
    dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer(
    *, src_k: Tensor, dst_k: Tensor, src_v: Tensor, dst_v: Tensor, src_indices: Tensor, dst_indices: Tensor, **_: Any
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_mla_pf_lf(
    *, src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, layer_id: int, **_: Any
) -> None:
    dst[dst_indices] = src[src_indices, layer_id]


def transfer_kv_per_layer_pf_lf(
    *,
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    **_: Any,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices] = src[src_indices, layer_id]


def transfer_kv_per_layer_ph_lf(
    *,
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
    **_: Any,
) -> None:
    page, token = src_indices // page_size, src_indices % page_size
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices] = src[page, :, token, layer_id]


# -- all layers, device to host -------------------------------------------------------------------------------------


def transfer_kv_all_layer_mla(
    *, src_layers: Tensor, dst_layers: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **_: Any
) -> None:
    for src, dst in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        rows(dst, item_size, dst_indices)[dst_indices] = rows(src, item_size, src_indices)[src_indices]


def transfer_kv_all_layer(
    *, src_k_layers: Tensor, dst_k_layers: Tensor, src_v_layers: Tensor, dst_v_layers: Tensor, **rest: Any
) -> None:
    transfer_kv_all_layer_mla(src_layers=src_k_layers, dst_layers=dst_k_layers, **rest)
    transfer_kv_all_layer_mla(src_layers=src_v_layers, dst_layers=dst_v_layers, **rest)


def transfer_kv_all_layer_mla_lf_pf(
    *,
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    host = as_bytes(dst, -1, num_layers, item_size)
    for layer, src in enumerate(src_layers.tolist()):
        host[dst_indices, layer] = rows(src, item_size, src_indices)[src_indices]


def transfer_kv_all_layer_lf_pf(
    *, src_k_layers: Tensor, dst_k: Tensor, src_v_layers: Tensor, dst_v: Tensor, **rest: Any
) -> None:
    transfer_kv_all_layer_mla_lf_pf(src_layers=src_k_layers, dst=dst_k, **rest)
    transfer_kv_all_layer_mla_lf_pf(src_layers=src_v_layers, dst=dst_v, **rest)


def transfer_kv_all_layer_lf_ph(
    *,
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    page, token, head_bytes = dst_indices // page_size, dst_indices % page_size, item_size // head_num
    for layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        host = as_bytes(dst, -1, head_num, page_size, num_layers, head_bytes)
        for layer, src in enumerate(layers.tolist()):
            tokens = rows(src, item_size, src_indices)[src_indices]
            host[page, :, token, layer] = tokens.view(-1, head_num, head_bytes)


# -- the `direct` way, both directions ------------------------------------------------------------------------------


def transfer_kv_direct(
    *,
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    *,
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    *,
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)  # of K, then of V; or of MLA's one buffer
    page, token = dst_indices // page_size, dst_indices % page_size
    for i, src in enumerate(src_ptrs):
        dst_ptrs[i // layers][page, i % layers, token] = src[src_indices]
