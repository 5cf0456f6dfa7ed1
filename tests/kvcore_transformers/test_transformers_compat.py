"""Every API of transformers that is relied on, one by one: a new version that changes one fails with its name."""

import inspect
from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers_small import gqa, sliding, tokens

from kvcore.api import Finding
from kvcore_transformers import _compat, integration
from kvcore_transformers.integration import TransformersIntegration

KEYS = torch.ones(1, 2, 5, 4)


def layer() -> DynamicLayer:
    made = DynamicLayer()
    made.lazy_initialization(KEYS, KEYS)
    made.keys, made.values = KEYS, KEYS
    return made


APIS: dict[str, Callable[[], bool]] = {
    "DynamicCache(config=...) chooses the kinds of layers": lambda: {
        type(x) for x in DynamicCache(config=sliding().config).layers
    }
    == {DynamicLayer, DynamicSlidingWindowLayer},
    "DynamicCache() without a configuration begins without layers": lambda: DynamicCache().layers == [],
    "DynamicCache.layers takes layers, DynamicCache.get_seq_length": lambda: (
        _compat.filled_cache([(KEYS, KEYS)]).get_seq_length() == 5
    ),
    "DynamicCache.batch_repeat_interleave": lambda: "repeats" in inspect.signature(
        DynamicCache.batch_repeat_interleave
    ).parameters,
    "DynamicLayer.lazy_initialization, .keys, .values, .get_seq_length": lambda: layer().get_seq_length() == 5,
    "DynamicLayer.update appends to keys and values that were put there": lambda: (
        layer().update(KEYS, KEYS)[0].shape[2] == 10
    ),
    "DynamicLayer.keys are [batch, heads, tokens, size]": lambda: (
        (cache := DynamicCache(), gqa()(tokens(7), past_key_values=cache))[0].layers[0].keys.shape == (1, 2, 7, 16)
    ),
    "PreTrainedModel.config.get_text_config(decoder=)": lambda: gqa().config.get_text_config(decoder=True) is not None,
    "PreTrainedConfig.to_dict": lambda: gqa().config.to_dict()["hidden_size"] == 64,
    "PreTrainedConfig._attn_implementation": lambda: gqa().config._attn_implementation == "sdpa",
    "PreTrainedConfig.is_encoder_decoder": lambda: gqa().config.is_encoder_decoder is False,
    "PreTrainedModel.generation_config": lambda: hasattr(gqa().generation_config, "num_beams"),
    "GenerationMixin._supports_default_dynamic_cache": lambda: gqa()._supports_default_dynamic_cache() is True,
    "GenerationMixin.generate(inputs, ...)": lambda: (
        list(inspect.signature(GenerationMixin.generate).parameters)[1] == "inputs"
    ),
    "GenerationMixin.generate computes only what past_key_values lacks": lambda: only_the_rest(),
    "PreTrainedModel.forward(input_ids, past_key_values, use_cache)": lambda: {
        "input_ids", "past_key_values", "use_cache",
    } <= set(inspect.signature(type(gqa()).forward).parameters),
    "PreTrainedModel.named_parameters": lambda: issubclass(PreTrainedModel, torch.nn.Module),
    "torch.Tensor._version counts operations in place": lambda: counts(),
    "torch.nn.modules.module._global_forward_hooks": lambda: hasattr(
        torch.nn.modules.module, "_global_forward_hooks"
    ),
    "torch.nn.Module._forward_hooks, ._forward_pre_hooks": lambda: {"_forward_hooks", "_forward_pre_hooks"} <= set(
        gqa().__dict__
    ),
}  # fmt: skip


def only_the_rest() -> bool:
    model, seen = gqa(), []
    past = _compat.empty_cache()
    model(tokens(20), past_key_values=past, use_cache=True)
    model.model.embed_tokens.register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    model.generate(tokens(30), past_key_values=past, max_new_tokens=1)
    return seen == [10]


def counts() -> bool:
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    return tensor._version > before


@pytest.mark.parametrize("api", APIS)
def test_the_api_is_as_it_was(api: str) -> None:
    assert APIS[api](), f"transformers {version('transformers')} has changed: {api}"


def test_the_installed_version_is_the_one_tested() -> None:
    assert _compat.is_tested(version("transformers"))
    assert not _compat.is_tested(_compat.TESTED + "0")


def found(monkeypatch: pytest.MonkeyPatch, installed: str) -> Finding:
    monkeypatch.setattr(integration, "version", lambda name: installed)
    (finding,) = TransformersIntegration(None, None).check()
    return finding


def test_doctor_says_which_version_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, "5.19.3").level == "ok"
    other = found(monkeypatch, "6.0")
    assert (other.level, other.remedy) == ("warning", "if generate() fails, pip install transformers==5.19.*")
    assert "PrefixCache(model" in TransformersIntegration(None, None).usage()
