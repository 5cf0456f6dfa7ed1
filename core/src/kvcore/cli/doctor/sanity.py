"""What `kvcore doctor` finds in a configuration whose values are all valid, but do not go together, or are not the ones
that are in force."""

import os
from collections.abc import Iterator, Mapping

from kvcore.api import KVCoreError, format_size
from kvcore.api.engine import Finding
from kvcore.config import Config, load_config
from kvcore.config.advice import notes_on
from kvcore.config.tenants import DEFAULT_TENANT
from kvcore.plugins import Registry

FEW_OBJECTS = 8
"""As many must fit L1 at once, or they push each other out while a prompt is loaded."""
_USUAL = ("kvcore.yaml", "kvcore.yml")


def chosen_file(config: Config) -> Iterator[Finding]:
    """Which file is in force, and whether another one was meant."""
    if config.file:
        yield Finding("ok", "config", config.file)
        return
    here = next((name for name in _USUAL if os.path.isfile(name)), None)
    if here is None:
        yield Finding("ok", "config", "no file: the defaults are in force")
        return
    text = f"no file is named, so the defaults are in force and not the {here} of this directory"
    yield Finding("warning", "config", text, f"kvcore doctor {here}; for engines: export KVCORE_CONFIG=$PWD/{here}")


def overridden(config: Config, registry: Registry, env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Values of the file that a variable takes the place of: who edits the file changes nothing."""
    if not config.file or not any(source.kind == "environment" for source in config.sources.values()):
        return
    kept = {name: value for name, value in env.items() if not name.startswith("KVCORE_")}
    try:
        written = load_config(config.file, env=kept, registry=registry)
    except KVCoreError:
        return  # it needs the variables, such as a token
    before = {row.path: row for row in written.rows()}
    for row in config.rows():
        old = before.get(row.path)
        if old is None or row.source.kind != "environment" or old.source.kind != "file" or old.value == row.value:
            continue
        text = f"{row.source} has {row.path} be {row.value}, and not {old.value}, as {old.source} says"
        yield Finding("note", "config", text, f"unset the variable, or take {row.path} out of the file")


def remarks(config: Config) -> Iterator[Finding]:
    """What `kvcore config check` notes of what was written and has no effect, or one that surprises."""
    if config.l2:  # else doctor says so itself
        for note in notes_on(config):
            yield Finding("note", "config", note, "correct the line, or leave it out")


def sizes(config: Config) -> Iterator[Finding]:
    """Whether L1 has room for objects, for what waits, and for what tenants were promised."""
    size = config.l1.size
    if size == "auto":
        return
    if config.min_object_size * FEW_OBJECTS > size and "min_object_size" in config.sources:
        text = (
            f"min_object_size is {format_size(config.min_object_size)}: L1, of {format_size(size)}, has room for "
            f"{size // config.min_object_size} such objects"
        )
        remedy = f"lower it to {format_size(size // 64)} or less, or raise l1.size"
        yield Finding("error" if config.min_object_size > size else "warning", "l1", text, remedy)
    for i, tier in enumerate(config.l2):
        if tier.queue_size > size // 2 and f"l2[{i}].queue_size" in config.sources:
            most = format_size(size // 2)
            text = f"queue_size is {format_size(tier.queue_size)}, and at most half of L1, {most}, can wait"
            yield Finding("note", f"tier {tier.name}", text, "raise l1.size, or lower queue_size")
    promised = sum(int(quotas.get("l1", 0)) for tenant, quotas in config.tenants.items() if tenant != DEFAULT_TENANT)
    if promised > size:
        text = f"the tenants' quotas of l1 are {format_size(promised)} together, and it has {format_size(size)}"
        remedy = "lower them, or raise l1.size: until then each is scaled down"
        yield Finding("warning", "tenants", text, remedy)
