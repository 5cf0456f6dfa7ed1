"""Which model this is: everything its KV depends on beside the tokens.

A model in a notebook is an object that anybody may change, so its name or its files say nothing. All weights are read
once (xxHash, as fast as memory). After that, a change is noticed at each call by what it leaves behind: another tensor,
another version number of a tensor (every operation in place counts it), or other values among a few samples of each
tensor (training and merging write through `.data`, which counts nothing, but they change all of a tensor). Then all
weights are read again. What stays unseen is a change of a few elements through `.data` or NumPy, and Python code or
attributes changed at run time: `PrefixCache.refresh()` is for those who do that.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from kvcore.api import LayoutError
from kvcore_transformers import _compat

_PIECE_BYTES = 64 << 20
_SAMPLES = 8
"""Elements of each tensor that are looked at in each call."""


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def fingerprint(model: Any) -> str:
    """A hex fingerprint of every parameter and buffer, the modules' types and the configuration.

    Raises `LayoutError` for weights that cannot be read.
    """
    if _compat.quantized(model):
        raise LayoutError(
            "the model is quantised, and part of its weights cannot be read here: name them yourself, such as "
            'PrefixCache(model, ..., weights="llama-8b-nf4"), and never use a name for other weights'
        )
    digest = hashlib.sha256(b"kvcore.model/1\0")
    digest.update(json.dumps(_compat.described(model), sort_keys=True, default=str).encode())
    for name, part in model.named_modules():
        digest.update(f"{name}\0{type(part).__module__}.{type(part).__qualname__}\0".encode())
    for name, tensor in _tensors(model):
        if tensor.is_meta or hasattr(tensor, "device_mesh"):
            where = "on no device (offloaded)" if tensor.is_meta else "split over several processes"
            raise LayoutError(
                f"the tensor {name} is {where} and cannot be read here: name the weights yourself, such as "
                'PrefixCache(model, ..., weights="llama-70b"), and never use a name for other weights'
            )
        digest.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode() + _hash(tensor))
    return digest.hexdigest()[:32]


def _hash(tensor: torch.Tensor) -> bytes:
    state = xxhash.xxh3_128()
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for piece in flat.split(_PIECE_BYTES):
        state.update(memoryview(piece.cpu().numpy()))
    return state.digest()


def stamp(model: Any) -> tuple[object, ...]:
    """What changes when weights do, cheap enough for every call: see the module."""
    marks: list[object] = []
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for _, tensor in _tensors(model):
        if tensor.is_meta or hasattr(tensor, "device_mesh"):
            marks.append(id(tensor))
            continue
        version = None if tensor.is_inference() else tensor._version
        marks.append((tensor.data_ptr(), version, tensor.dtype, tensor.device))
        if tensor.numel():
            flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()[(0,) * (tensor.ndim - 1)]
            step = max(1, len(flat) // _SAMPLES)
            samples.setdefault((tensor.device, tensor.dtype), []).append(flat[step // 2 :: step])
    marks += [torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in samples.values()]
    return tuple(marks)


def circumstances(model: Any) -> dict[str, str]:
    """What else KV depends on, and may be another from call to call."""
    device = next(iter(model.parameters())).device.type
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
    return {
        "attention": _compat.attention_of(model),
        "autocast": autocast,
        "device": device,
        "matmul": torch.get_float32_matmul_precision(),
        "transformers": _compat.transformers_version(),
    }
