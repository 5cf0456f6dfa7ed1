"""`kvcore doctor`: one finding a line, each with its remedy."""

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from kvcore.api.engine import Finding
from kvcore.api.errors import KVCoreError, PluginError
from kvcore.cli import interrupted
from kvcore.cli.child import call
from kvcore.cli.doctor import machine, sanity, server, tiers
from kvcore.cli.doctor.versions import versions
from kvcore.cli.kit.configured import add_file, add_set, flags
from kvcore.cli.kit.output import COLOURS, LINES, paint, print_json, printable, track
from kvcore.config import load_config
from kvcore.plugins import Registry, registry_from_env
from kvcore.plugins.known import how_to_install

CHILD_TIMEOUT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvcore doctor`."""
    add_file(parser)
    add_set(parser)
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """JSON: {ok, findings: [{level, subject, text, remedy, data}]}. Status 1 when a finding is an error."""
    registry = registry_from_env()
    checks: list[Callable[[], Iterator[Finding]]] = [
        machine.python,
        machine.memory,
        machine.shared_memory,
        machine.huge_pages,
        machine.locked_memory,
        _torch,
        lambda: _plugins(registry),
        lambda: versions(registry),
        lambda: _engines(registry),
        lambda: _configuration(registry, args),
    ]
    unread = _unread(args)
    if unread:  # before all else, and alone: what follows would bury it
        checks = [lambda: iter(unread)]
    findings: list[Finding] = []
    for check in track(checks, "examining", quiet=args.json):
        for finding in _guarded(check):
            findings.append(finding)
            if not args.json:
                _print(finding)
    ok = all(f.level != "error" for f in findings)
    if args.json:
        print_json({"ok": ok, "findings": [asdict(f) for f in findings]})
    else:
        print(_counted(findings) + ("; nothing else was examined" if unread else ""), flush=True)
    return 0 if ok else 1


def _unread(args: argparse.Namespace) -> list[Finding]:
    """What is wrong with a file of which nothing can be read."""
    from kvcore.config.yaml_file import read_file

    file = args.config or os.environ.get("KVCORE_CONFIG")
    if not file:
        return []
    tree, faults = read_file(file)
    remedy = "give the path of a YAML file, or none" if args.config else "correct KVCORE_CONFIG, or unset it"
    return [] if tree.value else [Finding("error", "config", str(fault), remedy) for fault in faults]


def _counted(findings: Sequence[Finding]) -> str:
    """How many there are of each level, the worst first."""
    found = Counter(f.level for f in findings)
    words = [f"{found[level]} {level}{'s' * (found[level] != 1)}" for level in ("error", "warning", "note")]
    return f"found: {', '.join(words)}, {found['ok']} ok"


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a check finds. One that fails is a finding, too, and the next ones still run."""
    try:
        yield from check()
    except Exception as e:
        if interrupted(e):
            raise KeyboardInterrupt from None
        if isinstance(e, KVCoreError):
            yield Finding("error", "doctor", str(e), "correct it, and run doctor again")
            return
        yield Finding("error", "doctor", f"a check failed: {type(e).__name__}: {e}", "report it, with this line")


def _print(finding: Finding) -> None:
    colour = finding.level if finding.level in COLOURS else "note"  # an engine plugin may have made it
    text = printable(f"{finding.subject}: {finding.text}", LINES)
    print(f"{paint(f'{finding.level:<7}', colour)} {text}", flush=True)
    if finding.remedy:
        print(f"        {paint('->', 'dim')} {printable(finding.remedy, LINES)}", flush=True)


def _torch() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("torch")
    except PackageNotFoundError:
        yield Finding(
            "note",
            "torch",
            "not installed here",
            "an engine brings its own; for the test kit: pip install kvcore[torch], in a checkout './core[torch]'",
        )
        return
    outcome = call("torch", timeout_s=CHILD_TIMEOUT_S)
    if not outcome.ok:
        yield Finding(
            "error", "torch", f"{installed} cannot be imported: {outcome.text}", "reinstall torch for this machine"
        )
        return
    found = outcome.value
    yield Finding("ok", "torch", f"{found['version']}, {found['threads']} threads", data=found)
    if found["cuda"]:
        build = f"CUDA {found['cuda_build']}" if found["cuda_build"] else f"ROCm {found['rocm_build']}"
        yield Finding("ok", "cuda", f"{build}: {', '.join(found['devices'])}", data=found)
    elif found["cuda_build"]:
        yield Finding(
            "warning",
            "cuda",
            f"torch is built for CUDA {found['cuda_build']}, but no device answers",
            "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES; on a machine without a GPU this is harmless",
        )
    elif not found["device"]:
        yield Finding("note", "cuda", "this torch is built without CUDA: KV is copied by the CPU")
    if found["copies"]:
        yield _copies(found["device"], found["copies"])


def _copies(device: str, found: dict[str, Any]) -> Finding:
    """How KV on the device is copied."""
    if not found["kernels"]:
        text = f"KV on {device} is copied by torch operations, which is slower: {found['why']}"
        if device == "cuda" and "ROCm" not in found["why"]:
            return Finding("warning", "kv copies", text, "see docs/gpu.md", found)
        return Finding("note", "kv copies", text, data=found)
    speeds = [
        f"{name} {found[way]['direct'] / 1e9:.3g} GB/s by kernel, {found[way]['staged'] / 1e9:.3g} by copy engine"
        for name, way in (("out", "save"), ("in", "load"))
    ]
    return Finding("ok", "kv copies", f"CUDA kernels: {'; '.join(speeds)}", data=found)


def _plugins(registry: Registry) -> Iterator[Finding]:
    from kvcore.api.hooks import GROUPS

    infos = [info for kind in GROUPS for info in registry.available(kind)]
    yield Finding(
        "ok",
        "plugins",
        f"{len(infos)} installed, from {', '.join(sorted({f'{i.distribution} {i.version}' for i in infos}))}",
        data={"plugins": [i.as_dict() for i in infos]},
    )
    for problem in registry.problems():
        yield Finding("warning", "plugins", problem, "its author has to mend it; until then it is not used")
    for info in infos:
        if info.status == "clash":
            text = f"several distributions give this name; here: {info.distribution} {info.version}"
            yield Finding("warning", f"{info.kind} {info.name}", text, f"write {info.name}@{info.distribution}")
        elif info.status == "blocked":
            text = "blocked by KVCORE_BLOCK_PLUGINS or KVCORE_ALLOW_PLUGINS"
            yield Finding("note", f"{info.kind} {info.name}", text, "change the variable to use it")
        if info.status in ("blocked", "reserved") or info.builtin:
            continue
        outcome = call("plugin", info.kind, f"{info.name}@{info.distribution}", timeout_s=CHILD_TIMEOUT_S)
        if outcome.ok:
            yield Finding("ok", f"{info.kind} {info.name}", f"{info.distribution} {info.version} loads")
        else:
            remedy = f"pip install --force-reinstall {info.distribution}, or tell its author; harmless while unused"
            yield Finding("warning", f"{info.kind} {info.name}", outcome.text, remedy)


def _engines(registry: Registry) -> Iterator[Finding]:
    infos = [i for i in registry.available("engine") if i.status in ("ready", "clash")]
    if not infos:
        yield Finding(
            "note", "engines", "no engine connector is installed", f"for vLLM: {how_to_install('engine', 'vllm')}"
        )
    for info in infos:
        outcome = call("engine", f"{info.name}@{info.distribution}", timeout_s=CHILD_TIMEOUT_S)
        if outcome.ok:
            for found in (Finding(**value) for value in outcome.value):  # an engine that is not here is no task
                yield replace(found, remedy="") if found.level == "note" else found
        else:
            remedy = f"pip install --force-reinstall {info.distribution}"
            yield Finding("error", f"engine {info.name}", outcome.text, remedy)


def _plugin(path: str, args: argparse.Namespace) -> str:
    """The plugin, as the file names it, of which this is an option; empty where it is none's."""
    from kvcore.config.yaml_file import read_file

    file = args.config or os.environ.get("KVCORE_CONFIG")
    value: Any = read_file(file)[0].value if file else None
    name = ""
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, str):  # `storage: disk`
            return value
        if isinstance(value, dict):
            name = str(value.get("plugin", name))
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal():
            value = dict(enumerate(value)).get(int(part))
        else:
            value = None
    return name


def _configuration(registry: Registry, args: argparse.Namespace) -> Iterator[Finding]:
    from kvcore.config import InvalidConfigError
    from kvcore.config.advice import capacities
    from kvcore.config.scripts import script_faults

    try:
        config = load_config(args.config, flags=flags(args), registry=registry)
    except InvalidConfigError as e:
        for fault in e.faults:
            plugin = _plugin(fault.path, args)
            shown = f"`kvcore plugins show {plugin}` and " if plugin else ""
            shown = shown or ("`kvcore plugins list` and " if "plugin is named" in fault.text else "")
            yield Finding("error", "config", str(fault), f"see {shown}docs/configuration.md")
        text = "the rest of it, its sizes and its tiers were not examined: that takes a valid configuration"
        yield Finding("note", "config", text, "correct what is named above, and run doctor again")
        return
    yield from sanity.chosen_file(config)
    yield from sanity.overridden(config, registry)
    yield from sanity.remarks(config)
    try:
        registry.use_hooks(config.hooks)
    except PluginError as e:
        yield Finding("error", "hooks", str(e), "correct the plugin, or take it out of hooks")
        return  # its wrappers are part of every tier
    for fault in capacities(config, registry):
        yield Finding("error", "config", str(fault), "correct it: kvcore serve and engines refuse it")
    for fault in script_faults(config.plugins, config.sources):
        yield Finding("error", "config", str(fault), "correct it: kvcore serve refuses it")
    yield from machine.l1_size(config.l1.size)
    yield from sanity.sizes(config)
    policies = [(tier.eviction, "eviction") for tier in config.l2 if tier.capacity is not None]
    for spec, kind in ((config.l1.eviction, "eviction"), (config.keys, "keys"), *policies):
        try:
            registry.create(kind, spec)
        except KVCoreError as e:
            yield Finding("error", spec.where, str(e), "correct its options, or name another")
    yield from machine.metrics_port(config.metrics_port)
    yield from server.answers(config.server)
    if not config.l2:
        yield Finding(
            "note",
            "tiers",
            "none: what leaves L1 is lost",
            f"add l2: [{{storage: disk}}] ({how_to_install('storage', 'disk')})",
        )
    yield from tiers.shared_paths(config.l2)
    for tier in config.l2:
        yield from tiers.probe(tier, registry, config.lookup_timeout)
