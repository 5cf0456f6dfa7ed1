"""LMCache's runtime plugins: programs beside it, as `plugins.run` has them."""

from pathlib import Path
from typing import Any

from kvcore_from_lmcache.draft import Draft, Setting

SUFFIXES = (".py", ".sh")
MOST = 32
"""Programs that kvcore runs."""
TOLD = (
    "told of the server by KVCORE_SERVER, KVCORE_CONFIG and KVCORE_HTTP, not by LMCACHE_RUNTIME_PLUGIN_*; "
    "a path that is not absolute begins at the folder of kvcore.yaml"
)
SERVED = "`kvcore serve` runs them, once, and no engine does: give the file a `server:`; " + TOLD


def convert(setting: Setting, draft: Draft, *, served: bool) -> None:
    """Each program of the files and folders that LMCache is given. `served`: by its server, not in each engine."""
    found: list[str] = []
    for location in _texts(setting.value):
        path = Path(location)
        if path.is_dir():
            found += sorted(str(file) for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        elif path.suffix in SUFFIXES:
            found.append(location)
        else:
            draft.leave(
                setting, f"{location} is no folder here: name what is in it, `plugins.run: [{path / 'NAME.py'}]`"
            )
    found = list(dict.fromkeys(found))
    if found:
        # LMCache starts them once, too, and leaves them alone when they have ended.
        draft.put("plugins.run", [{"path": path, "restart": "never"} for path in found[:MOST]])
        draft.serves(setting, f"plugins.run: {', '.join(found[:MOST])}", TOLD if served else SERVED, "changed")
    if len(found) > MOST:
        draft.leave(setting, f"kvcore runs at most {MOST}: not {', '.join(found[MOST:])}")
    if not setting.value:
        draft.serves(setting, "no program beside it")


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(entry).strip() for entry in value]
    text = str(value if value is not None else "").strip().strip("[]")
    return [part for part in (part.strip().strip("\"'") for part in text.split(",")) if part]
