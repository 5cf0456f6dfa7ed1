"""From a chosen entry point to a validated plugin. Every failure is one `PluginError` that says who, what and where."""

import re
import traceback
from inspect import signature
from types import CodeType
from typing import Any

import pluggy

from kvcore.api import hooks as hookspecs
from kvcore.api.errors import KVCoreError, PluginError
from kvcore.api.hooks import API_VERSIONS, ApiVersion, Component
from kvcore.plugins.discover import Candidate
from kvcore.plugins.known import CORE

FAILURES = (Exception, SystemExit)
"""What a plugin's code may raise into us. A module that calls `sys.exit` at import must not end the engine."""

_HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("kvcore_"))


class StartError(PluginError):
    """A factory has failed."""


def manager() -> pluggy.PluginManager:
    """A fresh manager with the hook specs. One per plugin: what failed leaves nothing behind."""
    pm = pluggy.PluginManager(CORE)
    pm.add_hookspecs(hookspecs)
    return pm


def load(candidate: Candidate) -> pluggy.PluginManager:
    """Import the plugin and register its hooks, all of them known to this core. Raises `PluginError`."""
    check_requires(candidate)
    try:
        target = candidate.entry.load()
    except FAILURES as e:
        raise failure(candidate, "cannot be imported", e) from e
    pm = manager()
    register(candidate, pm, target)
    return pm


def register(candidate: Candidate, pm: pluggy.PluginManager, target: Any) -> None:
    """Register the hooks of a plugin's module, or of the observer it has made. Raises `PluginError`."""
    try:
        pm.register(target)
        pm.check_pending()
    except pluggy.PluginValidationError as e:
        text = _unknown_arguments(target) or _known_hooks(str(e))
        raise PluginError(f"{describe(candidate)} has a wrong hook: {text}") from e
    except FAILURES as e:
        raise failure(candidate, "cannot be registered", e) from e
    if not pm.get_hookcallers(target):
        raise PluginError(
            f"{describe(candidate)} implements no hook: {candidate.entry.value!r} needs a function "
            f"marked @hookimpl, such as {_expected_hook(candidate)}"
        )


def offers(candidate: Candidate, pm: pluggy.PluginManager) -> bool:
    """Does the plugin implement the hook that offers its component? Of the group `kvcore.hooks` few do."""
    return bool(getattr(pm.hook, _offer(candidate)).get_hookimpls())


def component(candidate: Candidate, pm: pluggy.PluginManager) -> Component:
    """The component the plugin offers for its kind. Raises `PluginError`."""
    name = _offer(candidate)
    if not offers(candidate, pm):
        raise PluginError(
            f"{describe(candidate)} does not implement {name}: {candidate.entry.value!r} stands in "
            f"the entry-point group {candidate.entry.group!r}, so it must"
        )
    try:
        offered = getattr(pm.hook, name)()
    except FAILURES as e:
        raise failure(candidate, f"failed in {name}()", e) from e
    if not isinstance(offered, Component):
        raise PluginError(f"{describe(candidate)}: {name}() returned {offered!r}, not a Component")
    _check_api(candidate, offered.api)
    if not callable(offered.factory):
        raise PluginError(f"{describe(candidate)}: factory {offered.factory!r} cannot be called")
    if offered.config is not None:
        if candidate.kind == "command":
            raise PluginError(f"{describe(candidate)} has a config: a command has arguments, and no options in YAML")
        _check_config(candidate, offered.config)
    return offered


def check_requires(candidate: Candidate) -> None:
    """Compare the distribution's `Requires-Dist: kvcore` with this core. Raises `PluginError`."""
    if candidate.dist is None or candidate.builtin:
        return
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    from kvcore import __version__

    for line in candidate.dist.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # pip judges those; only the one on the core is ours
        if canonicalize_name(requirement.name) != CORE or not _applies(requirement.marker):
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            raise PluginError(
                f"{describe(candidate)} needs {CORE}{requirement.specifier}, but this is {CORE} {__version__}: "
                f"pip install --upgrade {candidate.distribution} {CORE}"
            )


def _applies(marker: Any) -> bool:
    return marker is None or bool(marker.evaluate({"extra": ""}))


