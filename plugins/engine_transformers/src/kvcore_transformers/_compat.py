"""Everything that depends on transformers' version or its inner layout. Nothing here imports it at module level."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

TESTED = "5.19"
"""The transformers series that the tests run under."""

_TOKEN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Cache layers that hold keys and values token by token. What a sliding window has left behind is only masked, so such
a layer may as well be kept whole: then every prefix can be cut out of it."""
_ORIGIN = ("_name_or_path", "transformers_version")


def is_tested(found: str) -> bool:
    """Is this version of the series that the tests run under?"""
    return found == TESTED or found.startswith(TESTED + ".")


def transformers_version() -> str:
    """Of the installed transformers."""
    return version("transformers")


def text_config(model: Any) -> Any:
    """The configuration of the part of a model that generates text."""
    return model.config.get_text_config(decoder=True)


def described(model: Any) -> dict[str, Any]:
    """The configuration of the part that generates text, without what says where it came from."""
    return {k: v for k, v in text_config(model).to_dict().items() if k not in _ORIGIN}


def attention_of(model: Any) -> str:
    """The attention implementation in use, such as `sdpa`, and that of the experts, where there are any."""
    config = text_config(model)
    return f"{config._attn_implementation}/{getattr(config, '_experts_implementation', None) or ''}"


def unsupported(model: Any) -> str:
    """Why generation with this kind of model cannot be given a cache with a prefix, as a sentence; "" if it can."""
    from transformers.cache_utils import DynamicCache

    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model: what its decoder sees depends on more than the tokens before"
    if not model._supports_default_dynamic_cache():
        return "it keeps its state in a cache of its own instead of transformers' DynamicCache"
    kinds = sorted({type(layer).__name__ for layer in DynamicCache(config=text_config(model)).layers})
    odd = [kind for kind in kinds if kind not in _TOKEN_LAYERS]
    if odd:
        return f"its cache has layers of the kind {', '.join(odd)}, whose state cannot be cut at a token"
    if getattr(text_config(model), "use_bidirectional_attention", None) not in (None, False, "vision"):
        return "its tokens attend to later ones, so a prefix's KV is not its own"
    for kind in _rope_kinds(text_config(model).to_dict()):
        if "dynamic" in kind or kind == "longrope":
            return f"its rotary embedding ({kind}) depends on the length of the whole prompt"
    return ""


def _rope_kinds(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in ("rope_type", "type") and isinstance(inner, str):
                yield inner
            else:
                yield from _rope_kinds(inner)


def foreign_hooks(model: Any) -> str:
    """What was attached to the model and may change what it computes, as text; "" if nothing was. Hooks by which
    transformers records outputs change nothing."""
    from torch.nn.modules import module as modules

    if modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return "global forward hooks"
    for name, part in model.named_modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks):
            return f"a forward hook on {name or 'the model'}"
        if "forward" in part.__dict__ and not hasattr(part, "_hf_hook"):  # accelerate's moves tensors only
            return f"another forward method on {name or 'the model'}"
        if hasattr(type(part), "active_adapter"):
            return f"an adapter on {name} that is not merged"
    return ""


def quantized(model: Any) -> bool:
    """Does the model keep part of its weights where they cannot be read as tensors?"""
    return getattr(model, "hf_quantizer", None) is not None or bool(getattr(model, "is_quantized", False))


def empty_cache() -> Any:
    """A cache for a new sequence. Without a configuration every layer is kept whole."""
    from transformers.cache_utils import DynamicCache

    return DynamicCache()


def filled_cache(layers: Sequence[tuple[Any, Any] | None]) -> Any:
    """A cache that holds these keys and values, `[batch, heads, tokens, size]`, or None for a layer without any."""
    from transformers.cache_utils import DynamicLayer

    cache = empty_cache()
    for pair in layers:
        layer = DynamicLayer()
        if pair is not None:
            keys, values = pair
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def tensors_of(cache: Any) -> list[tuple[Any, Any] | None]:
    """Keys and values of each layer; None for a layer without any. Raises `TypeError` for a cache that does not hold
    all its tokens."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise TypeError(f"a {type(cache).__name__} that does not hold every token: use the one that load() returned")
    return [(layer.keys, layer.values) if layer.get_seq_length() else None for layer in cache.layers]


def length_of(cache: Any) -> int:
    """Tokens in the cache."""
    return int(cache.get_seq_length()) if cache.layers else 0


def repeat(cache: Any, times: int) -> None:
    """Repeat each row of the cache, as `generate` does with its inputs."""
    cache.batch_repeat_interleave(times)


def setting(model: Any, given: Mapping[str, Any], name: str) -> Any:
    """What `generate` will take for an option: its argument, else its `generation_config`'s, else the model's."""
    for value in (
        given.get(name),
        getattr(given.get("generation_config"), name, None),
        getattr(model.generation_config, name, None),
    ):
        if value is not None:
            return value
    return None
