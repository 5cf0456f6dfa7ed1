"""Sizes and durations with units, as people write them: `8GiB`, `1.5 MB`, `200ms`, `2s`."""

import re

_SIZE_UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate(("K", "M", "G", "T", "P"), 1)},
}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*\Z")
MAX_SIZE_BYTES = (1 << 63) - 1
MAX_DURATION_S = 3650 * 86400.0
"""Ten years. Longer waits overflow the timers of the system."""


def brief(value: object) -> str:
    """`repr` for an error's text: what somebody has pasted by mistake must not fill the screen."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _parse(value: object, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = _NUMBER.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{brief(value)} is not a {what}: write a number and a unit, such as {example}")
    number, unit = match.groups()
    by_lower = {u.lower(): u for u in units}
    known = unit if unit in units else by_lower.get(unit.lower())
    if known is None:
        choices = ", ".join(units)
        raise ValueError(f"{brief(value)} has no known unit of {what}: use one of {choices}, such as {example}")
    return float(number) * units[known]


def parse_size(value: object) -> int:
    """Bytes of a size with a unit (`8GiB`, `500 MB`). Raises `ValueError` for anything else, a bare number included."""
    nbytes = _parse(value, _SIZE_UNITS, "size", "8GiB or 500MB")
    if 0 < nbytes < 1:
        raise ValueError(f"{brief(value)} is less than one byte: write a size such as 8GiB or 500MB")
    if nbytes > MAX_SIZE_BYTES:
        raise ValueError(f"{brief(value)} is more than {MAX_SIZE_BYTES} bytes: write a size such as 8GiB or 500MB")
    return round(nbytes)


def parse_duration(value: object) -> float:
    """Seconds of a duration with a unit (`200ms`, `2s`). Raises `ValueError` for anything else."""
    seconds = _parse(value, _TIME_UNITS, "duration", "200ms or 2s")
    if seconds > MAX_DURATION_S:
        raise ValueError(f"{brief(value)} is longer than ten years: write a duration such as 2s or 1h")
    return seconds


def format_size(nbytes: float) -> str:
    """`nbytes` in the largest binary unit that keeps it at least 1: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    raise AssertionError
