"""Scenarios of copies layer by layer. Run by `scenarios.py`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import Engine, engine, fork_ranks
from scenarios_basic import LONG, PROMPTS, hot

from kvcore.transfer import PagedCache

LAYERS = {"kvcore.layerwise": "on"}
MIDDLE = 2
"""A layer of each of the test models that is neither the first nor the last of its group."""


def layers_hot(models: Path, model: str = "tiny", extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """As `hot`; and which layers were copied together."""
    with watched() as seen:
        out = hot(models, model, {**LAYERS, **(extra or {})})
    return {**out, **seen}


def layers_fail(models: Path, extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """Copies that fail in the middle of their layers, a slot that changes hands there, and a vLLM that does not tell
    when it computes a layer."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    out: dict[str, Any] = {}
    with engine(str(models / "tiny"), {**LAYERS, **(extra or {})}) as e:
        with broken("store"):
            out["unsaved"], _ = e.one(LONG)
        out["save_failures"] = e.stat("kvcore_save_failures_total")
        for name in ("unsaved_again", "saved"):
            e.forget()
            out[name], out[f"{name}_cached"] = e.one(LONG)
        e.run(PROMPTS)
        e.forget()
        with broken("load"):
            out["unloaded"], out["unloaded_cached"] = e.run(PROMPTS)
        out["load_failures"] = e.stat("kvcore_load_failures_total")
        out["faults"] = e.faults()
        e.forget()
        with stolen(e):
            out["stolen"], _ = e.run(PROMPTS)
        out["stolen_failures"] = e.stat("kvcore_load_failures_total") - out["load_failures"]
        e.forget()
        out["loaded"], out["loaded_cached"] = e.run(PROMPTS)
        connector = get_kv_transfer_group()
        connector.wait_for_layer_load = lambda name: None
        for name in ("silent", "silent_again"):
            e.forget()
            with watched() as seen:
                out[name], out[f"{name}_cached"] = e.one(LONG)
            out[f"{name}_loads"] = seen["loads"]
        del connector.wait_for_layer_load
        e.settle()
        out["leaks"] = e.leaks()
    return out


def layers_two_ranks(models: Path) -> dict[str, Any]:
    """Two ranks in processes of their own, with loads and saves inside the steps."""
    out: dict[str, Any] = {}
    fork_ranks()
    extra = {**LAYERS, "kvcore.load": "sync"}
    made = Engine(str(models / "tiny"), extra, tensor_parallel_size=2, async_scheduling=False)
    out["cold"], _ = made.run(PROMPTS)
    made.forget()
    out["hot"], out["cached"] = made.run(PROMPTS)
    made.close()
    return out


@contextmanager
def watched() -> Iterator[dict[str, list[Any]]]:
    """The layers of each copy, as [start, stop], or None for all."""
    seen: dict[str, list[Any]] = {"loads": [], "saves": []}

    def copy(original: Any, copies: Any, layers: range | None, where: str) -> Any:
        seen[where].append([layers.start, layers.stop] if layers is not None else None)
        return original()

    with patched("load", lambda *a: copy(*a, "loads")), patched("store", lambda *a: copy(*a, "saves")):
        yield seen


@contextmanager
def broken(op: str) -> Iterator[None]:
    """Copies of the layer in the middle fail."""

    def copy(original: Any, copies: Any, layers: range | None) -> Any:
        if layers is not None and MIDDLE in layers:
            raise OSError("broken on purpose")
        return original()

    with patched(op, copy):
        yield


@contextmanager
def stolen(e: Engine) -> Iterator[None]:
    """Slots that change hands when the layer in the middle has been copied."""

    def copy(original: Any, copies: Any, layers: range | None) -> Any:
        found = original()
        if layers is not None and MIDDLE in layers:
            e.half.engine.l1.arena.bump([c.slot for c in copies[1:]])
        return found

    with patched("load", copy):
        yield


@contextmanager
def patched(op: str, copy: Any) -> Iterator[None]:
    """`copy(original, copies, layers)` instead of a method of `PagedCache`."""
    original = getattr(PagedCache, op)

    def call(cache: PagedCache, copies: Any, layers: range | None = None) -> Any:
        return copy(lambda: original(cache, copies, layers), copies, layers)

    setattr(PagedCache, op, call)
    try:
        yield
    finally:
        setattr(PagedCache, op, original)
