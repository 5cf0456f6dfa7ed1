"""What is said on the command line about speeds: tiers, devices, counts of tokens."""

import re

from kvcore.api import ConfigError
from kvcore.api.units import brief, parse_duration
from kvcore_bench.plan.costs import Store

GPUS = {
    "a10": 125e12,
    "a100": 312e12,
    "b200": 2250e12,
    "h100": 989e12,
    "h200": 989e12,
    "l4": 121e12,
    "l40s": 362e12,
    "mi300x": 1307e12,
}
"""FLOP/s in bfloat16 without sparsity, as the makers' data sheets give them."""
_UNITS = {"GB/s": 1e9, "MB/s": 1e6, "Gbit/s": 1e9 / 8}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(GB/s|MB/s|Gbit/s)?\Z")
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGTP]?)(.*)\Z")
_EXAMPLE = "write NAME=BANDWIDTH,LATENCY, such as disk=2.5,100us or s3=400MB/s,20ms"


def parse_store(text: str) -> Store:
    """`NAME=GB/s,latency`. Raises `ConfigError`."""
    name, _, rest = text.partition("=")
    bandwidth, comma, latency = rest.partition(",")
    match = _BANDWIDTH.match(bandwidth.strip())
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", name) or match is None or not comma:
        raise ConfigError(f"--tier {brief(text)}: {_EXAMPLE} (GB/s where no unit is given; MB/s and Gbit/s are known)")
    try:
        latency_s = parse_duration(latency.strip())
    except ValueError as e:
        raise ConfigError(f"--tier {brief(text)}: {e}") from None
    bytes_per_s = float(match[1]) * _UNITS[match[2] or "GB/s"]
    if bytes_per_s <= 0:
        raise ConfigError(f"--tier {brief(text)}: a tier of no bandwidth delivers nothing; {_EXAMPLE}")
    return Store(name, bytes_per_s, latency_s)


def parse_number(flag: str, text: str, unit: str) -> float:
    """A number above 0, with a prefix (`k` is 1,000) and, if wanted, its unit. Raises `ConfigError`."""
    match = _NUMBER.match(text.strip())
    value = float(match[1]) * _PREFIXES[match[2]] if match and match[3].strip() in ("", unit) else 0.0
    if value <= 0:
        raise ConfigError(
            f"{flag} {brief(text)}: write a number above 0, with k, M, G, T or P for thousands, such as {flag} 20k"
        )
    return value


def parse_gpu(name: str) -> float:
    """FLOP/s of a device. Raises `ConfigError`."""
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError(
            f"--gpu {brief(name)}: known are {', '.join(GPUS)}; or give its peak with --flops, such as 989T"
        )
    return found
