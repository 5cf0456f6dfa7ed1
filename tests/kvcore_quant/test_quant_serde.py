"""The quant serde: the conformance suite, its errors on every arrangement of KV, and what it keeps as it is."""

import random
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from quant_golden import ENCODED, LAYOUT, golden_payload
from quant_layouts import ARRANGED, Shape, error, payload_of, rows_payload, to_elements, to_floats

from kvcore.api import Component, Context, ObjectLayout
from kvcore.testing import SerdeConformance
from kvcore.testing.sample import kv_sample
from kvcore_quant import plugin
from kvcore_quant.config import QuantConfig
from kvcore_quant.cuts import Cut
from kvcore_quant.frame import HEADER
from kvcore_quant.serde import QuantSerde

FORMATS = ("fp8", "int4")


def make(form: str = "fp8") -> QuantSerde:
    return QuantSerde(QuantConfig(format=form), Context())


def through(serde: QuantSerde, payload: bytes, layout: ObjectLayout) -> tuple[bytes, bytes]:
    """Encoded and decoded."""
    encoded = bytes(serde.encode(memoryview(payload), layout))
    assert len(encoded) <= serde.max_encoded_bytes(len(payload))
    into = bytearray(b"\xa5" * len(payload))
    serde.decode(memoryview(encoded), memoryview(into), layout)
    return encoded, bytes(into)


