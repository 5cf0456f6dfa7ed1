"""`kvcore from-lmcache` on LMCache's own lists of its settings. Runs under LMCache's Python."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmcache.cli.commands.server import ServerCommand
from lmcache.v1.config import _CONFIG_ALIASES, _CONFIG_DEFINITIONS
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class, get_registered_l2_adapter_types
from lmcache.v1.distributed.serde.factory import get_registered_serde_types

from kvcore_from_lmcache import engine, server, stores
from kvcore_from_lmcache.draft import Draft, Setting

PAGES = yaml.safe_load((Path(__file__).parents[2] / "kvcore_from_lmcache" / "lmcache_pages.yaml").read_text())
LOOK_AROUND = {"hf3fs", "fault_inject"}
"""Adapters whose configuration looks for a mounted folder, or wraps another."""


def flags() -> list[argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    ServerCommand().add_arguments(parser)
    return [action for action in parser._actions if action.option_strings]


@pytest.mark.parametrize("name", sorted({*_CONFIG_DEFINITIONS, *_CONFIG_ALIASES}))
def check_setting_of_the_file(name: str) -> None:
    draft = Draft()
    if name != "extra_config":
        engine.convert([Setting("here", name, "something")], draft)
        told = [line for line in draft.lines if line.setting.place == "here"]
        assert told
        assert not [line for line in told if line.why == engine.UNKNOWN]
    assert engine.knows(name)


def check_flags() -> None:
    assert len(flags()) > 80
    for action in flags():
        name = action.option_strings[0].removeprefix("--")
        draft = Draft()
        value: Any = {"type": "none"} if name in ("l2-adapter", "l1-manager") else "something"
        server.convert([Setting("here", name, value)], draft)
        told = [line for line in draft.lines if line.setting.place == "here"]
        assert told, name
        assert not [line for line in told if line.why == server.UNKNOWN], name


def check_adapters() -> None:
    """Each type that LMCache has is told of; and what the pages have of them is what LMCache takes."""
    types = set(get_registered_l2_adapter_types())
    assert len(types) > 10
    for kind in types:
        draft = Draft()
        server.convert([Setting("here", "l2-adapter", {"type": kind})], draft)
        assert [line for line in draft.lines if line.setting.name == "type"], kind
    seen = set()
    for page in PAGES:
        words = shlex.split(page.get("command", ""))
        for spec in (json.loads(words[i + 1]) for i, word in enumerate(words) if word == "--l2-adapter"):
            kind = spec["type"]
            if kind in types - LOOK_AROUND:
                get_l2_adapter_config_class(kind).from_dict(spec)
                seen.add(kind)
    assert len(seen) > 6, seen


def check_serdes() -> None:
    known = set(get_registered_serde_types())
    assert known
    assert known <= set(stores.ENCODINGS)
