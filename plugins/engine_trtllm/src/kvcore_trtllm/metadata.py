"""What travels between the halves. Plain picklable values: TensorRT-LLM broadcasts a step's metadata to all ranks."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvcore.api import ObjectLayout
from kvcore.transfer import Copy


class Tensor(NamedTuple):
    """The KV cache of one rank as it really is: one tensor, of which `tensor[i]` is block `i`. Enters the namespace."""

    block_bytes: int
    shape: str
    dtype: str
    element_bytes: int


class Attach(NamedTuple):
    """How a worker reaches the arena named `token`, and what the objects in it look like."""

    token: str
    descriptor: dict[str, Any]
    layouts: tuple[ObjectLayout, ...]
    tensor: Tensor


class Load(NamedTuple):
    """Fill these blocks of a request."""

    id: int
    request: int
    arena: str
    copies: tuple[Copy, ...]


class Save(NamedTuple):
    """Copy these blocks of a request into the arena, once the step has written them."""

    id: int
    request: int
    arena: str
    copies: tuple[Copy, ...]


@dataclass
class Metadata:
    """One step's orders. `reports` is where the ranks report to; `arena` is the token of the arena of now, "" while
    there is none; `attach` is how to reach it, until all ranks have said that they do; `offered` are the arenas of
    which requests were promised what they have not taken yet."""

    reports: str = ""
    arena: str = ""
    attach: Attach | None = None
    offered: frozenset[str] = frozenset()
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
