"""What `kvcore doctor` says about LMCache. Reads metadata only and never imports LMCache, which takes seconds."""

from typing import Any

from kvcore.api import EngineIntegration, Finding
from kvcore_lmcache._compat import TESTED, installed_lmcache

USAGE = """\
lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{"type":"plugin",\
"module_path":"kvcore_lmcache.adapter","class_name":"KVCoreL2Adapter","adapter_params":{"config":"kvcore.yaml"}}'"""


class LMCacheIntegration(EngineIntegration):
    """Is LMCache here, and of the version known to work?"""

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
