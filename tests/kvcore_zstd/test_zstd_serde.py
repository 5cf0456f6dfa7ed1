"""The zstd serde on real KV and on everything else."""

import random
import sys
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from zstd_golden import ENCODED, layout_of, payload_of

from kvcore.api import Component, Context
from kvcore.testing import SerdeConformance
from kvcore.testing.sample import kv_sample
from kvcore_zstd import plugin
from kvcore_zstd.config import ZstdConfig
from kvcore_zstd.serde import SEGMENT_BITS, ZstdSerde

SEGMENT = 1 << SEGMENT_BITS
WRITTEN = [(ENCODED[w], payload_of(w), layout_of(len(payload_of(w)), w)) for w in ENCODED]


def make(level: int = 1) -> ZstdSerde:
    return ZstdSerde(ZstdConfig(level=level), Context())


def round_trip(serde: ZstdSerde, data: bytes, element_bytes: int) -> int:
    """The encoded size; asserts that all comes back and nothing around it is touched."""
    layout = layout_of(len(data), element_bytes)
    encoded = serde.encode(memoryview(data), layout)
    assert len(encoded) <= serde.max_encoded_bytes(len(data))
    around = bytearray(b"\xa5" * (len(data) + 6))
    serde.decode(memoryview(encoded), memoryview(around)[3:-3], layout)  # at an odd address too
    assert around == b"\xa5" * 3 + data + b"\xa5" * 3
    return len(encoded)


class TestLevel1(SerdeConformance):
    written_before = WRITTEN

    def make_serde(self):
        return make(1)

    def make_other_serdes(self):
        return [make(2)]


class TestLevel2(SerdeConformance):
    written_before = WRITTEN

    def make_serde(self):
        return make(2)

    def make_other_serdes(self):
        return [make(1)]


@pytest.mark.parametrize("level", [1, 2])
def test_real_kv_is_smaller_by_the_promised_ratio(level):
    data, layout = kv_sample()
    assert len(data) == layout.nbytes
    assert len(data) / round_trip(make(level), data, layout.element_bytes) >= 1.48


def test_float32_of_a_bfloat16_model():
    data, _ = kv_sample()
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[::2], data[1::2]
    assert len(wide) / round_trip(make(), bytes(wide), 4) >= 2.9


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("elements", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 7])
def test_lengths_around_a_segment(width, elements):
    data, _ = kv_sample()
    for tail in range(width):
        round_trip(make(), data[: elements * width + tail], width)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=600), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_any_bytes_of_any_width(data, width):
    round_trip(make(), data, width)


@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"\x80\x3f", b"\0\0\x80\x3f"])
def test_constant_payload(fill):
    data = fill * (SEGMENT // len(fill) * 3)
    assert round_trip(make(), data, len(fill)) < len(data) / 500


def test_noise_costs_its_table_only():
    data = random.Random(0).randbytes(3 * SEGMENT)
    assert round_trip(make(), data, 2) <= len(data) + 12 + 4 * 2 * 2


def test_levels_differ():
    data, layout = kv_sample()
    sizes = [len(make(level).encode(memoryview(data), layout)) for level in (1, 2)]
    assert sizes[0] > sizes[1]


def test_threads_share_one_serde():
    data, layout = kv_sample()
    serde, wrong, barrier = make(), [], threading.Barrier(4)

    def work(shift: int) -> None:
        mine = data[shift * 4096 :] + data[: shift * 4096]
        into = bytearray(len(mine))
        barrier.wait()
        for _ in range(5):
            serde.decode(memoryview(serde.encode(memoryview(mine), layout)), memoryview(into), layout)
            if into != mine:
                wrong.append(shift)

    threads = [threading.Thread(target=work, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("what", ["encode", "decode"])
def test_other_threads_run_meanwhile(what):
    """With a switch interval that never ends, another thread runs only where the serde frees the GIL by itself."""
    data, layout = kv_sample()
    serde, into = make(), bytearray(len(data))
    encoded = serde.encode(memoryview(data), layout)
    turns, running = [0], threading.Event()
    done = threading.Event()

    def other() -> None:
        running.set()
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    thread = threading.Thread(target=other)
    try:
        thread.start()
        running.wait()
        before = turns[0]
        for _ in range(5):
            if what == "encode":
                serde.encode(memoryview(data), layout)
            else:
                serde.decode(memoryview(encoded), memoryview(into), layout)
        after = turns[0]
    finally:
        done.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert after - before >= 5 * (len(data) // (2 * SEGMENT))


def test_layout_of_other_widths_is_taken_by_bytes():
    data, layout = kv_sample()
    encoded = make().encode(memoryview(data), replace(layout, element_bytes=3))
    assert encoded[2] == 1


def test_plugin_offers_the_serde():
    component = plugin.kvcore_serde()
    assert isinstance(component, Component)
    serde = component.factory(component.config(), Context())
    assert (serde.tag, serde.lossy) == ("zstd/1", False)


@pytest.mark.parametrize("options", [{"level": 0}, {"level": 3}, {"level": "fast"}, {"levle": 1}])
def test_wrong_options(options):
    with pytest.raises(ValidationError):
        ZstdConfig(**options)
