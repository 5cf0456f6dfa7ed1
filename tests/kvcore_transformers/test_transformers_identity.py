"""KV is reused by a model with the same weights only, also when they are changed in memory."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers_small import FLAGS, cached, gqa, plain, tokens

from kvcore.api import LayoutError
from kvcore_transformers import PrefixCache, identity
from kvcore_transformers.calls import Row


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    with PrefixCache(gqa(), flags=FLAGS) as made:
        yield made


def one_element(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 7] += 0.5


def merged(model: Any) -> None:
    """As adapters are merged: through `.data`, which counts nothing."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data += 0.1


def trained(model: Any) -> None:
    model(tokens(20), labels=tokens(20)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()


def loaded(model: Any) -> None:
    model.load_state_dict(gqa(seed=7).state_dict())


def replaced(model: Any) -> None:
    model.model.layers[0].mlp.down_proj = copy.deepcopy(model.model.layers[1].mlp.down_proj)


def halved(model: Any) -> None:
    model.to(torch.bfloat16)


def other_positions(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


@pytest.mark.parametrize("change", [one_element, merged, trained, loaded, replaced, halved, other_positions])
def test_changed_weights_are_another_model(cache: PrefixCache, change: Callable[[Any], None]) -> None:
    before = cached(cache, tokens(100))
    change(cache.model)
    expected = plain(cache.model, tokens(100))
    for reused in (0, 96):
        assert torch.equal(cached(cache, tokens(100)), expected)
        assert (cache.last.reused_tokens, cache.last.refused) == (reused, "")
    if change is one_element:  # and back again: what was kept of the first is found again
        with torch.no_grad():
            cache.model.model.layers[1].mlp.up_proj.weight[5, 7] -= 0.5
        fresh = gqa()
        cache.model.load_state_dict(fresh.state_dict())
        assert torch.equal(cached(cache, tokens(100)), before)
        assert cache.last.reused_tokens == 96


def test_a_change_that_leaves_no_trace_needs_refresh(cache: PrefixCache) -> None:
    cached(cache, tokens(100))
    weight = cache.model.model.layers[1].mlp.up_proj.weight
    weight.data[5, 7] += 0.5
    cached(cache, tokens(100))
    assert cache.last.reused_tokens == 96, "this is the limit that the documentation tells of"
    cache.refresh()
    cached(cache, tokens(100))
    assert cache.last.reused_tokens == 0


def test_the_same_weights_are_the_same_model_wherever_they_are() -> None:
    assert identity.fingerprint(gqa()) == identity.fingerprint(gqa()) != identity.fingerprint(gqa(seed=1))
    moved = gqa()
    moved.config._name_or_path = "/elsewhere"
    assert identity.fingerprint(moved) == identity.fingerprint(gqa())


def test_the_attention_implementation_and_autocast_count(cache: PrefixCache) -> None:
    cached(cache, tokens(100))
    cache.model.set_attn_implementation("eager")
    cached(cache, tokens(100))
    assert cache.last.reused_tokens == 0
    cache.model.set_attn_implementation("sdpa")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cached(cache, tokens(100))
        assert cache.last.reused_tokens == 0
    cached(cache, tokens(100))
    assert cache.last.reused_tokens == 96


def test_weights_that_cannot_be_read_must_be_named() -> None:
    model = gqa()
    model.is_quantized = True
    with pytest.raises(LayoutError, match="name them yourself, such as PrefixCache"):
        PrefixCache(model, flags=FLAGS)
    with PrefixCache(model, flags=FLAGS, weights="gqa-nf4") as cache:
        for reused in (0, 96):
            cached(cache, tokens(100))
            assert cache.last.reused_tokens == reused


def test_the_hashes_of_chunks_are_pinned(cache: PrefixCache) -> None:
    (chunk,) = Row(5, list(range(32))).hashes(cache._space())
    assert chunk.hex() == "de219d0540da1443b51599caa80abd3982faa89e10f3c26064c80ee2c9db499b"
