"""Encryption of KV: kvcore-aesgcm beside the bare cipher and a copy. One JSON row per line.

    python benchmarks/serde_aesgcm.py [--seconds 1.0]

Rates are GB of payload per second on one core, the best of many runs that take turns.
"""

import argparse
import json
import os
import secrets
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcore.api import Context, ObjectLayout
from kvcore_aesgcm.config import AesGcmConfig
from kvcore_aesgcm.serde import AesGcmSerde

NBYTES = 2 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Encryption of KV.")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each rate, in seconds")
    args = parser.parse_args()
    os.environ["KVCORE_BENCH_KEY"] = secrets.token_hex(32)
    serde = AesGcmSerde(AesGcmConfig(keys={"k": "env:KVCORE_BENCH_KEY"}), Context()).bound(bytes(80))
    bare, nonce = AESGCM(secrets.token_bytes(32)), bytes(12)
    layout = ObjectLayout(1, 1, (NBYTES,), "bfloat16", 2)
    source, into = memoryview(secrets.token_bytes(NBYTES)), memoryview(bytearray(NBYTES))
    encoded, sealed = serde.encode(source, layout), bare.encrypt(nonce, source, None)

    def copy() -> None:
        into[:] = source

    cases: dict[str, Callable[[], object]] = {
        "memcpy": copy,
        "cipher.encrypt": lambda: bare.encrypt(nonce, source, None),
        "cipher.decrypt": lambda: bare.decrypt(nonce, sealed, None),
        "aesgcm.encode": lambda: serde.encode(source, layout),
        "aesgcm.decode": lambda: serde.decode(encoded, into, layout),
    }
    best = dict.fromkeys(cases, 0.0)
    until = time.perf_counter() + args.seconds * len(cases)
    while time.perf_counter() < until:
        for name, case in cases.items():
            begun = time.perf_counter()
            case()
            best[name] = max(best[name], NBYTES / (time.perf_counter() - begun) / 1e9)
    assert into == source, "what came back is not what was encrypted"
    for name, value in best.items():
        print(json.dumps({"name": name, "value": round(value, 2), "unit": "GB/s"}))


if __name__ == "__main__":
    main()
