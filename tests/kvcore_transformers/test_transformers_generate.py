"""`generate` says the same with and without the cache, in float32, for every kind of model, batch and decoding."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers_small import FLAGS, MODELS, cached, gqa, plain, tokens

from kvcore.explain.explain import explain_prompt
from kvcore.explain.models import Question
from kvcore_transformers import PrefixCache


@pytest.fixture(params=sorted(MODELS))
def cache(request: pytest.FixtureRequest) -> Iterator[PrefixCache]:
    with PrefixCache(MODELS[request.param](), flags=FLAGS) as made:
        yield made


@pytest.fixture
def simple() -> Iterator[PrefixCache]:
    with PrefixCache(gqa(), flags=FLAGS) as made:
        yield made


def batch(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of any length, padded on the left."""
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row
        mask[i, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def test_a_prompt_seen_before_is_loaded_but_for_its_last_token(cache: PrefixCache) -> None:
    prompt = tokens(160)
    expected = plain(cache.model, prompt)
    assert torch.equal(cached(cache, prompt), expected)
    assert (cache.last.reused_tokens, cache.last.stored_chunks, cache.last.refused) == (0, 5, "")
    assert torch.equal(cached(cache, prompt), expected)
    assert (cache.last.prompt_tokens, cache.last.reused_tokens, cache.last.refused) == (160, 159, "")


def test_a_common_prefix_is_loaded_whatever_follows(cache: PrefixCache) -> None:
    cached(cache, tokens(200))
    prompt = torch.cat([tokens(200)[:, :100], tokens(60, seed=9)], dim=1)
    assert torch.equal(cached(cache, prompt), plain(cache.model, prompt))
    assert cache.last.reused_tokens == 96
    early = torch.cat([tokens(20, seed=8), tokens(200)[:, 20:]], dim=1)
    assert torch.equal(cached(cache, early), plain(cache.model, early))
    assert cache.last.reused_tokens == 0, "the same tokens after others are not the same prefix"


def test_the_next_turn_of_a_conversation_finds_what_was_generated(cache: PrefixCache) -> None:
    said = cached(cache, tokens(100), max_new_tokens=40)
    turn = torch.cat([said, tokens(30, seed=3)], dim=1)
    assert torch.equal(cached(cache, turn), plain(cache.model, turn))
    assert cache.last.reused_tokens == 128


def test_a_batch_reuses_as_many_columns_as_its_worst_row(cache: PrefixCache) -> None:
    inputs = batch(tokens(150), tokens(150)[:, :90], tokens(120, seed=4))
    expected = plain(cache.model, **ids_first(inputs))
    assert torch.equal(cached(cache, **ids_first(inputs)), expected)
    assert cache.last.reused_tokens == 0
    assert torch.equal(cached(cache, **ids_first(inputs)), expected)
    # 64 of 90 tokens after 60 columns of padding, 96 of 120 after 30: columns 0 to 124 are in every row
    assert cache.last.reused_tokens == 124 + (124 - 60) + (124 - 30)
    other = batch(tokens(150), tokens(150, seed=5))
    assert torch.equal(cached(cache, **ids_first(other)), plain(cache.model, **ids_first(other)))
    assert cache.last.reused_tokens == 0, "one row is new"


def ids_first(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}


def test_padding_of_a_row_does_not_matter(simple: PrefixCache) -> None:
    cached(simple, tokens(100))
    inputs = batch(tokens(100), tokens(130))
    assert torch.equal(cached(simple, **ids_first(inputs)), plain(simple.model, **ids_first(inputs)))
    assert simple.last.reused_tokens == (96 - 30) + 96, "what was kept of an unpadded prompt"


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_beams(simple: PrefixCache, options: dict[str, Any]) -> None:
    prompt = tokens(100)
    expected = plain(simple.model, prompt, **options)
    for _ in range(2):
        assert torch.equal(cached(simple, prompt, **options), expected)
    assert simple.last.reused_tokens == 96
    assert torch.equal(cached(simple, prompt), plain(simple.model, prompt)), "what beams have stored is the prompt's"


def test_sampling_several_sequences_draws_the_same(simple: PrefixCache) -> None:
    prompt, options = tokens(100), {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(5)
    expected = plain(simple.model, prompt, **options)
    for _ in range(2):
        torch.manual_seed(5)
        assert torch.equal(cached(simple, prompt, **options), expected)


def test_a_returned_dict_has_the_whole_cache(simple: PrefixCache) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 5, "do_sample": False}
    prompt = tokens(100)
    expected = simple.model.generate(prompt, **options)
    for _ in range(2):
        out = simple.generate(prompt, **options)
        assert torch.equal(out.sequences, expected.sequences)
        assert out.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
        torch.testing.assert_close(out.scores, expected.scores)


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_bfloat16_is_kept_bit_by_bit(kind: str) -> None:
    with PrefixCache(MODELS[kind]().to(torch.bfloat16), flags=FLAGS) as cache:
        past = cache.load(tokens(100))
        cache.model(tokens(100), past_key_values=past, use_cache=True)
        assert cache.save(tokens(100), past) == 3
        again = cache.load(tokens(100))
        assert again.get_seq_length() == 96
        for mine, theirs in zip(again.layers, past.layers, strict=True):
            assert mine.keys.dtype == torch.bfloat16
            assert torch.equal(mine.keys, theirs.keys[:, :, :96])
            assert torch.equal(mine.values, theirs.values[:, :, :96])


def test_by_hand(simple: PrefixCache) -> None:
    prompt = tokens(100)
    expected = plain(simple.model, prompt)
    past = simple.load(prompt)
    assert past.get_seq_length() == 0
    out = plain(simple.model, prompt, past_key_values=past)
    assert simple.save(out, past) == 3
    past = simple.load(prompt)
    assert past.get_seq_length() == simple.last.reused_tokens == 96
    assert torch.equal(plain(simple.model, prompt, past_key_values=past), expected)
    assert simple.save(out, past) == 0, "nothing is new"


def test_by_hand_with_padding(simple: PrefixCache) -> None:
    inputs = batch(tokens(100), tokens(70, seed=2))
    past = simple.load(**inputs)
    out = simple.model.generate(**inputs, past_key_values=past, max_new_tokens=12, do_sample=False)
    assert simple.save(out, past, inputs["attention_mask"]) == 3 + 2
    past = simple.load(**inputs)
    assert past.get_seq_length() == 94, "64 tokens of the second row after 30 columns of padding"
    again = simple.model.generate(**inputs, past_key_values=past, max_new_tokens=12, do_sample=False)
    assert torch.equal(again, out)


def test_a_cache_that_does_not_hold_all_tokens_is_not_saved() -> None:
    with PrefixCache(MODELS["sliding"](), flags=FLAGS) as cache:
        out = cache.model.generate(tokens(100), max_new_tokens=2, return_dict_in_generate=True)
        assert cache.save(out.sequences, out.past_key_values) == 0
        assert "use the one that load() returned" in cache.last.refused


def test_applied_to_code_that_calls_the_models_own_generate(simple: PrefixCache) -> None:
    model, prompt = simple.model, tokens(100)
    expected = plain(model, prompt)
    with simple.applied():
        for _ in range(2):
            assert torch.equal(plain(model, prompt), expected)
        assert simple.last.reused_tokens == 96
    assert "generate" not in model.__dict__


def test_applied_leaves_somebody_elses_generate_where_it_was(simple: PrefixCache) -> None:
    model, prompt, calls = simple.model, tokens(100), []
    expected = plain(model, prompt)

    def theirs(*inputs: Any, **arguments: Any) -> Any:
        calls.append(1)
        return type(model).generate(model, *inputs, **arguments)

    model.generate = theirs
    with simple.applied(), simple.applied():
        assert torch.equal(plain(model, prompt), expected)
    assert model.generate is theirs
    assert calls == [1], "the cache has called it, too"


def test_a_prompt_is_explained_by_its_tokens(simple: PrefixCache) -> None:
    prompt = tokens(100, seed=9)
    cached(simple, prompt)
    for ids, found in ((prompt[0].tolist(), 3), ([1, *prompt[0].tolist()], 0)):
        (said,) = explain_prompt(simple.engine, Question(tokens=ids)).explanations
        assert (said.found.chunks, said.chunks) == (found, 3)


def test_generated_tokens_need_not_be_kept() -> None:
    with PrefixCache(gqa(), flags=FLAGS, generated=False) as cache:
        said = cached(cache, tokens(100), max_new_tokens=40)
        cached(cache, said)
        assert cache.last.reused_tokens == 96


def test_tenants_do_not_share() -> None:
    model = gqa()
    with PrefixCache(model, flags=FLAGS, tenant="a") as cache:
        cached(cache, tokens(100))
        cache._tenant = "b"
        cache._spaces.clear()
        cached(cache, tokens(100))
        assert cache.last.reused_tokens == 0
