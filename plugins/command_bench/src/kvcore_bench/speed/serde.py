"""kvcore-zstd over the real KV that ships with kvcore, on one core."""

import struct
from collections.abc import Callable

from kvcore.api import PluginError
from kvcore.plugins import PluginSpec, Registry
from kvcore_bench.speed.measure import Case, absent, measure, rate
from kvcore_bench.speed.rows import Row, Unit
from kvcore_bench.speed.setting import Setting

NAMES: tuple[tuple[str, Unit], ...] = (
    ("serde.zstd.ratio", "x"),
    ("serde.zstd.encode", "GB/s"),
    ("serde.zstd.decode", "GB/s"),
)


def run(setting: Setting) -> list[Row]:
    """The rows `serde.zstd.*`: rates are of the payload, before encoding and after decoding."""
    from kvcore.testing.sample import kv_sample

    try:
        serde = Registry().create("serde", PluginSpec("zstd", {}, "bench"))
    except PluginError as error:
        return absent(NAMES, str(error))
    payload, layout = kv_sample()
    source = memoryview(payload)
    encoded = memoryview(serde.encode(source, layout))
    into = memoryview(bytearray(len(payload)))

    def decode() -> None:
        serde.decode(encoded, into, layout)

    decode()
    if into != source:
        raise AssertionError("the decoded object differs from its source")
    repeats = 4 if setting.quick else 10
    ratio = len(payload) / len(encoded)
    cases = [
        Case("serde.zstd.ratio", "x", lambda: ratio),
        Case("serde.zstd.encode", "GB/s", rate(lambda: serde.encode(source, layout), len(payload), repeats=repeats)),
        Case(
            "serde.zstd.decode",
            "GB/s",
            rate(decode, len(payload), repeats=repeats),
            rate(_plain(encoded), len(payload), repeats=repeats),
        ),
    ]
    return measure(cases, setting.rounds)


def _plain(encoded: memoryview) -> Callable[[], None]:
    """Zstandard alone on what the serde has compressed: its frames, found by the serde's format, each decompressed and
    dropped."""
    import zstandard

    _, width, bits, length = struct.unpack_from("<2sBBQ", encoded)
    planes = width * -(-(length // width) >> bits)
    at, frames = 12 + 4 * planes, []
    for size in struct.unpack_from(f"<{planes}I", encoded, 12):
        if encoded[at : at + 4] == zstandard.FRAME_HEADER:
            frames.append(encoded[at : at + size])
        at += size
    decompress = zstandard.ZstdDecompressor().decompress

    def run() -> None:
        for frame in frames:
            decompress(frame)

    return run
