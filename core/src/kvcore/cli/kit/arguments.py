"""What several commands take on their command lines."""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

from kvcore.api.errors import ConfigError
from kvcore.api.keys import NAMESPACE_LEAST
from kvcore.api.units import parse_duration, parse_size

T = TypeVar("T")
LEAST = NAMESPACE_LEAST
"""The fewest characters that may stand for a namespace."""


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which otherwise hides what is wrong with a value."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return parsed


def standard_input() -> TextIO:
    """It, for `-`. Raises `ConfigError` where it is closed, as by `<&-`."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed: send what is to be read there, or give a file")
    return sys.stdin


size = argument(parse_size)
"""Bytes, of a size such as 8GiB."""
duration = argument(parse_duration)
"""Seconds, of a duration such as 200ms."""


@argument
def seconds(text: str) -> float:
    """Seconds, also of a number without a unit."""
    return float(text) if text.isascii() and text.replace(".", "", 1).isdecimal() else parse_duration(text)


@argument
def token_bytes(text: str) -> int:
    """The size of a token's KV."""
    nbytes = parse_size(text)
    if nbytes < 1:
        raise ValueError(f"{text} is no size of a token's KV: write a size such as 128KiB")
    return nbytes


@argument
def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of at least 1")
    return int(text)


@argument
def rate(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{text!r} is not a number above 0")
    return number


@argument
def namespace(text: str) -> str:
    """A whole namespace."""
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise ValueError(f"{text!r} is no namespace: 32 characters of [0-9a-f], as `kvcore store ls` shows them")
    return text


@argument
def beginning(text: str) -> str:
    """A namespace, or how it begins."""
    if not re.fullmatch(f"[0-9a-f]{{{LEAST},32}}", text):
        how = f"32 characters of [0-9a-f], or the first {LEAST} or more, as `kvcore store ls` shows them"
        raise ValueError(f"{text!r} is no namespace: {how}")
    return text


@argument
def word(text: str) -> str:
    """A name, salt or the like, which is text."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{text!r} is no text in UTF-8")
    return text


@argument
def svg_file(text: str) -> str:
    """The file of a plot."""
    if not text.endswith(".svg"):
        raise ValueError(f"{text!r} does not end with .svg, the one format of plots")
    if not Path(text).absolute().parent.is_dir():
        raise ValueError(f"there is no folder for {text!r}")
    return text
