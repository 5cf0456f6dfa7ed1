"""What `kvcore doctor` says about LMCache. Reads metadata only and never imports LMCache, which takes seconds."""

import json
import sys
from typing import Any, ClassVar

from kvcore.api import (
    ConfigError,
    EngineIntegration,
    Finding,
    KeySource,
    Launch,
    LaunchRequest,
    PluginError,
    Prompt,
)
from kvcore_lmcache import prompts
from kvcore_lmcache._compat import TESTED, installed_lmcache

FLAG = "--l2-adapter"
MODULE, CLASS = "kvcore_lmcache.adapter", "KVCoreL2Adapter"
USAGE = f"""\
lmcache server --l1-size-gb 20 --eviction-policy LRU {FLAG} '{{"type":"plugin","module_path":"{MODULE}",\
"class_name":"{CLASS}","adapter_params":{{"config":"kvcore.yaml"}}}}'"""


class LMCacheIntegration(EngineIntegration):
    """Is LMCache here, and of the version known to work? Starts its server with the adapter."""

    ways: ClassVar[tuple[str, ...]] = ("l2",)
    schemes: ClassVar[tuple[str, ...]] = (prompts.SCHEME,)

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def check(self) -> list[Finding]:
        """One finding for LMCache; it finds the adapter by the name on its command line."""
        found = installed_lmcache()
        if found is None:
            return [Finding("note", "lmcache", "LMCache is not installed here", "pip install lmcache")]
        data = {"distribution": "lmcache", "version": found, "tested": TESTED}
        if found == TESTED:
            return [Finding("ok", "lmcache", f"lmcache {found}", data=data)]
        return [
            Finding(
                "warning", "lmcache", f"lmcache {found} is not what kvcore-lmcache was tested with ({TESTED})",
                f"if it does not start, pip install lmcache=={TESTED}", data,
            )
        ]  # fmt: skip

    def usage(self) -> str:
        """The command line of LMCache's server with kvcore behind it."""
        return USAGE

    def key_source(self, prompt: Prompt) -> KeySource:
        """LMCache's names of a prompt's chunks."""
        return prompts.key_source(prompt)

    def launch(self, request: LaunchRequest) -> Launch:
        """`lmcache server` with the adapter, unless the user has written one of kvcore's."""
        found = installed_lmcache()
        if found is None:
            raise PluginError("LMCache is not installed here: pip install lmcache")
        if request.words[:1] != ("server",):
            given = " ".join(request.words) or "nothing"
            raise ConfigError(f"{given} is not LMCache's server: kvcore run lmcache -- server --l1-size-gb 20 ...")
        if request.role != "both":
            raise ConfigError(f"--role {request.role} is for engines, and LMCache's server is none: leave it out")
        added = () if any(MODULE in word for word in request.words) else (FLAG, json.dumps(_adapter(request)))
        untested = "" if found == TESTED else f"lmcache {found} is not what kvcore-lmcache was tested with ({TESTED})"
        # As a module: the program `lmcache` of another environment may come first on the path.
        command = (sys.executable, "-m", "lmcache.cli.main", *request.words, *added)
        return Launch(command, added, untested=untested)


def _adapter(request: LaunchRequest) -> dict[str, Any]:
    """The adapter as LMCache wants it described."""
    params: dict[str, Any] = {"config": request.config} if request.config else {}
    if request.values:
        params["set"] = dict(request.values)
    return {"type": "plugin", "module_path": MODULE, "class_name": CLASS, "adapter_params": params}
