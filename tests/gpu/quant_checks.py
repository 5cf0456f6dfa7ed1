"""kvcore-quant's kernels on a real GPU: the bytes are the CPU's. Part of `make test-gpu`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "kvcore_quant"))  # the KV of the tests without a GPU

from quant_layouts import ARRANGED, Shape, payload_of

from kvcore.api import Context
from kvcore.testing.sample import kv_sample
from kvcore_quant.config import QuantConfig
from kvcore_quant.serde import QuantSerde


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_both_paths_write_and_read_the_same_bytes(form: str) -> None:
    here, there = (QuantSerde(QuantConfig(format=form, device=device), Context()) for device in ("cpu", "cuda"))
    objects = [kv_sample()]
    for arrangement in ARRANGED:
        objects += [payload_of(arrangement, Shape(ranks=2), dtype) for dtype in ("bfloat16", "float16", "float32")]
    for payload, layout in objects:
        encoded = bytes(here.encode(memoryview(payload), layout))
        assert bytes(there.encode(memoryview(payload), layout)) == encoded
        into, back = bytearray(len(payload)), bytearray(len(payload))
        here.decode(memoryview(encoded), memoryview(into), layout)
        there.decode(memoryview(encoded), memoryview(back), layout)
        assert into == back
