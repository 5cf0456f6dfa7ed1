"""A worker's paged KV as it really is."""

from collections.abc import Mapping
from typing import Any

from kvcore_vllm import _compat
from kvcore_vllm.metadata import WorkerLayout


def describe(tensors: Mapping[str, Any], vllm_config: Any) -> WorkerLayout:
    """The layout of the layers' block-by-block tensors."""
    sizes: dict[str, int] = {}
    shapes, backends, isas = set(), set(), set()
    element_bytes = 0
    for name, tensor in tensors.items():
        block = tensor[0]
        element_bytes = int(block.element_size())
        sizes[name] = int(block.numel()) * element_bytes
        shapes.add(f"{str(block.dtype).removeprefix('torch.')}{list(block.shape)}")
        backend, isa = _compat.attention_of(vllm_config, name)
        backends.add(backend)
        isas.add(isa)
    shape, backend, isa = ("+".join(sorted(names)) for names in (shapes, backends, isas))
    return WorkerLayout(sizes, shape, backend, isa, element_bytes)


def by_block(tensor: Any, num_blocks: int) -> Any:
    """A view of a layer's KV with `view[block_id]` one block, where a backend cuts blocks into smaller ones."""
    rows = int(tensor.shape[0])
    if rows == num_blocks:
        return tensor
    if rows % num_blocks:
        raise ValueError(
            f"a KV tensor of shape {tuple(tensor.shape)} does not hold {num_blocks} blocks in its first dimension"
        )
    return tensor.unflatten(0, (num_blocks, rows // num_blocks))