class _Suite(SerdeConformance):
    form = ""

    def make_serde(self):
        return make(self.form)

    def make_other_serdes(self):
        return [make(form) for form in FORMATS if form != self.form]

    def check_lossy(self, source, decoded, layout):
        """What is no whole object of floats comes back as it was; floats come back within a group's step."""
        assert len(decoded) == len(source)
        if len(source) != layout.nbytes or layout.dtype not in ("bfloat16", "float32"):
            assert decoded == source
            return
        x, y = to_floats(source, layout.dtype), to_floats(decoded, layout.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(x - y) <= np.abs(x).max() / (14 if self.form == "fp8" else 7)
        assert (near | (x == y) | (np.isnan(x) & np.isnan(y))).all()


class TestFp8(_Suite):
    form = "fp8"
    written_before = [(ENCODED["fp8"], golden_payload(), LAYOUT)]


class TestInt4(_Suite):
    form = "int4"
    written_before = [(ENCODED["int4"], golden_payload(), LAYOUT)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arrangement", ARRANGED)
@pytest.mark.parametrize(("form", "most", "ratio"), [("fp8", 0.035, 1.85), ("int4", 0.075, 2.9)])
def test_scales_follow_channels_of_keys_and_tokens_of_values(form, most, ratio, arrangement, dtype):
    """However the axes lie in memory, the error is about that of the right groups."""
    payload, layout = payload_of(arrangement, Shape(), dtype)
    encoded, decoded = through(make(form), payload, layout)
    assert error(payload, decoded, dtype) < most
    assert layout.nbytes // layout.element_bytes * 2 / len(encoded) > ratio


@pytest.mark.parametrize("arrangement", ["tokens first", "heads first", "keys transposed"])
def test_the_axes_matter(arrangement):
    """The same KV with its channels and tokens shuffled together has no axis to find, and that shows."""
    payload, layout = payload_of(arrangement, Shape())
    words = np.frombuffer(payload, "<u2").reshape(layout.blocks * len(layout.layer_block_bytes), -1)
    shuffled = np.random.default_rng(0).permuted(words, axis=1).tobytes()
    kept, lost = (error(each, through(make("int4"), each, layout)[1]) for each in (payload, shuffled))
    assert lost > 1.5 * kept


@pytest.mark.parametrize("form", FORMATS)
def test_all_layers_as_one_row(form):
    payload, layout = rows_payload(Shape(heads=2), layers=12)
    encoded, decoded = through(make(form), payload, layout)
    assert error(payload, decoded) < {"fp8": 0.03, "int4": 0.08}[form]
    assert len(payload) / len(encoded) > {"fp8": 1.8, "int4": 2.6}[form]


@pytest.mark.parametrize("form", FORMATS)
def test_keys_and_values_as_layers_of_their_own(form):
    """As transformers gives them, with a layer of another size between."""
    payload, layout = payload_of("heads first", Shape(layers=2))
    half = layout.layer_block_bytes[0] // 2
    blocks = np.frombuffer(payload, np.uint8).reshape(2, layout.blocks, 2, half).swapaxes(1, 2)
    odd = random.Random(0).randbytes(6 * layout.blocks)
    payload = blocks[0].tobytes() + odd + blocks[1].tobytes()
    layout = ObjectLayout(layout.blocks, 1, (half, half, 6, half, half), "bfloat16", 2)
    encoded, decoded = through(make(form), payload, layout)
    assert decoded[2 * half * layout.blocks :][: len(odd)] == odd
    plain = payload.replace(odd, b""), decoded.replace(odd, b"")
    assert error(*plain) < {"fp8": 0.03, "int4": 0.075}[form]
    assert len(payload) / len(encoded) > {"fp8": 1.8, "int4": 2.6}[form]


@pytest.mark.parametrize("form", FORMATS)
def test_ranks_have_tables_of_their_own(form):
    payload, layout = payload_of("tokens first", Shape(ranks=2))
    spoiled = bytearray(payload)
    spoiled[len(payload) // 2 : len(payload) // 2 + 4] = b"\xff\xff\x80\x7f"  # a NaN and an infinity, of rank 1
    encoded, decoded = through(make(form), bytes(spoiled), layout)
    whole = through(make(form), payload, layout)
    assert decoded[len(payload) // 2 : len(payload) // 2 + 4] == b"\xff\xff\x80\x7f"
    assert decoded[: len(payload) // 2] == whole[1][: len(payload) // 2]
    assert len(whole[0]) < len(encoded) < len(payload)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.3e38, -3.3e38])
def test_numbers_that_do_not_fit_are_kept_with_their_region(form, value):
    payload, layout = payload_of("heads first", Shape())
    elements = np.frombuffer(payload, "<u2").copy()
    elements[1234] = np.frombuffer(to_elements(np.array([value]), "bfloat16"), "<u2")[0]
    _, decoded = through(make(form), elements.tobytes(), layout)
    back = np.frombuffer(decoded, "<u2")
    assert (back[1200:1250] == elements[1200:1250]).all()
    assert np.isfinite(to_floats(np.delete(back, 1234).tobytes(), "bfloat16")).all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 6e-8, 1e-30, -1e-42, 20000.0])
def test_equal_elements_stay_what_they_are(form, dtype, value):
    """A group of one value has no width. int4 keeps it, fp8 within its own precision."""
    layout = ObjectLayout(2, 1, (4096,) * 2, dtype, 2 if dtype != "float32" else 4)
    with np.errstate(over="ignore", under="ignore"):
        payload = to_elements(np.full(layout.nbytes // layout.element_bytes, value, np.float32), dtype)
    _, decoded = through(make(form), payload, layout)
    x, y = to_floats(payload, dtype), to_floats(decoded, dtype)
    assert (np.abs(x - y) <= np.abs(x) / 16 + 1e-37).all()
    if form == "int4" and dtype == "bfloat16":
        assert (x == y).all()


@pytest.mark.parametrize("form", FORMATS)
def test_a_group_that_is_much_smaller_than_another_keeps_its_own_scale(form):
    layout = ObjectLayout(1, 1, (65536,), "float32", 4)
    values = np.random.default_rng(1).normal(0, 1, 16384).astype(np.float32)
    values[:4096] *= 1e-12
    payload = values.tobytes()
    _, decoded = through(make(form), payload, layout)
    assert error(payload[:16384], decoded[:16384], "float32") < 0.2


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "layout",
    [
        ObjectLayout(2, 1, (4096,), "fp8_e4m3", 1),
        ObjectLayout(2, 1, (4096,), "fp8:uint8", 1),
        ObjectLayout(2, 1, (4096,), "bfloat16", 4),
        ObjectLayout(2, 1, (4096,), "bfloat16+float32", 2),
        ObjectLayout(2, 1, (4097,), "bfloat16", 2),
        ObjectLayout(2, 1, (64,), "bfloat16", 2),
        ObjectLayout(1, 1, (2 * 4099,), "bfloat16", 2),
    ],
)
def test_what_is_not_understood_is_kept_exactly(form, layout):
    payload = random.Random(3).randbytes(layout.nbytes)
    encoded, decoded = through(make(form), payload, layout)
    assert decoded == payload
    assert len(encoded) == HEADER.size + len(payload)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", "bfloat16:bfloat16", "bfloat16+bfloat16"])
def test_names_of_types(dtype, caplog):
    payload, layout = payload_of("heads first", Shape(layers=1))
    encoded, _ = through(make(), payload, replace(layout, dtype=dtype))
    assert len(encoded) < len(payload)
    assert not caplog.records
    serde = make()
    for _ in range(2):
        through(serde, payload, replace(layout, dtype="fp8:uint8"))
    (record,) = caplog.records
    assert record.getMessage() == "serde quant: KV of fp8:uint8, 2 bytes an element, is kept as it is"


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    arrangement=st.sampled_from(["tokens first", "heads first", "keys transposed", "keys beside values"]),
    shape=st.builds(
        Shape,
        layers=st.integers(1, 3),
        blocks=st.integers(1, 6),
        tokens=st.sampled_from([1, 2, 7, 13, 16, 24]),
        heads=st.integers(1, 3),
        size=st.sampled_from([24, 36, 64, 80]),
        ranks=st.integers(1, 2),
    ),
    seed=st.integers(0, 99),
)
def test_any_shape_comes_back_near(form, dtype, arrangement, shape, seed):
    payload, layout = payload_of(arrangement, shape, dtype, seed)
    _, decoded = through(make(form), payload, layout)
    assert error(payload, decoded, dtype) < (0.04 if form == "fp8" else 0.15)


@pytest.mark.parametrize(("form", "most", "ratio"), [("fp8", 0.03, 1.85), ("int4", 0.06, 3.1)])
def test_real_kv(form, most, ratio):
    data, layout = kv_sample()
    encoded, decoded = through(make(form), data, layout)
    assert error(data, decoded) < most
    assert len(data) / len(encoded) > ratio


def test_axes_of_real_kv_are_found():
    """vLLM's CPU backend keeps keys transposed, `[64, 128]`, so that a channel's tokens stand one after the other, and
    values as `[128, 64]`: here stride 1 is right for both."""
    data, layout = kv_sample()
    serde = make("int4")
    serde.encode(memoryview(data), layout)
    assert serde._plans[layout][1].cuts == (Cut(32, 1, 1),)


def test_axes_of_the_same_kv_in_other_engines_layouts_are_found():
    """Keys as `[token, head, element]` have their channels 192 elements apart, as `[head, token, element]` 64."""
    data, layout = kv_sample()
    parts = np.frombuffer(data, "<u2").reshape(30, 3, 2, 8192)
    keys, values = parts[:, :, 0].reshape(30, 3, 64, 128), parts[:, :, 1].reshape(30, 3, 128, 64)
    heads_first = np.stack([keys.swapaxes(2, 3), values], axis=1)
    for arranged, stride in ((heads_first, 64), (heads_first.swapaxes(2, 3), 192)):
        serde, payload = make("int4"), np.ascontiguousarray(arranged).tobytes()
        serde.encode(memoryview(payload), layout)
        plan = serde._plans[layout][1]
        by_stride = np.array([0, *(cut.stride for cut in plan.cuts)])[plan.tables[0]].reshape(30, 2, -1)
        assert (by_stride[:, 0] == stride).mean() > 0.9
        assert (by_stride[:, 1] == 1).mean() > 0.9


@pytest.mark.parametrize("form", FORMATS)
def test_what_was_learnt_steers_encoding_only(form):
    """A serde that has seen other KV of the same layout encodes worse, and its bytes are read by any."""
    first, layout = payload_of("tokens first", Shape())
    other, same = payload_of("heads first", Shape())
    assert layout == same
    serde = make(form)
    serde.encode(memoryview(first), layout)
    serde._plans[layout] = (5, serde._plans[layout][1])  # not one of the objects that it learns from
    encoded = bytes(serde.encode(memoryview(other), layout))
    into = bytearray(len(other))
    make(form).decode(memoryview(encoded), memoryview(into), layout)
    assert error(other, into) < 0.5


def test_plans_are_bounded_and_learnt_again():
    serde = make()
    for blocks in range(1, 101):
        layout = ObjectLayout(blocks, 1, (1024,), "bfloat16", 2)
        serde.encode(memoryview(bytes(layout.nbytes)), layout)
    assert len(serde._plans) == 64
    payload, layout = payload_of("heads first", Shape())
    serde.encode(memoryview(payload_of("tokens first", Shape())[0]), layout)
    before = serde._plans[layout][1]
    for _ in range(4):
        serde.encode(memoryview(payload), layout)
    assert serde._plans[layout][0] == 5
    assert serde._plans[layout][1].cuts != before.cuts


def test_memory_is_bounded():
    """Beside what it returns, encoding takes a few MiB whatever the object's size."""
    layout = ObjectLayout(8, 1, (65536,) * 64, "bfloat16", 2)  # 32 MiB
    payload = to_elements(np.random.default_rng(0).normal(0, 1, layout.nbytes // 2), "bfloat16")
    into = bytearray(len(payload))
    for form in FORMATS:
        serde = make(form)
        tracemalloc.start()
        try:
            encoded = serde.encode(memoryview(payload), layout)
            assert tracemalloc.get_traced_memory()[1] < len(encoded) + 8 * 2**20
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            serde.decode(encoded, memoryview(into), layout)
            assert tracemalloc.get_traced_memory()[1] < held + 8 * 2**20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("form", FORMATS)
def test_threads_share_one_serde(form):
    payload, layout = payload_of("tokens first", Shape())
    serde, wanted = make(form), through(make(form), payload, layout)[1]
    wrong, barrier = [], threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        wrong.extend(i for i in range(10) if through(serde, payload, layout)[1] != wanted)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_plugin_offers_the_serde():
    component = plugin.kvcore_serde()
    assert isinstance(component, Component)
    for form in FORMATS:
        serde = component.factory(component.config(format=form), Context())
        assert (serde.tag, serde.lossy) == (f"quant-{form}/1", True)
    assert component.config().format == "fp8"


@pytest.mark.parametrize("options", [{"format": "int8"}, {"formt": "fp8"}])
def test_wrong_options(options):
    with pytest.raises(ValidationError):
        QuantConfig(**options)
