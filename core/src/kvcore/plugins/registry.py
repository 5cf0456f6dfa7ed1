"""The registry: which plugins there are, and the one that a name selects."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy

from kvcore.api.context import Context
from kvcore.api.errors import ConfigError, PluginError
from kvcore.api.eviction import EvictionPolicy
from kvcore.api.hooks import GROUPS, Component
from kvcore.api.metrics import PluginMetrics
from kvcore.api.storage import BlockingStorage, Storage
from kvcore.api.units import brief
from kvcore.plugins import load as loading
from kvcore.plugins.discover import Candidate, PluginInfo, Status, normalize, scan
from kvcore.plugins.hooks import Hooks, interface
from kvcore.plugins.known import BUILTINS, COMMANDS, PACKAGES

if TYPE_CHECKING:
    from kvcore.api.config import PluginConfig

log = logging.getLogger("kvcore")

_RESERVED = "{name!r} is a built-in of kvcore, and such names are reserved; its author has to rename it"


class PluginSpec(NamedTuple):
    """A plugin as the configuration names it.

    Args:
        plugin: `disk`, or `disk@kvcore-disk` where two distributions give the name.
        options: the component's own config model, already validated, or the raw mapping.
        where: its place in the configuration, such as `l2[0].storage`.
    """

    plugin: str
    options: Any = {}
    where: str = ""


class PluginLists(NamedTuple):
    """The block and allow lists. None allows everything."""

    block: tuple[str, ...] = ()
    allow: tuple[str, ...] | None = None


def plugin_lists(env: Mapping[str, str] = os.environ) -> PluginLists:
    """`KVCORE_BLOCK_PLUGINS`, `KVCORE_ALLOW_PLUGINS`: comma-separated names, distributions or `name@distribution`."""

    def read(variable: str) -> tuple[str, ...]:
        return tuple(word.strip() for word in env.get(variable, "").split(",") if word.strip())

    return PluginLists(read("KVCORE_BLOCK_PLUGINS"), read("KVCORE_ALLOW_PLUGINS") or None)


def registry_from_env(env: Mapping[str, str] = os.environ) -> "Registry":
    """A registry with the block and allow lists of the environment. Warns of words there that mean no plugin."""
    lists = plugin_lists(env)
    registry = Registry(block=lists.block, allow=lists.allow)
    for variable, words in (("KVCORE_BLOCK_PLUGINS", lists.block), ("KVCORE_ALLOW_PLUGINS", lists.allow or ())):
        if idle := registry.unmatched(words):
            log.warning("%s: no installed plugin matches %s", variable, ", ".join(map(repr, idle)))
    return registry


class Registry:
    """All plugins of one process, or of one test. Metadata is read once; a plugin is imported when it is selected.

    Args:
        block: plugins that must not be imported: names, distributions or `name@distribution`.
        allow: when given, no others may be, except the core's own.
        path: where metadata is looked up instead of `sys.path` (modules are imported as always).
    """

    def __init__(
        self, *, block: Iterable[str] = (), allow: Iterable[str] | None = None, path: list[str] | None = None
    ) -> None:
        self._block = frozenset(block)
        self._allow = frozenset(allow) if allow is not None else None
        self._path = path
        self._scanned: tuple[list[Candidate], list[str]] | None = None
        self._managers: dict[Candidate, pluggy.PluginManager] = {}
        self._components: dict[Candidate, Component] = {}
        self.hooks = Hooks()
        self.metrics: Any = None
        """Where plugins' own metrics go: the registry of the cache that is opened with this; None: nowhere."""

    # --- what there is

    def available(self, kind: str) -> list[PluginInfo]:
        """Every installed plugin of `kind` (a component's kind or `hooks`), sorted by name. Imports nothing."""
        return [self._info(c) for c in self._candidates(kind)]

    def problems(self) -> list[str]:
        """What is wrong with the installed metadata and hurts nobody yet: for `kvcore doctor` and `plugins check`."""
        candidates, problems = self._scan()
        return problems + [
            f"{loading.describe(c)} is not used: {_RESERVED.format(name=c.name)}"
            for c in candidates
            if self._status(c) == "reserved"
        ]

    def unmatched(self, words: Iterable[str]) -> list[str]:
        """The words of a block or allow list that mean no installed plugin, such as misspelt ones."""
        return [w for w in words if not any(_names(w, c) for c in self._scan()[0])]

    def find(self, kind: str, name: str) -> PluginInfo:
        """The plugin that `name` or `name@distribution` selects. Raises `PluginError`; imports nothing."""
        return self._info(self._select(kind, name))

    # --- what is selected

    def component(self, kind: str, name: str) -> Component:
        """Import, validate and remember the component that `name` selects. Raises `PluginError`."""
        candidate = self._select(kind, name)
        if kind == "hooks" and not self.offers_observer(name):
            raise PluginError(f"{loading.describe(candidate)} offers no component: list it under `hooks:`")
        if candidate not in self._components:
            self._components[candidate] = loading.component(candidate, self._load(candidate))
        return self._components[candidate]

    def config_model(self, kind: str, name: str) -> "type[PluginConfig] | None":
        """The model of the component's options; None when it has none. Raises `PluginError`."""
        if kind == "hooks" and not self.offers_observer(name):
            return None
        return self.component(kind, name).config

    def offers_observer(self, name: str) -> bool:
        """Whether this plugin of the group `kvcore.hooks` offers an observer with options. Raises `PluginError`."""
        candidate = self._select("hooks", name)
        return loading.offers(candidate, self._load(candidate))

    def create(self, kind: str, spec: PluginSpec, context: Context | None = None) -> Any:
        """Make the component of `spec`, decorated by the wrappers of `use_hooks`.

        Raises `PluginError`; `ConfigError` when `spec.options` is a raw mapping that does not validate.
        """
        candidate, made = self._make(kind, spec, context)
        if not isinstance(made, interface(kind)):
            names = " or ".join(c.__name__ for c in interface(kind))
            raise PluginError(f"{loading.describe(candidate)}: its factory made a {type(made).__name__}, not a {names}")
        if kind == "command":
            loading.check_help(candidate, made)
        return self.hooks.wrap(kind, candidate.name, made)

    def context(self, where: str = "", *, passive: bool = False) -> Context:
        """A context for the component that stands at `where`; it can make eviction policies and storages."""

        def make_eviction(spec: Any) -> EvictionPolicy:
            made: EvictionPolicy = self.create("eviction", _loose(spec, f"{where}.eviction"))
            return made

        def make_storage(spec: Any) -> Storage | BlockingStorage:
            loose = _loose(spec, f"{where}.storage")
            made: Storage | BlockingStorage = self.create("storage", loose, self.context(loose.where, passive=passive))
            return made

        return Context(name=where, make_eviction=make_eviction, passive=passive, make_storage=make_storage)

    def use_hooks(self, plugins: Sequence[str | PluginSpec]) -> Hooks:
        """Load these of the group `kvcore.hooks`, in order, for `create` and the engine.

        Raises `PluginError`; `ConfigError` for raw options that do not validate.
        """
        specs = [_loose(plugin, f"hooks[{i}]") for i, plugin in enumerate(plugins)]
        chosen = [self._select("hooks", spec.plugin) for spec in specs]
        for c in chosen:
            if chosen.count(c) > 1:
                raise PluginError(f"{loading.describe(c)} is listed twice under `hooks:`")
        self.hooks = Hooks([(c.label, self._hook(c, spec)) for c, spec in zip(chosen, specs, strict=True)])
        return self.hooks

    # --- private

    def _make(self, kind: str, spec: PluginSpec, context: Context | None) -> tuple[Candidate, Any]:
        candidate = self._select(kind, spec.plugin)
        component = self.component(kind, spec.plugin)
        config = _validated(candidate, component.config, spec)
        context = context if context is not None else self.context(spec.where)
        own = PluginMetrics(candidate.name, context.name, self.metrics)
        try:
            return candidate, component.factory(config, replace(context, metrics=own))
        except loading.StartError:  # of what it asked its context for: that error has its own name and place
            raise
        except loading.FAILURES as e:
            error = loading.failure(candidate, f"failed to start ({spec.where or 'unnamed'})", e)
            raise loading.StartError(str(error)) from e

    def _hook(self, candidate: Candidate, spec: PluginSpec) -> pluggy.PluginManager:
        """The plugin's own hooks, and those of the observer that it offers, made with these options."""
        own = self._load(candidate)
        if not loading.offers(candidate, own):
            _validated(candidate, None, spec)
            return own
        both = loading.manager()
        for target in (*own.get_plugins(), self._make("hooks", spec, None)[1]):
            loading.register(candidate, both, target)
        return both

    def _scan(self) -> tuple[list[Candidate], list[str]]:
        if self._scanned is None:
            self._scanned = scan(self._path)
        return self._scanned

    def _candidates(self, kind: str) -> list[Candidate]:
        if kind not in GROUPS:
            raise PluginError(f"{kind!r} is no kind of plugin: the kinds are {', '.join(GROUPS)}")
        return [c for c in self._scan()[0] if c.kind == kind]

    def _load(self, candidate: Candidate) -> pluggy.PluginManager:
        if candidate not in self._managers:
            self._managers[candidate] = loading.load(candidate)
        return self._managers[candidate]

    def _info(self, c: Candidate) -> PluginInfo:
        return PluginInfo(c.kind, c.name, c.distribution, c.version, c.entry.value, c.builtin, self._status(c))

    def _status(self, c: Candidate) -> Status:
        if not c.builtin and c.name in (COMMANDS if c.kind == "command" else BUILTINS.get(c.kind, {})):
            return "reserved"
        if self._blocked(c):
            return "blocked"
        rivals = [o for o in self._candidates(c.kind) if o.name == c.name and not self._blocked(o)]
        return "clash" if len(rivals) > 1 and not c.builtin else "ready"

    def _blocked(self, c: Candidate) -> bool:
        if any(_names(word, c) for word in self._block):
            return True
        return self._allow is not None and not c.builtin and not any(_names(word, c) for word in self._allow)

    def _select(self, kind: str, name: str) -> Candidate:
        bare, _, distribution = name.partition("@")
        named = [c for c in self._candidates(kind) if c.name == bare]
        usable = [c for c in named if self._status(c) != "reserved"]
        if distribution:
            given = [c for c in named if normalize(c.distribution) == normalize(distribution)]
            if given and given[0] not in usable:
                raise PluginError(f"{loading.describe(given[0])} cannot be selected: {_RESERVED.format(name=bare)}")
            usable = given
        if not usable:
            raise PluginError(self._unknown(kind, name, named))
        chosen = [c for c in usable if not self._blocked(c)]
        if not chosen:
            raise PluginError(
                f"{loading.describe(usable[0])} is blocked here, by KVCORE_BLOCK_PLUGINS or KVCORE_ALLOW_PLUGINS"
            )
        if len(chosen) > 1:
            raise PluginError(_clash(kind, bare, chosen))
        return chosen[0]

    def _unknown(self, kind: str, name: str, named: list[Candidate]) -> str:
        bare, _, distribution = name.partition("@")
        if named and distribution:
            return f"no {kind} plugin {bare!r} comes from {distribution!r}: it comes from {_labels(named)}"
        installed = [c for c in self._candidates(kind) if self._status(c) != "reserved"]
        text = f"no {kind} plugin is named {brief(bare)}."
        names = {c.name for c in installed} | {known for known_kind, known in PACKAGES if known_kind == kind}
        near = nearest(bare, names - {bare})
        hint = (kind, bare) if (kind, bare) in PACKAGES else (kind, near or "")
        if near and hint[1] != bare:
            text += f" Did you mean {near!r}?"
        text += f" Installed: {_labels(installed)}."
        if hint in PACKAGES and hint[1] not in {c.name for c in installed}:
            text += f" To get {hint[1]!r}: pip install {PACKAGES[hint]}"
        elsewhere = [c for c in self._scan()[0] if c.name == bare and c.kind != kind]
        if elsewhere:
            text += f" ({bare!r} is a plugin of another kind: {elsewhere[0].kind})"
        return text


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The closest spelling among `known`, if any is close."""
    from difflib import get_close_matches

    lower = {k.lower(): k for k in sorted(known)}
    found = get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def _names(word: str, c: Candidate) -> bool:
    """Whether a word of an allow or block list means this plugin."""
    name, at, distribution = word.partition("@")
    if at:
        return name == c.name and normalize(distribution) == normalize(c.distribution)
    return word == c.name or normalize(word) == normalize(c.distribution)


def _labels(candidates: list[Candidate]) -> str:
    return ", ".join(c.label for c in candidates) or "none"


def _clash(kind: str, name: str, chosen: list[Candidate]) -> str:
    distributions = sorted({normalize(c.distribution) for c in chosen})
    text = f"{len(chosen)} {kind} plugins are named {name!r}: " + ", ".join(
        f"{c.distribution} {c.version} ({c.entry.value})" for c in chosen
    )
    if len(distributions) == 1:
        return f"{text}. One distribution declares the name twice: its author has to rename one"
    choices = " or ".join(f"'{name}@{d}'" for d in distributions)
    return f"{text}. Write {choices}, or uninstall one"


def _loose(spec: Any, where: str) -> PluginSpec:
    """A plugin spec in its YAML form, `lru` or `{plugin: lru, ...}`."""
    if isinstance(spec, PluginSpec):
        return spec
    if isinstance(spec, str):
        return PluginSpec(spec, {}, where)
    if isinstance(spec, Mapping) and isinstance(spec.get("plugin"), str):
        return PluginSpec(spec["plugin"], {k: v for k, v in spec.items() if k != "plugin"}, where)
    raise PluginError(f"{where}: {spec!r} is no plugin: write a name or {{plugin: name, option: value}}")


def _validated(candidate: Candidate, model: "type[PluginConfig] | None", spec: PluginSpec) -> Any:
    """The options as the component's own model."""
    options = spec.options
    if model is not None and isinstance(options, model):
        return options
    if not isinstance(options, Mapping):
        raise PluginError(f"{loading.describe(candidate)}: options are a {type(options).__name__}, not its own config")
    if model is None:
        if options:
            raise ConfigError(
                f"{spec.where or candidate.name}: {candidate.label} has no options, given {', '.join(options)}"
            )
        return None
    from pydantic import ValidationError

    try:
        return model.model_validate(dict(options))
    except ValidationError as e:
        lines = [
            f"{spec.where or candidate.name}: {'.'.join(map(str, f['loc']))}: {f['msg']}"
            for f in e.errors(include_input=False)
        ]
        raise ConfigError("\n".join(lines)) from e
