"""What several commands take on their command lines."""

import argparse
from collections.abc import Callable
from typing import TypeVar

from kvcore.api.units import parse_size

T = TypeVar("T")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which otherwise hides what is wrong with a value."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return parsed


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
