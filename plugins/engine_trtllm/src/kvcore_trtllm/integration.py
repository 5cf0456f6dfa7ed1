"""What `kvcore doctor` says about TensorRT-LLM. Reads metadata only and never imports it."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvcore.api import EngineIntegration, Finding, KeySource, Prompt
from kvcore_trtllm import INTERFACE_TESTED
from kvcore_trtllm._compat import DISTRIBUTION, INTERFACE
from kvcore_trtllm.keys import Chain

USAGE = """\
# interface-tested: it has not run in TensorRT-LLM
# extra.yaml
kv_connector_config:
  connector_module: kvcore_trtllm.connector
  connector_scheduler_class: KVCoreScheduler
  connector_worker_class: KVCoreWorker

KVCORE_CONFIG=kvcore.yaml trtllm-serve MODEL --backend pytorch --extra_llm_api_options extra.yaml"""


class TrtllmIntegration(EngineIntegration):
    """Is TensorRT-LLM here? And what the connector was tested with."""

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def check(self) -> list[Finding]:
        """One finding. It is never `ok`: no version was tested."""
        data: dict[str, Any] = {"distribution": DISTRIBUTION, "interface": INTERFACE, "tested": None}
        try:
            found = version(DISTRIBUTION)
        except PackageNotFoundError:
            return [
                Finding("note", "trtllm", "TensorRT-LLM is not installed here", f"pip install {DISTRIBUTION}", data)
            ]
        return [
            Finding(
                "warning", "trtllm", f"{DISTRIBUTION} {found}; kvcore-trtllm is {INTERFACE_TESTED}",
                "compare its output with and without the connector before you rely on it", {**data, "version": found},
            )
        ]  # fmt: skip

    def usage(self) -> str:
        """The configuration and the command line that serve a model with kvcore."""
        return USAGE

    def key_source(self, prompt: Prompt) -> KeySource:
        """With the connector's own block hashes, of a request without a salt."""
        chain = Chain(prompt.block_tokens, "")
        return KeySource(prompt.chunk_tokens, prompt.block_tokens, prompt.tokens, chain.extend(prompt.tokens))