def _check_api(candidate: Candidate, api: object) -> None:
    kind = candidate.kind
    ours = API_VERSIONS[kind]
    if not (isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)):
        raise PluginError(
            f"{describe(candidate)} declares api={api!r}: write a literal such as ApiVersion({ours.major}, 0)"
        )
    theirs = ApiVersion(*api)
    if theirs.major != ours.major or theirs.minor > ours.minor:
        newer = theirs > ours
        raise PluginError(
            f"{describe(candidate)} was built for {kind} API {theirs}, but {CORE} offers {ours}: "
            f"pip install --upgrade {CORE if newer else candidate.distribution}"
        )


def _check_config(candidate: Candidate, config: Any) -> None:
    from kvcore.api.config import PluginConfig

    if not (isinstance(config, type) and issubclass(config, PluginConfig)):
        raise PluginError(f"{describe(candidate)}: config {config!r} is no subclass of kvcore.api.PluginConfig")
    if config.model_config.get("extra") != "forbid":
        raise PluginError(
            f"{describe(candidate)}: config {config.__name__} must keep extra='forbid', so that typos show"
        )


def check_help(candidate: Candidate, command: Any) -> None:
    """A command's help is a line of text. Raises `PluginError`."""
    try:
        text = getattr(command, "help", None)
    except FAILURES as e:
        raise failure(candidate, "cannot say its help", e) from e
    if not isinstance(text, str) or not text.strip():
        raise PluginError(f"{describe(candidate)}: its help is {text!r}: it must be a line of text")


def describe(candidate: Candidate) -> str:
    """`storage plugin 'disk' (kvcore-disk 0.1.0)`."""
    return f"{candidate.kind} plugin {candidate.name!r} ({candidate.distribution} {candidate.version})"


def failure(candidate: Candidate, what: str, cause: BaseException) -> PluginError:
    """The one error for code of the plugin that raised: cause and place, and what to install where that is known."""
    text = f"{describe(candidate)} {what}: {_cause(cause)}"
    place = where(cause, candidate.entry.value)
    if place and not isinstance(cause, KVCoreError):
        text += f", at {place}"
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if missing and missing.partition(".")[0] != _package(candidate.entry.value):
        text += f". The module {missing!r} is not installed here: pip install the package that brings it"
    return PluginError(text)


def _cause(cause: BaseException) -> str:
    if isinstance(cause, KVCoreError):
        return str(cause)
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


def where(error: BaseException, target: str) -> str:
    """`file:line` of the last frame in the plugin's own package, or else of the last frame with a source."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    package = _package(target)
    own = last = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code: CodeType = frame.f_code
        if code.co_filename.startswith("<") or frame.f_globals.get("__name__", "").startswith(
            ("kvcore.plugins", "importlib")
        ):
            continue
        last = f"{code.co_filename}:{line}"
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            own = last
    return own or last


def _unknown_arguments(target: Any) -> str:
    """What is wrong with the arguments of the plugin's hooks, or nothing."""
    texts = []
    for name in _HOOKS:
        if (function := getattr(target, name, None)) is None or not hasattr(function, f"{CORE}_impl"):
            continue
        allowed = list(signature(getattr(hookspecs, name)).parameters)
        unknown = [
            p.name
            for p in signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty and p.name not in allowed
        ]
        if unknown:
            may = f"may take {', '.join(allowed)}" if allowed else "takes no argument"
            texts.append(f"{name} has the unknown argument {', '.join(unknown)}: it {may}")
    return "; ".join(texts)


def _known_hooks(text: str) -> str:
    from difflib import get_close_matches

    text = " ".join(text.split())
    wrong = re.match(r"unknown hook '(\w+)'", text)
    if wrong is None:
        return text
    near = get_close_matches(wrong[1], _HOOKS, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{text}{hint}. The hooks are {', '.join(_HOOKS)}"


def _offer(candidate: Candidate) -> str:
    return "kvcore_observer" if candidate.kind == "hooks" else f"kvcore_{candidate.kind}"


def _expected_hook(candidate: Candidate) -> str:
    return "kvcore_stored" if candidate.kind == "hooks" else f"kvcore_{candidate.kind}"


def _package(target: str) -> str:
    """The top-level package of an entry point's target."""
    return target.partition(":")[0].partition(".")[0].strip()
