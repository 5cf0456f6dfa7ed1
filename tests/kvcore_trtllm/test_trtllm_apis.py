"""What kvcore-trtllm relies on in TensorRT-LLM: each part by itself, against the record of the published source. The
stand-in of the other tests is held to the same record, and so is TensorRT-LLM itself, where `KVCORE_TEST_TRTLLM` names
the Python of an environment that has it. Whatever has changed is named."""

import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trtllm_parts
from trtllm_parts import RECORD, fault, parts
from trtllm_runtime import Request, arguments

from docs_blocks import ROOT, lines
from kvcore.api import LayoutError
from kvcore_trtllm import _compat
from kvcore_trtllm.connector import KVCoreScheduler, KVCoreWorker

HERE = Path(__file__).parent
REAL = os.environ.get("KVCORE_TEST_TRTLLM")
HALVES = {"KvCacheConnectorScheduler": KVCoreScheduler, "KvCacheConnectorWorker": KVCoreWorker}
CALLED = {n: what for n, what in parts("interface", "optional").items() if "(" in what and "__init__" not in n}
OUR_OWN = {"close"}
"""For tests and for those who embed it: TensorRT-LLM calls nothing of this name."""


# -- the record, the stand-in, TensorRT-LLM --------------------------------------------------------------------------


@pytest.mark.parametrize("part", parts("interface", "package"))
def test_the_stand_in(part: str) -> None:
    assert fault(part, parts("interface", "package")[part]) == "", f"the stand-in differs in {part}"


@pytest.mark.parametrize("which", ["Scheduler", "Worker"])
def test_the_stand_in_asks_for_the_methods_that_must_be_there(which: str) -> None:
    assert trtllm_parts.abstract(which) == trtllm_parts.recorded_abstract(which)


@pytest.mark.parametrize("name", [*HALVES, "RequestData", "SchedulerOutput"])
def test_the_stand_in_has_nothing_else(name: str) -> None:
    public = {n for n in vars(getattr(trtllm_parts.interface(), name)) if not n.startswith("_")}
    recorded = {n.partition(".")[2] for n in parts("interface") if n.startswith(f"{name}.")}
    assert public <= recorded


if REAL:

    @pytest.fixture(scope="module")
    def real() -> Any:
        done = subprocess.run(
            [str(REAL), str(HERE / "trtllm_parts.py")], capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    @pytest.mark.parametrize("part", parts("interface", "optional", "package", "arguments", "request"))
    def test_tensorrt_llm(real: Any, part: str) -> None:
        assert real[part] == "", f"TensorRT-LLM has changed {part}"

    @pytest.mark.parametrize("which", ["Scheduler", "Worker"])
    def test_tensorrt_llm_asks_for_the_same_methods(real: Any, which: str) -> None:
        assert real[f"abstract methods of the {which}"] == ""


def test_the_pages_line_tells_what_differs() -> None:
    """docs/trtllm.md, with the stand-in for TensorRT-LLM."""
    (line,) = lines("docs/trtllm.md", "python tests/kvcore_trtllm/trtllm_parts.py")
    environment = {**os.environ, "PYTHONPATH": str(HERE / "standin")}
    command = [sys.executable, *shlex.split(line, comments=True)[1:]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=True)
    found = json.loads(done.stdout)
    assert {found[part] for part in parts("interface", "package")} == {""}


def test_a_drift_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = trtllm_parts.interface().KvCacheConnectorWorker
    monkeypatch.setattr(worker, "start_load_kv", lambda self, stream, layers: None)
    part = "KvCacheConnectorWorker.start_load_kv"
    assert fault(part, parts("interface")[part]) == "its parameters are self, stream, layers"
    assert fault("RequestData.other", "field") == "there is no field RequestData.other"
    assert "nonesuch" in fault("tensorrt_llm._utils:nonesuch", "()")
    assert "gone" in fault("tensorrt_llm.gone:name", "attribute")


# -- the connector ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", CALLED)
def test_the_connector_takes_what_it_is_called_with(part: str) -> None:
    half, _, name = part.partition(".")
    there = ", ".join(inspect.signature(getattr(HALVES[half], name)).parameters)
    assert f"({there})" == "(" + CALLED[part].partition("(")[2]


@pytest.mark.parametrize("half", HALVES)
def test_the_connector_has_no_method_that_nobody_calls(half: str) -> None:
    own = {n for n, v in vars(HALVES[half]).items() if callable(v) and not n.startswith("_")}
    assert own - OUR_OWN <= {part.partition(".")[2] for part in CALLED if part.startswith(half)}


def test_the_record_is_of_the_declared_source() -> None:
    assert RECORD["interface"]["read_in"][trtllm_parts.MODULES[0].replace(".", "/") + ".py"] == _compat.INTERFACE
    assert trtllm_parts.MODULES == _compat._MODULES


class Spy:
    """Notes what is read of it."""

    def __init__(self, real: Any) -> None:
        self.__dict__.update(real=real, read=set())

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.real, name)


