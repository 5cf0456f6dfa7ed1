"""What people are told about KV on GPUs: by doctor, by the commands that need one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore.cli import child
from kvcore.cli.doctor import command as doctor

ROOT = Path(__file__).parents[2]
NO_GPU = not torch.cuda.is_available()
SPEED = {"direct": 24.6e9, "staged": 52.1e9, "span_s": 2e-6, "groups": 32}


def told(monkeypatch: pytest.MonkeyPatch, **found: Any) -> dict[str, tuple[str, str, str]]:
    """Level, text and remedy of doctor's findings about torch, where this is what torch says."""
    base = {"version": "2.13.0", "threads": 2, "cuda": False, "cuda_build": None, "rocm_build": None, "devices": []}
    value = {**base, "device": None, "copies": None, **found}
    monkeypatch.setattr(doctor, "call", lambda *words, timeout_s: child.Outcome(True, "", 0.0, value))
    return {f.subject: (f.level, f.text, f.remedy) for f in doctor._torch()}


def test_doctor_says_how_kv_on_a_gpu_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = {"cuda": True, "cuda_build": "13.0", "devices": ["NVIDIA H200"], "device": "cuda"}
    found = told(monkeypatch, **nvidia, copies={"kernels": True, "save": SPEED, "load": {**SPEED, "direct": 2e10}})
    assert found["cuda"][:2] == ("ok", "CUDA 13.0: NVIDIA H200")
    assert found["kv copies"][:2] == (
        "ok",
        "CUDA kernels: out 24.6 GB/s by kernel, 52.1 by copy engine; in 20 GB/s by kernel, 52.1 by copy engine",
    )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        copies = child._copies("cuda")
    level, text, remedy = told(monkeypatch, **nvidia, copies=copies)["kv copies"]
    assert level == "warning"
    assert "copied by torch operations, which is slower: CuPy cannot be imported" in text
    assert "pip install 'kvcore[cuda]'" in text
    assert remedy == "see docs/gpu.md"
    found = told(monkeypatch)
    assert "kv copies" not in found
    assert found["cuda"][0] == "note"


def test_doctor_names_devices_that_torch_copies_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("xpu", "npu", "hpu"):
        found = told(monkeypatch, device=kind, copies=child._copies(kind))
        assert found["kv copies"][0] == "note"
        assert f"the kernels are for NVIDIA GPUs, not for {kind}" in found["kv copies"][1]
        assert "cuda" not in found
    monkeypatch.setattr(torch.version, "hip", "7.1")
    rocm = {"cuda": True, "rocm_build": "7.1", "devices": ["AMD Instinct MI300X"], "device": "cuda"}
    found = told(monkeypatch, **rocm, copies=child._copies("cuda"))
    assert found["cuda"][1] == "ROCm 7.1: AMD Instinct MI300X"
    assert found["kv copies"][0] == "note"
    assert "built for ROCm" in found["kv copies"][1]


@pytest.mark.skipif(not NO_GPU, reason="a GPU is here: doctor shows its speeds")
def test_doctor_reports_a_driver_that_is_not_there() -> None:
    copies = child._copies("cuda")
    assert copies["kernels"] is False
    assert "cuda" in copies["why"].lower()


@pytest.mark.skipif(not NO_GPU, reason="a GPU is here: make test-gpu and make bench-gpu run on it")
@pytest.mark.parametrize("command", [["-m", "pytest", "tests/gpu/gpu_checks.py"], ["benchmarks/gpu.py"]])
def test_what_needs_a_gpu_fails_in_one_sentence(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs an NVIDIA GPU that torch can use, and torch sees none here" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_each_part_of_cupy_that_is_relied_on_is_there() -> None:
    """By name, since nothing can be called without a driver: a release that drops one is told here."""
    import cupy

    runtime = cupy.cuda.runtime
    for name in ("deviceGetAttribute", "hostRegister", "hostUnregister", "eventRecord", "streamWaitEvent"):
        assert callable(getattr(runtime, name)), name
    assert callable(runtime.memcpyAsync)
    assert runtime.memcpyDefault == 4
    assert runtime.cudaDevAttrCanUseHostPointerForRegisteredMem == 91
    for name in ("Device", "Stream", "Event", "Memory", "PinnedMemory"):
        assert isinstance(getattr(cupy.cuda, name), type), name
    for kind in (cupy.cuda.Memory, cupy.cuda.Stream, cupy.cuda.Event):
        assert "ptr" in dir(kind) or "ptr (" in kind.__doc__ or "~" + kind.__name__ + ".ptr" in kind.__doc__, kind
    assert cupy.cuda.PinnedMemory(0).ptr == 0
    assert "nvrtc" in cupy.RawModule.__doc__
    assert callable(cupy.RawModule.get_function)
