"""Whether what is installed belongs together: core, plugins and engines. From metadata alone, for `kvcore doctor`."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from kvcore import __version__
from kvcore.api.engine import Finding
from kvcore.api.hooks import GROUPS
from kvcore.plugins import Registry
from kvcore.plugins.known import CORE, ENGINES, PACKAGES


def versions(registry: Registry) -> Iterator[Finding]:
    """What does not fit, or one line that says that all does."""
    infos = [info for kind in GROUPS for info in registry.available(kind) if not info.builtin]
    installed = {info.distribution: info.version for info in infos}
    found = [*_core(), *_releases(installed), *_without_plugin({i.name for i in infos if i.kind == "engine"})]
    yield from found
    if not found:
        yield Finding("ok", "versions", f"{CORE} {__version__} and its packages are of one release")


def _core() -> Iterator[Finding]:
    """The core's own metadata, by which `pip` judges plugins, against the code that runs."""
    said = _version(CORE)
    if said is not None and said != __version__:
        text = (
            f"{CORE} {__version__} runs, but the metadata of this environment says {said}: an update was not finished"
        )
        yield Finding("warning", "versions", text, f"pip install --force-reinstall {CORE}")


def _releases(installed: dict[str, str]) -> Iterator[Finding]:
    """Packages of ours that are not of the core's release: what their ranges allow works, but is tested less."""
    for name in sorted(set(PACKAGES.values()) & installed.keys()):
        if _release(installed[name]) != _release(__version__):
            text = f"{name} {installed[name]} is of another release than {CORE} {__version__}"
            yield Finding("warning", "versions", text, f"pip install --upgrade {CORE} {name}")


def _without_plugin(plugins: set[str]) -> Iterator[Finding]:
    """Engines that are here, and would not find kvcore."""
    for distribution, plugin in ENGINES.items():
        found = _version(distribution)
        if found is not None and plugin not in plugins:
            text = f"{distribution} {found} is installed, and its engine plugin is not: it does not find kvcore"
            yield Finding("warning", "versions", text, f"pip install {PACKAGES['engine', plugin]}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _release(text: str) -> list[str]:
    return text.split(".")[:2]
