"""The namespace: pinned by golden vectors, derived again from its description, changed by every field."""

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import DictStorage, Halve, Mirror, Zip

from kvcore.api import Serde
from kvcore.control.tiers import lossy_tags
from kvcore.engine import GroupSpec, ModelSpec
from kvcore.engine.space import namespace
from kvcore.l2 import Codec, Threads, Tier
from kvcore.observe import Metrics

GOLDEN = json.loads((Path(__file__).parent / "golden" / "namespace.json").read_text())
SPEC = ModelSpec(
    engine="vllm",
    model="m",
    weights="w",
    dtype="bfloat16",
    element_bytes=2,
    layout="NHD",
    backend="FLASH_ATTN",
    isa="avx512",
    block_tokens=16,
    ranks=1,
    groups=(GroupSpec(("a", "b"), (4096, 4096)),),
    parallel={"tp": 1},
    extra={"lora": "x"},
)
ARGUMENTS: dict[str, Any] = {"chunk_tokens": 256, "key_scheme": "engine/1", "lossy": [], "salt": ""}
OTHER: dict[str, list[Any]] = {
    "engine": ["sglang"],
    "model": ["M", "m ", ""],
    "weights": ["v"],
    "dtype": ["float16"],
    "element_bytes": [1],
    "layout": ["HND"],
    "backend": ["CPU_ATTN"],
    "isa": ["amx"],
    "block_tokens": [32],
    "ranks": [2],
    "groups": [
        (GroupSpec(("b", "a"), (4096, 4096)),),
        (GroupSpec(("a", "b"), (4096, 8192)),),
        (GroupSpec(("a",), (4096,)),),
        (GroupSpec(("a", "b"), (4096, 4096), window_tokens=128),),
        (GroupSpec(("a",), (4096,)), GroupSpec(("b",), (4096,))),
        (GroupSpec(("a", "b"), (4096, 4096)),) * 2,
    ],
    "parallel": [{"tp": 2}, {"pp": 1}, {}, {"tp": 1, "pp": 1}],
    "extra": [{"lora": "y"}, {"Lora": "x"}, {}, {"lora": "x", "b": ""}],
}
OTHER_ARGUMENTS: dict[str, list[Any]] = {
    "chunk_tokens": [128],
    "key_scheme": ["tokens-sha256/1"],
    "lossy": [["halve/1"], ["halve/1", "quant/1"], ["quant/1"]],
    "salt": ["a", "b"],
    "tenant": ["a", "b"],
}


def name(spec: ModelSpec = SPEC, **changed: Any) -> bytes:
    return namespace(spec, **{**ARGUMENTS, **changed})


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden(case: dict[str, Any]) -> None:
    groups = tuple(GroupSpec(tuple(g["layers"]), tuple(g["block_bytes"]), g["window_tokens"]) for g in case["groups"])
    spec = ModelSpec(groups=groups, **{f.name: case[f.name] for f in fields(ModelSpec) if f.name != "groups"})
    found = namespace(spec, case["chunk_tokens"], case["key_scheme"], case["lossy"], case["salt"])
    assert found.hex() == case["namespace"]


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_as_described(case: dict[str, Any]) -> None:
    """Derived from the words of docs/format.md alone."""
    plain = ["engine", "model", "weights", "dtype", "element_bytes", "layout", "backend", "isa", "block_tokens"]
    pairs = [(f, str(case[f])) for f in [*plain, "chunk_tokens", "ranks"]]
    pairs += [("keys", case["key_scheme"]), ("salt", case["salt"])]
    pairs += [(f"parallel.{k}", str(v)) for k, v in sorted(case["parallel"].items())]
    pairs += [(f"extra.{k}", v) for k, v in sorted(case["extra"].items())]
    pairs += [("lossy", tag) for tag in case["lossy"]]
    for i, group in enumerate(case["groups"]):
        pairs.append((f"group.{i}.window", str(group["window_tokens"])))
        for layer, nbytes in zip(group["layers"], group["block_bytes"], strict=True):
            pairs.append((f"group.{i}.layer", f"{layer}={nbytes}"))
    data = b"kvcore.namespace/1\0"
    for text in (t for pair in pairs for t in pair):
        raw = text.encode()
        data += len(raw).to_bytes(4, "little") + raw
    assert hashlib.sha256(data).digest()[:16].hex() == case["namespace"]


def test_every_field_changes_it() -> None:
    assert set(OTHER) == {f.name for f in fields(ModelSpec)}, "a field without a test here"
    names = [name()]
    names += [name(replace(SPEC, **{field: value})) for field, values in OTHER.items() for value in values]
    names += [name(**{field: value}) for field, values in OTHER_ARGUMENTS.items() for value in values]
    assert len(set(names)) == len(names)
    assert {len(n) for n in names} == {16}


def test_no_tenant_is_as_before_there_were_tenants() -> None:
    assert name(tenant="") == name()


def test_the_order_of_mappings_does_not_matter() -> None:
    ab, ba = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert name(replace(SPEC, parallel=ab)) == name(replace(SPEC, parallel=ba))
    texts = ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    assert name(replace(SPEC, extra=texts[0])) == name(replace(SPEC, extra=texts[1]))


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), min_size=2, max_size=2, unique=True))
def test_no_two_neighbouring_fields_run_together(pairs: list[tuple[str, str]]) -> None:
    (model, weights), (other_model, other_weights) = pairs
    assert name(replace(SPEC, model=model, weights=weights)) != name(
        replace(SPEC, model=other_model, weights=other_weights)
    )


def test_a_path_of_odd_bytes() -> None:
    assert name(replace(SPEC, model=b"/models/\xff".decode(errors="surrogateescape"))) != name(
        replace(SPEC, model="/models/ÿ")
    )


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        ([[]], []),
        ([[Zip()]], []),
        ([[Mirror(), Zip()], [Zip()]], []),
        ([[Halve()]], ["halve/1"]),
        ([[], [Mirror(), Halve(), Zip()], [Halve()]], ["halve/1"]),
    ],
    ids=["plain", "zip", "two tiers", "lossy", "lossy in one tier of three"],
)
def test_of_the_serdes_only_lossy_ones_enter(chains: list[list[Serde]], expected: list[str]) -> None:
    threads, metrics = Threads("codec", 1), Metrics()
    tiers = [
        Tier(f"t{i}", DictStorage(), Codec(chain, {}.get), threads=threads, timeout_s=1, metrics=metrics)
        for i, chain in enumerate(chains)
    ]
    assert lossy_tags(tiers) == expected
    assert (name(lossy=lossy_tags(tiers)) == name()) == (not expected)
