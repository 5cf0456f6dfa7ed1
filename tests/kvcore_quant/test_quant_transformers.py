"""A tier with the quant serde under a real engine: transformers' generate(), and again after a restart."""

import warnings

import pytest

with warnings.catch_warnings():  # transformers and torch warn of their own deprecations
    warnings.simplefilter("ignore")
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

import torch

from kvcore_transformers import PrefixCache

TOKENS = 200


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=2, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def first_scores(cache: PrefixCache, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the first token after the prompt."""
    done = cache.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return done.logits[0]


@pytest.mark.parametrize(("form", "most"), [("fp8", 0.05), ("int4", 0.15)])
def test_a_prefix_comes_back_near_after_a_restart(tmp_path, form, most):
    torch.set_num_threads(1)
    ids = torch.randint(3, 512, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    flags = {"l1.size": "64MiB", "chunk_tokens": 32, "lookup_timeout": "20s"}
    storage = {"storage": {"plugin": "disk", "path": str(tmp_path)}, "read": "always"}
    lossy = {**flags, "l2": [{**storage, "serde": [{"plugin": "quant", "format": form}]}]}
    with PrefixCache(model(), flags=lossy) as cache:
        computed = first_scores(cache, ids)
        assert cache.last.stored_chunks == 6
    with PrefixCache(model(), flags=lossy) as cache:
        loaded = first_scores(cache, ids)
        assert cache.last.reused_tokens == 192
    error = float((loaded - computed).square().mean().sqrt() / computed.std())
    assert 0 < error < most
    with PrefixCache(model(), flags={**flags, "l2": [storage]}) as cache:
        exact = first_scores(cache, ids)
        assert cache.last.reused_tokens == 0, "exact KV has another namespace"
    assert torch.allclose(exact, computed, atol=1e-5)
