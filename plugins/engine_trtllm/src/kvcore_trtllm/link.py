"""How the halves of rank 0 find each other: TensorRT-LLM makes both in one process, with the same arguments object.

The scheduler's half must know the KV tensor to register the model, and only workers are shown it.
"""

import threading
from typing import Any

from kvcore_trtllm.metadata import Tensor


class Link:
    """What rank 0's worker has told: its `tensor`, None until then."""

    def __init__(self, llm_args: Any) -> None:
        self.llm_args = llm_args  # kept, so that its id stays its own
        self.tensor: Tensor | None = None


_links: dict[int, Link] = {}
_lock = threading.Lock()


def link(llm_args: Any) -> Link:
    """The link of this engine, made by whichever half comes first."""
    with _lock:
        return _links.setdefault(id(llm_args), Link(llm_args))


def unlink(llm_args: Any) -> None:
    """Its engine has ended. Idempotent."""
    with _lock:
        _links.pop(id(llm_args), None)
