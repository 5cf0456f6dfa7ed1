"""What cannot be reused is computed, and one sentence says why; a model of which nothing can is refused at once."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers_small import FLAGS, SHARED, cached, gqa, plain, tokens

from kvcore.api import ConfigError, LayoutError
from kvcore_transformers import PrefixCache
from kvcore_transformers.calls import read


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    with PrefixCache(gqa(), flags=FLAGS) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_cache": False}, "use_cache is False"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is set"),
        ({"assistant_early_exit": 1}, "assistant_early_exit is set"),
        ({"prefill_chunk_size": 40}, "prefill_chunk_size is set"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is set"),
        ({"position_ids": torch.arange(100)[None]}, "KV may depend on position_ids"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_calls_that_do_without(cache: PrefixCache, options: dict[str, Any], reason: str) -> None:
    cached(cache, tokens(100))
    expected = plain(cache.model, tokens(100), **options)
    for _ in range(2):
        out = cached(cache, tokens(100), **options)
        assert reason in cache.last.refused
        assert cache.last.reused_tokens == cache.last.stored_chunks == 0
        same = [x if isinstance(x, torch.Tensor) else x.sequences for x in (out, expected)]
        assert torch.equal(*same)


def test_a_cache_of_the_callers_own_is_left_alone(cache: PrefixCache) -> None:
    cached(cache, tokens(100))
    past = cache.load(tokens(100)[:, :64])
    out = cached(cache, tokens(100), past_key_values=past)
    assert cache.last.refused == "past_key_values was given"
    assert torch.equal(out, plain(cache.model, tokens(100)))


def test_no_cache_of_the_callers_own_is_none(cache: PrefixCache) -> None:
    cached(cache, tokens(100))
    out = cached(cache, tokens(100), past_key_values=None)
    assert (cache.last.refused, cache.last.reused_tokens) == ("", 96)
    assert torch.equal(out, plain(cache.model, tokens(100)))


@pytest.mark.parametrize("images", [[torch.zeros(2)], {"a": (torch.zeros(2),)}], ids=["list", "nested"])
def test_tensors_beside_the_tokens_however_they_are_given(images: Any) -> None:
    found = read(gqa(), tokens(10), {"pixel_values": images, "bad_words_ids": [[3]]})
    assert found == "KV may depend on pixel_values, not on tokens alone"


def test_padding_that_is_not_on_the_left(cache: PrefixCache) -> None:
    mask = torch.ones(1, 100, dtype=torch.long)
    mask[0, 50] = 0
    cached(cache, tokens(100), attention_mask=mask)
    assert "row 0 of attention_mask has zeros that are not padding on the left" in cache.last.refused
    with pytest.raises(ValueError, match="not padding on the left"):
        cache.load(tokens(100), mask)


def test_padding_without_a_mask(cache: PrefixCache) -> None:
    ids = tokens(100)
    ids[0, :10] = 0
    expected = plain(cache.model, ids)
    for _ in range(2):
        assert torch.equal(cached(cache, ids), expected)
        assert cache.last.refused == "there is padding, but no attention_mask"


def test_a_model_in_training_mode(cache: PrefixCache) -> None:
    cache.model.train()
    cached(cache, tokens(100))
    assert cache.last.refused == "the model is in training mode: call model.eval()"


def test_a_hook_may_change_what_is_computed(cache: PrefixCache) -> None:
    cached(cache, tokens(100))
    seen = []
    handle = cache.model.model.layers[1].register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    cached(cache, tokens(100), max_new_tokens=1)
    assert "a forward hook on model.layers.1" in cache.last.refused
    assert seen == [100], "the hook sees the whole prompt"
    handle.remove()
    cached(cache, tokens(100))
    assert cache.last.reused_tokens == 96


def test_another_forward_method(cache: PrefixCache) -> None:
    layer = cache.model.model.layers[0]
    layer.forward = layer.forward
    cached(cache, tokens(100))
    assert "another forward method on model.layers.0" in cache.last.refused


def test_the_reason_is_logged_once(cache: PrefixCache, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvcore.transformers"):
        for _ in range(3):
            cached(cache, tokens(40), use_cache=False)
    assert [r.getMessage() for r in caplog.records] == [
        "generate() does without the cache: use_cache is False (logged once)"
    ]


def small(**more: Any) -> dict[str, Any]:
    return {**SHARED, "num_hidden_layers": 2, **more}


def test_models_that_are_refused() -> None:
    t5 = T5ForConditionalGeneration(T5Config(d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=2, vocab_size=64))
    with pytest.raises(LayoutError, match="T5ForConditionalGeneration cannot reuse prefixes: it is an encoder-decoder"):
        PrefixCache(t5, flags=FLAGS)
    mamba = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    with pytest.raises(LayoutError, match="MambaForCausalLM cannot reuse prefixes: its cache has layers of the kind"):
        PrefixCache(mamba, flags=FLAGS)
    config = Qwen3NextConfig(**small(num_key_value_heads=2, layer_types=["linear_attention", "full_attention"]))
    config.num_experts, config.linear_num_value_heads, config.linear_num_key_heads = 2, 2, 2
    with pytest.raises(LayoutError, match="LinearAttentionLayer, whose state cannot be cut at a token"):
        PrefixCache(Qwen3NextForCausalLM(config), flags=FLAGS)
    both = Gemma3ForCausalLM(
        Gemma3TextConfig(**small(num_key_value_heads=1, head_dim=32), use_bidirectional_attention=True)
    )
    with pytest.raises(LayoutError, match="its tokens attend to later ones"):
        PrefixCache(both, flags=FLAGS)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    scaled = LlamaForCausalLM(LlamaConfig(**small(rope_parameters=rope)))
    with pytest.raises(LayoutError, match=r"rotary embedding \(dynamic\) depends on the length of the whole prompt"):
        PrefixCache(scaled, flags=FLAGS)


def test_a_wrong_configuration_is_the_users_to_see() -> None:
    with pytest.raises(ConfigError, match="l1"):
        PrefixCache(gqa(), flags={"l1.siez": "1GiB"})