def recorded(section: str, *classes: str) -> set[str]:
    """Names of these classes' parts, as they were once, too."""
    found = set()
    for part, what in parts(section).items():
        cls, _, name = part.rpartition(":")[2].rpartition(".")
        if cls in classes:
            found |= {name, *what.split(", once ")[1:]}
    return found


def test_nothing_else_is_read_of_the_arguments() -> None:
    cache = Spy(arguments().kv_cache_config)
    args = Spy(arguments())
    args.real.kv_cache_config = cache
    _compat.check_supported(args)
    for read in (_compat.ranks, _compat.block_tokens, _compat.model_of, _compat.computed_from):
        read(args)
    assert args.read | {"kv_connector_config"} == recorded("arguments", "TorchLlmArgs")
    assert cache.read == recorded("arguments", "KvCacheConfig")
    assert set(vars(arguments())) <= recorded("arguments", "TorchLlmArgs")


def test_nothing_else_is_read_of_a_request() -> None:
    request = Spy(Request(1, [5, 6, 7], 1))
    _compat.salt_of(request)
    _compat.tokens_of(request)
    assert request.read | {"request_id"} == recorded("request", "LlmRequest")


# -- what a request's KV depends on ----------------------------------------------------------------------------------


class Tensor:
    """Like torch's: its truth is that of its elements."""

    def __bool__(self) -> bool:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")


def _words(value: Any) -> str:
    """The same in every process, which an object's own are not."""
    return "+".join(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(
    ("more", "salt"),
    [
        ({}, ""),
        ({"cache_salt": "s"}, "cache_salt=s"),
        ({"cache_salt_id": 7}, "cache_salt_id=7"),
        ({"cache_salt_id": 0}, "cache_salt_id=0"),
        ({"multimodal_hashes": None, "py_multimodal_data": {}}, ""),
        ({"lora_task_id": 0}, None),
        ({"py_lora_path": "/adapters/one"}, None),
        ({"multimodal_hashes": [[1, 2]]}, None),
        ({"py_multimodal_data": {"image": 1}}, None),
        ({"multimodal_embedding": Tensor()}, None),
        ({"prompt_embedding_table": Tensor()}, None),
        ({"mrope_rotary_cos_sin": Tensor()}, None),
        ({"is_generation_only_request": True}, None),
        ({"is_generation_only_request": False}, ""),
        ({"is_generation_only_request": lambda: True}, None),
        ({"is_generation_only_request": lambda: False}, ""),
    ],
    ids=_words,
)
def test_what_a_request_is_named_by(more: dict[str, Any], salt: str | None) -> None:
    assert _compat.salt_of(SimpleNamespace(**more)) == salt


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("args", "kv_cache_compression_config", object(), "kv_cache_compression_config is set"),
        ("cache", "cross_kv_cache_fraction", 0.5, "cross_kv_cache_fraction is set"),
        ("cache", "max_attention_window", [4096], "max_attention_window is set"),
        ("args", "context_parallel_size", 2, "context_parallel_size is 2"),
    ],
)
def test_kv_that_is_not_that_of_a_prefix_is_refused(where: str, name: str, value: object, said: str) -> None:
    args = arguments()
    _compat.check_supported(args)
    setattr(args if where == "args" else args.kv_cache_config, name, value)
    with pytest.raises(LayoutError, match=said):
        _compat.check_supported(args)
