"""A model's space in the cache: its namespace, its chunk size, and the layout of its objects."""

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcore.api import ConfigError, KeyGenerator, KeySource, LayoutError, ObjectLayout
from kvcore.api.keys import MAX_HASH_BYTES, MIN_HASH_BYTES, NAMESPACE_BYTES

MAX_AUTO_CHUNK_TOKENS = 256
MAX_GROUPS = 64
MAX_LAYERS = 16384
"""Of all groups together."""
MAX_RANKS = 65536
MAX_TOKENS = 1 << 24
"""Of a block, and of a chunk."""
MAX_BLOCK_BYTES = 1 << 40
"""Of one layer, and of all ranks' layers of a group."""
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group as the engine reports it, on one rank.

    Args:
        layers: layer names in the order in which an object holds them.
        block_bytes: bytes of one engine block of each layer.
        window_tokens: the sliding window, or None for full attention.
    """

    layers: tuple[str, ...]
    block_bytes: tuple[int, ...]
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that KV depends on beside the tokens. Every field enters the namespace.

    Args:
        engine: such as `vllm`: what defines the meaning of `layout`.
        model: the model's name. weights: see `weights_fingerprint`.
        dtype: KV element type. element_bytes: its size.
        layout, backend, isa: KV layout, attention backend and the instruction set it packs blocks for.
        block_tokens: tokens per engine block.
        ranks: tensor-parallel ranks whose KV one object holds.
        parallel: sizes of every kind of parallelism, such as `{"tp": 2}`.
        groups: the KV cache groups.
        extra: anything else, such as a quantisation scale's source.
    """

    engine: str
    model: str
    weights: str
    dtype: str
    element_bytes: int
    layout: str
    backend: str
    isa: str
    block_tokens: int
    ranks: int
    groups: tuple[GroupSpec, ...]
    parallel: Mapping[str, int] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def computed_as(self) -> tuple[str | int, ...]:
        """What the speed of computing depends on: tenants have it in common."""
        return (self.engine, self.model, self.weights, self.backend, self.isa, self.ranks)


