"""The CUDA path without a GPU: its kernels run as host code, and NVRTC compiles them."""

import re
from dataclasses import replace

import numpy as np
import pytest
import quant_host
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_layouts import ARRANGED, Shape, payload_of, rows_payload, to_elements

from kvcore.api import Context, ObjectLayout, PluginError
from kvcore.testing.sample import kv_sample
from kvcore_quant import cuda
from kvcore_quant.config import QuantConfig
from kvcore_quant.serde import QuantSerde

FORMATS = ("fp8", "int4")


def make(form: str) -> QuantSerde:
    return QuantSerde(QuantConfig(format=form), Context())


def on_gpu(form: str, library=None) -> QuantSerde:
    """With the kernels as host code."""
    serde = make(form)
    serde._gpu = cuda.CudaCoder(quant_host.HostDevice(library))
    return serde


def differs(form: str, payload: bytes, layout: ObjectLayout, library=None) -> str:
    """What the two paths do not have in common, or nothing."""
    here, there = make(form), on_gpu(form, library)
    encoded, other = bytes(here.encode(memoryview(payload), layout)), bytes(there.encode(memoryview(payload), layout))
    if encoded != other:
        return "encoded"
    into, back = bytearray(len(payload)), bytearray(len(payload))
    here.decode(memoryview(encoded), memoryview(into), layout)
    there.decode(memoryview(encoded), memoryview(back), layout)
    return "decoded" if into != back else ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arrangement", ARRANGED)
@pytest.mark.parametrize("form", FORMATS)
def test_both_paths_write_and_read_the_same_bytes(form, arrangement, dtype):
    assert differs(form, *payload_of(arrangement, Shape(layers=1, heads=2, ranks=2), dtype)) == ""


@settings(max_examples=12, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    arrangement=st.sampled_from(["tokens first", "heads first", "keys transposed", "keys beside values"]),
    shape=st.builds(
        Shape,
        layers=st.integers(1, 3),
        blocks=st.integers(1, 6),
        tokens=st.sampled_from([1, 2, 7, 13, 16, 24]),
        heads=st.integers(1, 2),
        size=st.sampled_from([24, 36, 64, 80]),
        ranks=st.integers(1, 2),
    ),
    scale=st.sampled_from([1.0, 1e-4, 1e-30, 1e-39, 1e3]),
)
def test_any_shape_and_size_of_numbers(form, dtype, arrangement, shape, scale):
    payload, layout = payload_of(arrangement, shape, "float32")
    with np.errstate(over="ignore", under="ignore"):
        elements = to_elements(np.frombuffer(payload, np.float32) * np.float32(scale), dtype)
    width = 4 if dtype == "float32" else 2
    sizes = tuple(n // 4 * width for n in layout.layer_block_bytes)
    assert differs(form, elements, ObjectLayout(shape.blocks, shape.ranks, sizes, dtype, width)) == ""


@pytest.mark.parametrize("form", FORMATS)
def test_real_kv_and_rows(form):
    data, layout = kv_sample()
    three = layout.layer_block_bytes[:3]
    assert differs(form, data[: sum(three)], replace(layout, layer_block_bytes=three)) == ""
    assert differs(form, *rows_payload(Shape(heads=1), 6)) == ""


@pytest.mark.parametrize("form", FORMATS)
def test_what_cannot_be_encoded_is_told(form):
    payload, layout = payload_of("heads first", Shape(layers=2, heads=2))
    elements = np.frombuffer(payload, "<u2").copy()
    elements[[1234, -1]] = 0x7FC0, 0xFF80
    assert differs(form, elements.tobytes(), layout) == ""


@pytest.mark.parametrize("form", FORMATS)
def test_elements_at_odd_addresses_are_left_to_the_cpu(form):
    payload, layout = payload_of("heads first", Shape(layers=1))
    odd = ObjectLayout(layout.blocks, 1, (333, *layout.layer_block_bytes), "bfloat16", 2)
    assert differs(form, bytes(333 * layout.blocks) + payload, odd) == ""
    odd = ObjectLayout(1, 1, (333, 8192), "bfloat16", 2)
    assert differs(form, bytes(333) + payload[:8192], odd) == ""


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("method", ["stream", "allocate", "copy", "launch", "synchronize"])
def test_a_gpu_that_fails_leaves_it_to_the_cpu(form, method, monkeypatch, caplog):
    def fails(*_):
        raise MemoryError("out of it")

    payload, layout = payload_of("heads first", Shape(layers=1, heads=1))
    wanted = bytes(make(form).encode(memoryview(payload), layout))
    serde = on_gpu(form)
    monkeypatch.setattr(serde._gpu._device, method, fails)
    for _ in range(2):
        assert bytes(serde.encode(memoryview(payload), layout)) == wanted
    assert [record.getMessage() for record in caplog.records] == [
        "serde quant: the GPU failed (MemoryError('out of it')): from now on the CPU encodes and decodes"
    ]
    serde, into, expected = on_gpu(form), bytearray(len(payload)), bytearray(len(payload))
    monkeypatch.setattr(serde._gpu._device, method, fails)
    serde.decode(memoryview(wanted), memoryview(into), layout)
    make(form).decode(memoryview(wanted), memoryview(expected), layout)
    assert into == expected


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("i / run * block", "i / run * run"),
        ("piece / outer * cell.across * block", "piece / outer * block"),
        ("piece % outer * run", "piece % outer"),
        ("subtract(high, base)", "subtract(high, low)"),
        ("bits < 0x80 ? 0x80 : bits", "bits"),
        ("if (!good) bad[item / tiles] = 1;", ""),
    ],
)
def test_a_wrong_kernel_is_found(right, wrong):
    """What the comparison above is worth: each of these mistakes shows in one of its cases."""
    source = quant_host.SOURCE.read_text(encoding="utf-8")
    assert right in source
    library = quant_host.compiled(source.replace(right, wrong))
    shape = Shape(layers=1, heads=1)
    payload, layout = payload_of("tokens first", shape)
    wide, same = payload_of("tokens first", shape, "float32")
    spoiled = payload[:-2] + b"\x80\x7f"
    equal = ObjectLayout(1, 1, (4096,), "float32", 4)
    cases = [(payload, layout), (wide, same), (spoiled, layout), (bytes(4096), equal)]
    assert any(differs(form, *case, library) for form in FORMATS for case in cases)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile_for_gpus(arch):
    """By NVRTC with the options that CuPy gives it: no register is spilt, and no instruction of the arithmetic flushes
    subnormals or fuses two, so that a GPU's bits are the CPU's."""
    from cupy.cuda import nvrtc

    source = quant_host.SOURCE.read_text(encoding="utf-8")
    program = nvrtc.createProgram(source, "kernels.cu", [], [])
    options = [f"--gpu-architecture={arch}", "-std=c++17", "-ftz=true", "--ptxas-options=-v"]
    nvrtc.compileProgram(program, options)
    log = nvrtc.getProgramLog(program)
    assert "warning" not in log
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0", "0"], log
    assert nvrtc.getCUBIN(program)[:4] == b"\x7fELF"
    text = nvrtc.getPTX(program).decode()
    assert set(re.findall(r"\.entry (\w+)", text)) == {"kvcore_quant_encode", "kvcore_quant_decode"}
    assert not re.findall(r"\b(?:fma|mul|add|sub|div)\.[a-z.]*ftz", text)
    assert not re.findall(r"\bfma\.", text)


def test_no_gpu_is_said_at_start():
    with pytest.raises(PluginError, match=r"device is cuda:63, and CuPy does not work there .* or leave out `device`"):
        QuantSerde(QuantConfig(device="cuda:63"), Context())
