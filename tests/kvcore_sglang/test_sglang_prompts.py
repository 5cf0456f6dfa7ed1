"""SGLang's page hashes of prompts: pinned here, compared to SGLang's own in tests/sglang."""

import hashlib
import struct

import pytest

from kvcore.api import ConfigError, Prompt
from kvcore_sglang.integration import SglangIntegration
from kvcore_sglang.prompts import KEYS

PAGE = 4
TOKENS = list(range(1, 11))


def pages(**more: str) -> list[str]:
    extra = {"pool": more.pop("pool", "kv"), "speculative_algorithm": more.pop("speculative", "None")}
    prompt = Prompt(TOKENS, PAGE, PAGE, extra, **more)
    return [one.hex() for one in SglangIntegration(None, None).key_source(prompt).block_hashes]


def test_whole_pages_are_a_chain() -> None:
    first = hashlib.sha256(struct.pack("<4I", *TOKENS[:4])).digest()
    assert pages() == [first.hex(), hashlib.sha256(first + struct.pack("<4I", *TOKENS[4:8])).hexdigest()]
    assert SglangIntegration.schemes == (KEYS,)


def test_salts_and_adapters_have_chains_of_their_own() -> None:
    found = [pages(), pages(salt="s"), pages(adapter="a=/a"), pages(adapter="a=/b"), pages(salt="s", adapter="a=/a")]
    assert len({one[0] for one in found}) == 5


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"pool": "mamba"}, "SGLang's pool mamba holds what it keeps beside KV"),
        ({"speculative": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"adapter": "french"}, "the adapter is 'french': write NAME=PATH"),
    ],
    ids=lambda v: v[:12] if isinstance(v, str) else None,
)
def test_what_cannot_be_told(more: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        pages(**more)
