"""Stands in for SGLang's compiled kernels, which have no build for CPUs. For the tests only.

Any name can be imported; those that no test reaches raise when they are called.
"""

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new token slots, which stand one after another in `slots`, into its row of `table`."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU")

    return missing
