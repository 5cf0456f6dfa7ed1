"""`PrefixCache`: prefix reuse for `generate()`.

It stands on the `CacheEngine` face, not on the object store, although transformers owns its memory. A notebook asks
for the same prefix again in the next cell, so L1 is where most hits are: with this face they are one copy from shared
memory into new tensors, with no tier at all in the YAML. What is saved is copied once and goes to the tiers in the
background, where an object store would keep `generate()` waiting for S3. And a lookup that finds a tier slow gives up
after `lookup_timeout`. With `server:` in the YAML the same calls share the L1 of `kvcore serve` with other processes.
"""

import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from kvcore.api import LayoutError, LeaseError
from kvcore.engine import Asked, EngineLookup, ModelSpec, Space
from kvcore.service import open_engine
from kvcore_transformers import _compat, copies, identity
from kvcore_transformers.calls import Call, Row, read, rows_of
from kvcore_transformers.keys import BLOCK_TOKENS, KEY_SCHEME

logger = logging.getLogger("kvcore.transformers")

_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class Reuse:
    """What the last call got from the cache and gave to it.

    Args:
        prompt_tokens: of all rows, padding excluded.
        reused_tokens: so many of them were loaded instead of computed.
        stored_chunks: chunks that were new to the cache.
        load_s, store_s: seconds that loading and storing took.
        refused: why the cache was not used, as a sentence; "" when it was.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    stored_chunks: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    refused: str = ""


class PrefixCache:
    """Keeps the KV cache of what a model has read, and gives it to every later prompt that begins the same.

        cache = PrefixCache(model, "kvcore.yaml")
        out = cache.generate(**inputs, max_new_tokens=50)

    The output is that of `model.generate` with the same arguments. No fault of the cache fails a call: it is computed.
    `last` says what a call reused, or why it could not.

    Args:
        model: a causal language model of transformers.
        config: the path of a `kvcore.yaml`; default: the one that `KVCORE_CONFIG` names.
        flags: values laid over it, such as `{"l1.size": "2GiB"}`.
        tenant: nobody sees another tenant's objects.
        weights: a name for the weights, where they cannot be read (quantised, offloaded) or reading all of them once
            takes too long. Whoever gives it answers for it: other weights need another name.
        generated: keep the KV of generated tokens too, for the next turn of a conversation.

    Raises `LayoutError` for a model whose cache cannot be reused, `ConfigError` or `PluginError` for a wrong
    configuration. A store or a server that is down raises nothing.
    """

    def __init__(
        self,
        model: Any,
        config: str | None = None,
        *,
        flags: Mapping[str, Any] | None = None,
        tenant: str = "",
        weights: str | None = None,
        generated: bool = True,
    ) -> None:
        self.model = model
        self.last = Reuse()
        self._tenant = tenant
        self._weights = weights
        self._generated = generated
        self._calls = 0
        self._stamp: tuple[object, ...] = ()
        self._identity = ""
        self._shape: copies.Shape | None = None
        self._spaces: dict[tuple[tuple[str, str], ...], Space] = {}
        self._said: set[str] = set()
        reason = _compat.unsupported(model)
        if reason:
            raise LayoutError(f"{type(model).__name__} cannot reuse prefixes: {reason}")
        if not _compat.is_tested(_compat.transformers_version()):
            found = _compat.transformers_version()
            logger.warning("kvcore-transformers was tested with transformers %s, this is %s", _compat.TESTED, found)
        if weights is None:
            self._identity = identity.fingerprint(model)
        self._stamp = identity.stamp(model)
        self.engine = open_engine(config, flags=flags, name="transformers")
        self._arenas = copies.Arenas(self.engine)
        # Where nobody closes it, the end of the object or the process does, and writes out what waits for a tier.
        self._close = weakref.finalize(self, _end, self._arenas, self.engine)

    # -- the three lines ---------------------------------------------------------------------------------------------

    def generate(self, inputs: Any = None, **arguments: Any) -> Any:
        """`model.generate` with the same arguments, and the same result."""
        self.last = Reuse()
        try:
            call = read(self.model, inputs, arguments)
            if not isinstance(call, str):
                space = self._space()
                past = self._fetch(space, call.rows, call.columns)
                if call.expand > 1 and _compat.length_of(past):
                    _compat.repeat(past, call.expand)
        except Exception as error:
            self._fault("loading", error)
            return self.model.generate(inputs, **arguments)
        if isinstance(call, str):
            self._refuse(call)
            return self.model.generate(inputs, **arguments)
        result = self.model.generate(inputs, **{**arguments, "past_key_values": past})  # it may be given as None
        try:
            self._keep(space, call, result if isinstance(result, torch.Tensor) else result.sequences, past)
        except Exception as error:
            self._fault("storing", error)
        return result

    # -- by hand -----------------------------------------------------------------------------------------------------

    def load(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        """A `DynamicCache` with what is known of the front of these prompts, to be given as `past_key_values`; empty
        when nothing is. The last token is always left to compute.

        A batch reuses as many columns as the row that has the fewest. Raises `ValueError` for a mask that is not
        padding on the left.
        """
        self.last = Reuse()
        rows = rows_of(input_ids, attention_mask)
        try:
            return self._fetch(self._space(), rows, input_ids.shape[1])
        except Exception as error:
            self._fault("loading", error)
            return _compat.empty_cache()

    def save(self, token_ids: torch.Tensor, past: Any, attention_mask: torch.Tensor | None = None) -> int:
        """Keep what `past`, which `load` made and the model has filled, holds of these tokens; how many new chunks.

        `token_ids` are the prompts or, with what was generated, the result of `generate`; `attention_mask` is that of
        the prompts.
        """
        width = token_ids.shape[1]
        if attention_mask is not None and attention_mask.shape[1] < width:
            more = attention_mask.new_ones(len(attention_mask), width - attention_mask.shape[1])
            attention_mask = torch.cat([attention_mask, more], dim=1)
        rows = rows_of(token_ids, attention_mask)
        before = self.last.stored_chunks
        try:
            self._store(self._space(), rows, past, min(width, _compat.length_of(past)), 1)
        except Exception as error:
            self._fault("storing", error)
        return self.last.stored_chunks - before

    @contextmanager
    def applied(self) -> Iterator["PrefixCache"]:
        """Within it, `model.generate` itself uses the cache: for pipelines and evaluation harnesses, which call it."""
        own = self.model.__dict__
        original = self.model.generate
        before = {"generate": own["generate"]} if "generate" in own else {}  # somebody else's

        def put_back() -> None:
            own.pop("generate", None)
            own.update(before)

        def generate(inputs: Any = None, *more: Any, **arguments: Any) -> Any:
            if more or own.get("generate") is not generate:
                return original(inputs, *more, **arguments)
            put_back()
            try:
                return self.generate(inputs, **arguments)
            finally:
                own["generate"] = generate

        own["generate"] = generate
        try:
            yield self
        finally:
            put_back()

    # -- the rest ----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the weights again: after changes that leave no trace (see `kvcore_transformers.identity`)."""
        self._stamp = ()

    def drain(self, timeout_s: float = 10.0) -> int:
        """Wait until the tiers have what was stored; the number of objects still waiting at the deadline."""
        return self.engine.drain(timeout_s)

    def stats(self) -> dict[str, float]:
        """What was counted since the start (docs/metrics.md)."""
        return self.engine.stats()

    def close(self) -> None:
        """Write out what waits for a tier, in bounded time, and let go of everything. Idempotent."""
        self._close()

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- loading -----------------------------------------------------------------------------------------------------

    def _fetch(self, space: Space, rows: Sequence[Row], columns: int) -> Any:
        """A cache with the columns that every row has."""
        began = time.perf_counter()
        self.last = Reuse(prompt_tokens=sum(len(row.tokens) for row in rows))
        self._calls += 1
        lookups: list[EngineLookup] = []
        try:
            for i, row in enumerate(rows):
                asked = Asked(self._name(i), len(row.tokens), row.tokens)
                lookups.append(self.engine.lookup(space, tuple(row.hashes(space)), 0, asked))
            found = [row.pad + _answer(lookup) * space.chunk_tokens for row, lookup in zip(rows, lookups, strict=True)]
            width = min(columns - 1, *found)
            cache = self._fill(space, rows, lookups, width)
        finally:
            for lookup in lookups:
                self.engine.release(lookup)
        reused = sum(max(0, _compat.length_of(cache) - row.pad) for row in rows)
        self._note(reused_tokens=reused, load_s=time.perf_counter() - began)
        return cache

    def _fill(self, space: Space, rows: Sequence[Row], lookups: Sequence[EngineLookup], width: int) -> Any:
        """A cache with the first `width` columns of the rows, or fewer: what has gone meanwhile is computed."""
        assert self._shape is not None
        if width <= min(row.pad for row in rows):
            return _compat.empty_cache()  # nothing but padding
        room = -(-(width + BLOCK_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS  # a row's last block may be used in part
        layers = self._shape.empty(len(rows), room)
        for i, (row, lookup) in enumerate(zip(rows, lookups, strict=True)):
            blocks = -(-(width - row.pad) // BLOCK_TOKENS)
            if blocks <= 0:
                continue
            try:
                plan = self.engine.retrieve(lookup, 0, [list(range(blocks))])
                there = copies.load(self._arenas.view(lookup.arena), space, layers, i, row.pad, plan)
            except LeaseError:
                there = 0
            width = min(width, row.pad + there)
        if width <= min(row.pad for row in rows):
            return _compat.empty_cache()
        copies.zero_padding(layers, rows)
        return _compat.filled_cache(self._shape.at_home(copies.cut(layers, width)))

    # -- storing -----------------------------------------------------------------------------------------------------

    def _keep(self, space: Space, call: Call, sequences: torch.Tensor, past: Any) -> None:
        if call.expand > 1 or not self._generated:  # beams have changed places: only prompts are certain
            self._store(space, call.rows, past, call.columns, call.expand)
            return
        rows = [Row(row.pad, tokens[row.pad :]) for row, tokens in zip(call.rows, sequences.tolist(), strict=True)]
        self._store(space, rows, past, min(sequences.shape[1], _compat.length_of(past)), 1)

    def _store(self, space: Space, rows: Sequence[Row], past: Any, columns: int, expand: int) -> None:
        """Keep the first `columns` of `past`, of which every `expand`-th row is one of `rows`."""
        began = time.perf_counter()
        assert self._shape is not None
        layers = None
        stored = 0
        for i, row in enumerate(rows):
            hashes = Row(row.pad, row.tokens[: max(0, columns - row.pad)]).hashes(space)
            blocks = len(hashes) * space.chunk_blocks
            plan = self.engine.reserve(space, hashes, 0, len(hashes), [list(range(blocks))], self._name(i))
            if not plan.copies:
                continue
            done = False
            try:
                if layers is None:
                    layers = self._shape.together(_compat.tensors_of(past))
                copies.store(self._arenas.view(plan.arena), space, layers, i * expand, row.pad, plan.copies)
                done = True
            finally:
                self.engine.publish(plan.id, done)
            stored += len(plan.copies)
        self._note(stored_chunks=self.last.stored_chunks + stored, store_s=time.perf_counter() - began)

    def _name(self, row: int) -> str:
        """What the record calls a row of the last call, which has no id."""
        return f"call-{self._calls}.{row}"

    # -- the model ---------------------------------------------------------------------------------------------------

    def _space(self) -> Space:
        """The space of the model as it is now. Raises when that cannot be known."""
        stamp = identity.stamp(self.model)
        if stamp != self._stamp:
            self._shape = None
            if self._weights is None:
                self._identity = identity.fingerprint(self.model)
            self._stamp = stamp
        if self._shape is None:
            self._spaces.clear()
            cache = _compat.empty_cache()
            copies.probe(self.model, cache)
            self._shape = copies.Shape(_compat.tensors_of(cache))
        around = identity.circumstances(self.model)
        key = tuple(sorted(around.items()))
        space = self._spaces.get(key)
        if space is None:
            space = self._spaces[key] = self.engine.register(self._spec(around), self._tenant)
        return space

    def _spec(self, around: dict[str, str]) -> ModelSpec:
        assert self._shape is not None
        config = _compat.text_config(self.model)
        first = self._shape.first
        return ModelSpec(
            engine="transformers",
            model=str(config.model_type),
            weights=self._identity or f"named:{self._weights}",
            dtype=str(first.dtype).removeprefix("torch."),
            element_bytes=first.dtype.itemsize,
            layout="heads,tokens,size",
            backend=around["attention"],
            isa="",
            block_tokens=BLOCK_TOKENS,
            ranks=1,
            groups=(self._shape.group(),),
            extra={**around, "hashes": KEY_SCHEME},
        )

    # -- what is said ------------------------------------------------------------------------------------------------

    def _note(self, **changes: Any) -> None:
        self.last = Reuse(**{name: changes.get(name, getattr(self.last, name)) for name in Reuse.__slots__})

    def _refuse(self, reason: str) -> None:
        self._note(refused=reason)
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("generate() does without the cache: %s (logged once)", reason)

    def _fault(self, what: str, error: Exception) -> None:
        """A fault of the cache: say so, once for each kind."""
        kind = f"{what} failed: {type(error).__name__}"
        self._note(refused=f"{kind}: {error}")
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s: %s (logged once)", kind, error, exc_info=error)


def _answer(lookup: EngineLookup) -> int:
    """Chunks that can be retrieved. A lookup gives up by itself, after `lookup_timeout`."""
    while (found := lookup.poll()) is None:
        lookup.wait(_WAIT_S)
    return found


def _end(arenas: copies.Arenas, engine: Any) -> None:
    arenas.close()
    engine.close()
