"""What `kvcore doctor` says about SGLang. Reads metadata only and never imports SGLang, which takes seconds."""

import sys
from typing import Any

from kvcore.api import EngineIntegration, Finding, KeySource, Launch, LaunchRequest, PluginError, Prompt
from kvcore_sglang import prompts
from kvcore_sglang._compat import SERVER_MODULE, TESTED, installed_sglang, is_tested
from kvcore_sglang.launch import with_kvcore

USAGE = """\
python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic \
--hicache-storage-backend-extra-config '{"backend_name":"kvcore","module_path":"kvcore_sglang.backend",\
"class_name":"KVCoreHiCache","interface_v1":1,"config":"kvcore.yaml"}'"""

_UNTESTED = f"is not the version that kvcore-sglang was tested with ({TESTED})"


class SglangIntegration(EngineIntegration):
    """Is SGLang here, of a version known to work? How is it started?"""

    ways = ("hicache",)
    schemes = (prompts.KEYS,)

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def check(self) -> list[Finding]:
        """One finding. SGLang imports the backend by the name in its command line: there is nothing to register."""
        found = installed_sglang()
        if found is None:
            return [Finding("note", "sglang", "SGLang is not installed here", f"pip install sglang=={TESTED}")]
        data = {"distribution": "sglang", "version": found, "tested": TESTED}
        if is_tested(found):
            return [Finding("ok", "sglang", f"sglang {found}", data=data)]
        return [
            Finding(
                "warning", "sglang", f"sglang {found} {_UNTESTED}",
                f"if it does not start, pip install sglang=={TESTED}", data,
            )
        ]  # fmt: skip

    def usage(self) -> str:
        """The command line that serves a model with kvcore."""
        return USAGE

    def key_source(self, prompt: Prompt) -> KeySource:
        """SGLang's page hashes of a prompt."""
        return prompts.key_source(prompt)

    def launch(self, request: LaunchRequest) -> Launch:
        """SGLang's server with kvcore as the storage backend of its hierarchical cache."""
        found = installed_sglang()
        if found is None:
            raise PluginError(f"SGLang is not installed here: pip install sglang=={TESTED}")
        words, added = with_kvcore(request)
        untested = "" if is_tested(found) else f"sglang {found} {_UNTESTED}"
        return Launch((sys.executable, "-m", SERVER_MODULE, *words), tuple(added), untested=untested)
