"""Fake installed distributions, for tests of what finds, refuses or recommends plugins: metadata and modules in a
folder, as pip leaves them."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path
from textwrap import dedent


def dist(
    site: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]] = {},
    modules: Mapping[str, str] = {},
    *,
    files: Mapping[str, str] = {},
    version: str = "1.0",
    requires: Sequence[str] = (),
    metadata: Mapping[str, str] = {},
    text: str = "",
) -> None:
    """Install a distribution into the folder `site`. Raises `FileExistsError` when this version of it is there.

    Args:
        entry_points: group -> name -> target, such as `{"kvcore.storage": {"acme": "acme.plugin"}}`.
        modules: module -> source, dedented; packages get no `__init__` unless it is given (`acme.__init__`).
        files: other files, path below `site` -> content, such as `{"acme/py.typed": ""}`.
        requires: requirements, such as `kvcore>=0.1,<1`.
        metadata: further fields, such as `{"License-Expression": "MIT"}`.
        text: the long description, usually a README.
    """
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    fields = [("Metadata-Version", "2.4"), ("Name", name), ("Version", version), *metadata.items()]
    fields += [("Requires-Dist", line) for line in requires]
    (info / "METADATA").write_text("".join(f"{field}: {value}\n" for field, value in fields) + f"\n{text}")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in entry_points.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    contents = {f"{module.replace('.', '/')}.py": dedent(source) for module, source in modules.items()} | dict(files)
    for path, content in contents.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(content)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in contents))
    invalidate_caches()


@contextmanager
def installed(site: Path) -> Iterator[Path]:
    """Put the folder `site` first on the path; what is imported from it is forgotten afterwards."""
    site.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(site))
    before = set(sys.modules)
    try:
        yield site
    finally:
        sys.path.remove(str(site))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "") or "").startswith(f"{site}/"):
                del sys.modules[name]