class Space:
    """One registered model of one tenant. Made by `Engine.register`.

    Attributes:
        namespace: see `namespace`; empty until a server has said it.
        tenant: its name, or "".
        chunk_tokens, chunk_blocks: tokens and engine blocks per chunk.
        groups: the layout of each group's objects.
        windows: each group's sliding window in chunks, or None.
    """

    def __init__(
        self,
        spec: ModelSpec,
        keys: KeyGenerator,
        namespace: bytes,
        chunk_tokens: int,
        descriptor: Callable[[], dict[str, Any] | None],
        tenant: str = "",
    ) -> None:
        self.spec = spec
        self.tenant = tenant
        self.namespace = namespace
        self.chunk_tokens = chunk_tokens
        self.chunk_blocks = chunk_tokens // spec.block_tokens
        self.groups = tuple(object_layout(spec, g, self.chunk_blocks) for g in spec.groups)
        self.windows = tuple(window_chunks(g.window_tokens, chunk_tokens) for g in spec.groups)
        self._keys = keys
        self._descriptor = descriptor

    def hashes(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        """The hashes of the full chunks of `source` that follow the first `len(known)`."""
        return self._keys.extend(source, known)

    def descriptor(self) -> dict[str, Any] | None:
        """What its engine's `descriptor` says."""
        return self._descriptor()


def object_layout(spec: ModelSpec, group: GroupSpec, chunk_blocks: int) -> ObjectLayout:
    """The layout of a group's objects."""
    return ObjectLayout(chunk_blocks, spec.ranks, tuple(group.block_bytes), spec.dtype, spec.element_bytes)


def resolve_chunk_tokens(spec: ModelSpec, wanted: "int | str", min_object_bytes: int) -> int:
    """Tokens per chunk. `auto` is the smallest multiple of the block size whose largest object reaches
    `min_object_bytes`, at most 256 tokens (or one block, where blocks are larger). Raises `ConfigError`."""
    block = spec.block_tokens
    if wanted != "auto":
        tokens = int(wanted)
        if tokens <= 0 or tokens % block:
            below = tokens // block * block
            raise ConfigError(
                f"chunk_tokens is {tokens}, the engine's block size is {block}: chunk_tokens must be a multiple of the "
                f"block size, such as {below or block} or {below + block}; or leave it at auto"
            )
        return tokens
    largest = max(sum(g.block_bytes) for g in spec.groups) * spec.ranks
    blocks = -(-min_object_bytes // max(1, largest))
    return block * max(1, min(blocks, MAX_AUTO_CHUNK_TOKENS // block))


def check(spec: ModelSpec) -> None:
    """Raise `LayoutError` for a spec that cannot be cached."""
    if not spec.groups:
        raise LayoutError("the model has no KV cache group")
    _bounded("block_tokens", spec.block_tokens, 1, MAX_TOKENS)
    _bounded("ranks", spec.ranks, 1, MAX_RANKS)
    _bounded("element_bytes", spec.element_bytes, 1, 1024)
    _bounded("the number of KV groups", len(spec.groups), 1, MAX_GROUPS)
    _bounded("the number of layers", sum(len(group.layers) for group in spec.groups), 1, MAX_LAYERS)
    for name in ("engine", "model", "weights", "dtype", "layout", "backend", "isa"):
        if not isinstance(value := getattr(spec, name), str):
            raise LayoutError(f"{name} is {value!r:.100}: give text")
    for name, size in spec.parallel.items():
        _bounded(f"parallel[{name!r}]", size, -_INT64, _INT64 - 1)
    for name, text in spec.extra.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise LayoutError(f"extra[{name!r}] is {text!r}: give text")
    for i, group in enumerate(spec.groups):
        if len(group.layers) != len(group.block_bytes) or not group.layers:
            raise LayoutError(f"KV group {i}: {len(group.layers)} layers with block sizes {group.block_bytes}")
        for layer, nbytes in zip(group.layers, group.block_bytes, strict=True):
            _bounded(f"KV group {i}: the block size of {layer!r}", nbytes, 1, MAX_BLOCK_BYTES)
        _bounded(
            f"KV group {i}: the block size of all layers and ranks",
            sum(group.block_bytes) * spec.ranks,
            1,
            MAX_BLOCK_BYTES,
        )
        if group.window_tokens is not None:
            _bounded(f"KV group {i}: window_tokens", group.window_tokens, 1, _INT64 - 1)


def can_name_chunks(hashes: Sequence[bytes]) -> bool:
    """Whether these can name chunks: they have one length, and one that an `ObjectKey` may have."""
    sizes = set(map(len, hashes))
    return not sizes or (len(sizes) == 1 and MIN_HASH_BYTES <= min(sizes) <= MAX_HASH_BYTES)


def _bounded(name: str, value: Any, least: int, most: int) -> None:
    try:
        number = operator.index(value)
    except TypeError:
        raise LayoutError(f"{name} is {value!r}: give a whole number") from None
    if not least <= number <= most:
        raise LayoutError(f"{name} is {number}: give {least} to {most}")


def namespace(
    spec: ModelSpec, chunk_tokens: int, key_scheme: str, lossy: Sequence[str], salt: str, tenant: str = ""
) -> bytes:
    """The fingerprint (16 bytes) of all that KV must not be mixed across.

    SHA-256 over domain-separated, length-prefixed fields in a fixed order, truncated. Pinned by golden vectors.
    """
    fields: list[tuple[str, str]] = [
        ("engine", spec.engine),
        ("model", spec.model),
        ("weights", spec.weights),
        ("dtype", spec.dtype),
        ("element_bytes", str(spec.element_bytes)),
        ("layout", spec.layout),
        ("backend", spec.backend),
        ("isa", spec.isa),
        ("block_tokens", str(spec.block_tokens)),
        ("chunk_tokens", str(chunk_tokens)),
        ("ranks", str(spec.ranks)),
        ("keys", key_scheme),
        ("salt", salt),
        *((("tenant", tenant),) if tenant else ()),
        *((f"parallel.{k}", str(v)) for k, v in sorted(spec.parallel.items())),
        *((f"extra.{k}", v) for k, v in sorted(spec.extra.items())),
        *(("lossy", tag) for tag in lossy),
    ]
    for i, group in enumerate(spec.groups):
        fields.append((f"group.{i}.window", str(group.window_tokens)))
        for layer, nbytes in zip(group.layers, group.block_bytes, strict=True):
            fields.append((f"group.{i}.layer", f"{layer}={nbytes}"))
    digest = hashlib.sha256(b"kvcore.namespace/1\0")
    for name, value in fields:
        for text in (name, value):
            raw = text.encode(errors="surrogateescape")  # a path may hold any bytes
            digest.update(len(raw).to_bytes(4, "little") + raw)
    return digest.digest()[:NAMESPACE_BYTES]


def window_chunks(window_tokens: int | None, chunk_tokens: int) -> int | None:
    """How many chunks before its end a prefix needs of a layer with this window; None: all."""
    # One more than the window needs: an engine may use a hit up to a block before the chunk's end.
    return None if window_tokens is None else -(-(window_tokens - 1) // chunk_tokens) + 1
