import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.multimodal import MultiModalConfig

from kvcore_vllm import media

pytestmark = pytest.mark.vllm


def identity(path: Path, **settings: Any) -> str:
    model = SimpleNamespace(model=str(path), revision=None, multimodal_config=MultiModalConfig(**settings))
    return media.identity(model)


def test_text_models_have_none() -> None:
    assert media.identity(SimpleNamespace(multimodal_config=None)) == ""


@pytest.mark.parametrize(
    "settings",
    [
        {"mm_processor_kwargs": {"resample": 0}},
        {"media_io_kwargs": {"video": {"num_frames": 8}}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_change_what_the_model_sees(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert identity(tmp_path) == identity(tmp_path)
    assert identity(tmp_path, **settings) != identity(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"limit_per_prompt": {"image": 1}},
        {"mm_processor_cache_gb": 1},
        {"skip_mm_profiling": True},
        {"allow_missing_mm_embeddings": True},  # so with kv_role kv_consumer, and not with kv_producer
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_do_not(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert identity(tmp_path, **settings) == identity(tmp_path)


def test_the_settings_left_out_exist() -> None:
    assert set(media._NOT_IN_KV) < {field.name for field in dataclasses.fields(MultiModalConfig)}


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json", "processing_model.py"])
def test_processor_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1")
    before = identity(tmp_path)
    (tmp_path / name).write_text("2")
    assert identity(tmp_path) != before
    (tmp_path / name).write_text("1")
    assert identity(tmp_path) == before


def test_a_model_of_one_file_has_its_processor_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    before = identity(tmp_path / "model.gguf")
    (tmp_path / "processor_config.json").write_text("{}")
    assert identity(tmp_path / "model.gguf") != before


def test_other_libraries_make_other_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(tmp_path)
    monkeypatch.setattr(media, "version", lambda name: "0")
    assert identity(tmp_path) != before


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "refused"), [(4, True, False), (4, False, False), (0, True, False), (0, False, True)]
)
def test_images_without_names(cache_gb: int, prefix_caching: bool, refused: bool) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=MultiModalConfig(mm_processor_cache_gb=cache_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert (media.obstacle(config) is not None) == refused
