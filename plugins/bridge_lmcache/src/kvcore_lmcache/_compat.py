"""Everything that depends on LMCache's version or its inner layout. Nothing here imports LMCache at module level."""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from kvcore_lmcache.prompts import ALGORITHM

TESTED = "0.5.6"
"""The LMCache version that the tests run under."""

NEEDED = (
    "lmcache.lmcache_native:Bitmap.set",
    "lmcache.v1.distributed.api:MemoryLayoutDesc",
    "lmcache.v1.distributed.api:ObjectKey",
    "lmcache.v1.distributed.internal_api:L2StoreResult",
    "lmcache.v1.distributed.l2_adapters.base:AdapterUsage",
    "lmcache.v1.distributed.l2_adapters.base:L2AdapterInterface._notify_keys_accessed",
    "lmcache.v1.distributed.l2_adapters.base:L2AdapterInterface._notify_keys_deleted",
    "lmcache.v1.distributed.l2_adapters.base:L2AdapterInterface._notify_keys_stored",
    "lmcache.v1.distributed.l2_adapters.plugin_l2_adapter:PluginL2AdapterConfig.from_dict",
    "lmcache.v1.memory_management:MemoryObj.byte_array",
    "lmcache.v1.memory_management:MemoryObj.get_size",
    "lmcache.v1.memory_management:MemoryObj.metadata",
    "lmcache.v1.platform:create_event_notifier",
)
"""What this package uses of LMCache, `module:name`. A test names each one that a version lacks."""


_CHUNK_DIMENSIONS = (3, 4)
"""Layers, tokens, width; or keys and values, layers, tokens, width."""


class Layout(NamedTuple):
    """What an LMCache object consists of: tensors one behind the other.

    Attributes:
        shapes: of each tensor.
        dtypes: of each tensor, such as `bfloat16`.
        sizes: bytes of each tensor.
        item_bytes: bytes of an element of the first.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    item_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of a chunk, or slots where a layer keeps fewer: the dimension before the last. 1 of what has none."""
        shape = self.shapes[0]
        return shape[-2] if len(shape) in _CHUNK_DIMENSIONS else 1


def installed_lmcache() -> str | None:
    """The version of the installed LMCache, from metadata."""
    try:
        return version("lmcache")
    except PackageNotFoundError:
        return None


def ranks_of(key: Any) -> int:
    """How many ranks the engine has whose object this is."""
    return int(key.kv_rank) >> 24 & 0xFF


def hash_algorithm() -> str:
    """By which the server in this process hashes tokens: it tells no adapter, so its command line is read."""
    for word, value in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        flag, equals, given = word.partition("=")
        if flag == "--hash-algorithm":
            return given if equals else value
    return ALGORITHM


def layout_of(memory: Any) -> Layout:
    """The layout of an LMCache memory object."""
    meta = memory.metadata
    return _layout(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])


def layout_from(desc: Any) -> Layout:
    """The layout that a `MemoryLayoutDesc` describes: of the objects that a lookup asks for."""
    return _layout(desc.shapes, desc.dtypes)


def _layout(shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout:
    plain = tuple(tuple(int(n) for n in shape) for shape in shapes)
    sizes = tuple(int(shape.numel()) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True))
    return Layout(plain, tuple(str(d).removeprefix("torch.") for d in dtypes), sizes, int(dtypes[0].itemsize))


def buffer_of(memory: Any) -> memoryview:
    """The bytes of an LMCache memory object where they lie. Raises `TypeError` for one that is not in host memory."""
    view = memory.byte_array
    if not isinstance(view, memoryview) or view.readonly:
        raise TypeError(f"{type(memory).__name__} has no writable host memory")
    return view.cast("B")


def bitmap(found: Sequence[bool]) -> Any:
    """LMCache's record of which keys of a task succeeded."""
    from lmcache.lmcache_native import Bitmap

    bits = Bitmap(len(found))
    for i, yes in enumerate(found):
        if yes:
            bits.set(i)
    return bits


def store_result(stored: bool, nbytes: int) -> Any:
    """LMCache's record of a finished store task."""
    from lmcache.v1.distributed.internal_api import L2StoreResult

    return L2StoreResult(stored, nbytes)


def notifier() -> Any:
    """An event that LMCache's loops wait for: `fileno()`, `notify()`, `close()`."""
    from lmcache.v1.platform import create_event_notifier

    return create_event_notifier()
