"""Texts of a wanted number of tokens, for a tokenizer that only the server has."""

import random
from collections.abc import Callable
from typing import NamedTuple

_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense plan figure street "
    "image phone data picture practice piece land product doctor wall news test movie north love step field paper"
)
_WORDS = _COMMON.split()
SAMPLES = (32, 256)
"""Words of the two texts by which a `Ruler` is made."""


class Ruler(NamedTuple):
    """How many words make how many tokens with a server's tokenizer. `measured`: the server has told."""

    tokens_per_word: float = 1.0
    measured: bool = False

    def words(self, tokens: int) -> int:
        """Words of a text of about `tokens` tokens; at least one."""
        return max(1, round(tokens / self.tokens_per_word))


class Texts:
    """Texts of random words: the same name gives the same text, and another name or seed one that begins differently.

    Args:
        seed: of all of them.
        ruler: for the server that they are made for.
    """

    def __init__(self, seed: str, ruler: Ruler) -> None:
        self._seed = seed
        self._ruler = ruler

    def text(self, name: str, tokens: int) -> str:
        """About `tokens` tokens."""
        return _words(f"{self._seed}/{name}", self._ruler.words(tokens))


def measured(seed: str, tokens_of: Callable[[str], int | None]) -> Ruler:
    """By what `tokens_of` says of two texts: between them lies what every prompt has, such as a chat template."""
    few, many = (tokens_of(_words(f"{seed}/ruler{n}", n)) for n in SAMPLES)
    if few is None or many is None or many <= few:
        return Ruler()
    return Ruler((many - few) / (SAMPLES[1] - SAMPLES[0]), measured=True)


def _words(seed: str, count: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=count))  # noqa: S311 - test data
