"""What a model's `config.json`, as on the Hugging Face hub, says about its KV and its work. No torch, no hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcore.api import ConfigError
from kvcore.api.units import brief

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_SHORT = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_TEXT = ("text_config", "llm_config", "language_config")
"""Where models of several media describe the one that has the KV."""
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_tokens": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
}
"""The same number under the names that model families give it."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "cohere2": {"sliding_window": 4096},
}
"""What a family's `config.json` leaves out where it is the default of its class in transformers."""
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Families whose older files do not say which layers have the window: every n-th has not."""
_PLAIN_MLP = (
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "falcon",
    "phi",
    "mpt",
    "starcoder2",
    "gpt_bigcode",
    "codegen",
)
"""Families whose MLP has two matrices; others have a third, the gate."""
_STATES = ("layers_block_type", "hybrid_override_pattern", "attn_layer_indices", "attn_layer_period", "ssm_cfg")
"""Keys of models some of whose layers keep a state instead of KV."""
UNSTATED_TOKENS = 131072
MAX_LAYERS = 10_000


class Layer(NamedTuple):
    """The KV of one layer.

    Args:
        heads: what tensor parallelism divides; 1 for a latent (MLA), of which every rank has all.
        elements: of each head and token, keys and values together.
        window: tokens that it looks back, or None for all.
    """

    heads: int
    elements: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Model:
    """What is needed of a model.

    Args:
        attention: its kind, for people.
        layers: those with KV of their own, in order.
        depth: all layers that compute, those that use another's KV included.
        heads: query heads.
        score_elements: a query's and a value's elements for each head: what a pair of tokens costs.
        parameters: those of the matrices that one token passes, embeddings and output layer left out.
        max_tokens: the longest prompt.
        dtype, element_bytes: of the KV.
        notes: what was assumed.
    """

    attention: str
    layers: tuple[Layer, ...]
    depth: int
    heads: int
    score_elements: int
    parameters: int
    max_tokens: int
    dtype: str
    element_bytes: int
    notes: tuple[str, ...]


def read_model(config: Mapping[str, Any], dtype: str = "auto") -> Model:
    """The model that a `config.json` describes. `dtype` is the KV's; `auto` is the model's own.

    Raises `ConfigError` that names the key and what is allowed.
    """
    return _Reader(config).model(dtype)


class _Reader:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self._outer = config
        self._prefix = ""
        for name in _TEXT:
            if isinstance(config.get(name), Mapping):
                self._prefix, config = f"{name}.", config[name]
                break
        self.type = str(config.get("model_type", self._outer.get("model_type", "")))
        self._config = {**_DEFAULTS.get(self.type, {}), **{k: v for k, v in config.items() if v is not None}}
        self.notes: list[str] = []

    def model(self, dtype: str) -> Model:
        for key in _STATES:
            if key in self._config:
                raise ConfigError(
                    f"{self._at(key)}: some layers keep a state instead of KV; kvcore caches attention only"
                )
        depth, heads = self.number("layers"), self.number("heads")
        if depth > MAX_LAYERS:
            raise ConfigError(f"{self._at(_NAMES['layers'][0])} is {depth}: at most {MAX_LAYERS} layers are possible")
        hidden = self.number("hidden")
        name, element_bytes = self._dtype(dtype)
        layers, attention, score, matrices = self._attention(depth, heads, hidden)
        shared = self.optional("num_kv_shared_layers") or 0
        if shared:
            self.notes.append(f"the last {shared} layers use the KV of others")
        if "index_head_dim" in self._config:
            self.notes.append("the keys of its sparse attention's indexer are not counted")
        max_tokens = self._any("max_tokens")
        if max_tokens is None:
            self.notes.append(f"no {_NAMES['max_tokens'][0]}: {UNSTATED_TOKENS} tokens are assumed")
        return Model(
            attention=attention,
            layers=tuple(layers[: depth - shared]),
            depth=depth,
            heads=heads,
            score_elements=score,
            parameters=depth * matrices + self._mlp(depth, hidden),
            max_tokens=max_tokens or UNSTATED_TOKENS,
            dtype=name,
            element_bytes=element_bytes,
            notes=tuple(self.notes),
        )

    # -- parts -------------------------------------------------------------------------------------------------------

    def _attention(self, depth: int, heads: int, hidden: int) -> tuple[list[Layer], str, int, int]:
        """The layers, the kind, the elements of a score, and the parameters of one layer's matrices."""
        windows = self._windows(depth)
        if (latent := self.optional("kv_lora_rank")) is not None:
            rope, value = self.key("qk_rope_head_dim"), self.key("v_head_dim")
            query = self.key("qk_nope_head_dim") + rope
            low = self.optional("q_lora_rank")
            matrices = hidden * heads * query if low is None else low * (hidden + heads * query)
            matrices += hidden * (latent + rope) + latent * heads * (query - rope + value) + heads * value * hidden
            layers = [Layer(1, latent + rope, w) for w in windows]
            return layers, f"MLA, a latent of {latent} + {rope}", query + value, matrices
        kv_heads = self._kv_heads(heads)
        size = self._head_size(heads, hidden)
        kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
        text = f"{kind}, {kv_heads} KV heads of {size}" + (f" for {heads} query heads" if kv_heads != heads else "")
        matrices = hidden * size * (2 * heads + 2 * kv_heads)
        return [Layer(kv_heads, 2 * size, w) for w in windows], text, 2 * size, matrices

    def _kv_heads(self, heads: int) -> int:
        kv_heads = self._any("kv_heads")
        if kv_heads is None:
            kv_heads = 1 if self._config.get("multi_query") is True else heads
        if heads % kv_heads:
            raise ConfigError(
                f"{self._at(_NAMES['kv_heads'][0])} is {kv_heads}: it must divide the {heads} query heads"
            )
        return kv_heads

    def _head_size(self, heads: int, hidden: int) -> int:
        given = self.optional("head_dim")
        if given is not None:
            return given
        if hidden % heads:
            raise ConfigError(
                f"{self._at('head_dim')} is missing, and {hidden} (hidden_size) / {heads} (heads) is no whole number: "
                "write it into the file"
            )
        return hidden // heads

    def _windows(self, depth: int) -> list[int | None]:
        """The window of each layer."""
        if "attention_chunk_size" in self._config:
            raise ConfigError(
                f"{self._at('attention_chunk_size')}: chunked attention is not cached; kvcore caches full attention, "
                "sliding windows and MLA"
            )
        window = self.optional("sliding_window")
        types = self._config.get("layer_types")
        if types is not None:
            return [self._window(i, kind, window) for i, kind in enumerate(self._kinds(types, depth))]
        if window is None or self._config.get("use_sliding_window") is False:
            return [None] * depth
        every = self.optional("sliding_window_pattern") or _FULL_EVERY.get(self.type)
        if every is not None:
            return [window if (i + 1) % every else None for i in range(depth)]
        first = self._config.get("max_window_layers", 0) if self._config.get("use_sliding_window") is True else 0
        return [window if i >= first else None for i in range(depth)]

    def _kinds(self, types: Any, depth: int) -> list[Any]:
        if not isinstance(types, list) or len(types) != depth:
            given = f"has {len(types)} entries" if isinstance(types, list) else f"is {types!r}"
            raise ConfigError(
                f"{self._at('layer_types')} {given}: a list with one entry for each of {depth} layers is needed"
            )
        return types

    def _window(self, i: int, kind: Any, window: int | None) -> int | None:
        if kind == "full_attention":
            return None
        if kind != "sliding_attention":
            raise ConfigError(
                f"{self._at('layer_types')}[{i}] is {kind!r}: kvcore caches full_attention and sliding_attention"
            )
        if window is None:
            raise ConfigError(f"{self._at('sliding_window')} is missing, and layer_types[{i}] is sliding_attention")
        return window

    def _mlp(self, depth: int, hidden: int) -> int:
        """Parameters of all layers' MLPs that one token passes."""
        matrices = 2 if self.type in _PLAIN_MLP else 3
        experts, inner = self._any("experts"), self._any("inner")
        if inner is None:
            inner = 4 * hidden
            self.notes.append(f"no {_NAMES['inner'][0]}: {inner} is assumed")
        if not experts:
            return depth * matrices * hidden * inner
        size = self.optional("moe_intermediate_size") or inner
        shared = self.optional("shared_expert_intermediate_size") or size * (self.optional("n_shared_experts") or 0)
        active = self.number("active_experts") * size + shared
        dense = min(depth, self.optional("first_k_dense_replace") or 0)
        return dense * matrices * hidden * inner + (depth - dense) * hidden * (matrices * active + experts)

    def _dtype(self, wanted: str) -> tuple[str, int]:
        given = wanted
        if wanted == "auto":
            found = [c[k] for c in (self._config, self._outer) for k in ("dtype", "torch_dtype") if c.get(k)]
            if not found:
                self.notes.append("no dtype: bfloat16 is assumed; --dtype says another")
                return "bfloat16", 2
            given = str(found[0]).removeprefix("torch.")
        name = _SHORT.get(given, "fp8" if given.startswith(("fp8", "float8")) else given)
        if name not in ELEMENT_BYTES:
            what = "--dtype" if wanted != "auto" else self._at("dtype")
            raise ConfigError(f"{what} is {given!r}: choose one of {', '.join(ELEMENT_BYTES)} with --dtype")
        return name, ELEMENT_BYTES[name]

    # -- numbers -----------------------------------------------------------------------------------------------------

    def number(self, what: str) -> int:
        """A number that must be there, under any of its names."""
        found = self._any(what)
        if found is None:
            names = " or ".join(_NAMES[what])
            raise ConfigError(f"{self._at(_NAMES[what][0])} is missing: the file must have {names}")
        return found

    def key(self, key: str) -> int:
        """A number that must be there."""
        found = self.optional(key)
        if found is None:
            raise ConfigError(f"{self._at(key)} is missing: it is a whole number above 0")
        return found

    def optional(self, key: str) -> int | None:
        """A number, or None where the key is absent or null. 0 is none."""
        value = self._config.get(key)
        if value is None or value == 0:
            return None
        if type(value) is not int or not 0 < value < 1 << 40:
            raise ConfigError(f"{self._at(key)} is {brief(value)}: a whole number above 0 is needed")
        return value

    def _any(self, what: str) -> int | None:
        for key in _NAMES[what]:
            if (value := self.optional(key)) is not None:
                return value
        return None

    def _at(self, key: str) -> str:
        return f"{self._prefix}{key}"
