"""What `kvcore doctor` says about transformers. Reads metadata only and imports neither it nor torch."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvcore.api import EngineIntegration, Finding, KeySource, Prompt
from kvcore_transformers._compat import TESTED, is_tested
from kvcore_transformers.keys import BLOCK_TOKENS, block_hashes

USAGE = """\
from kvcore_transformers import PrefixCache
cache = PrefixCache(model, "kvcore.yaml")
out = cache.generate(**inputs, max_new_tokens=50)"""


class TransformersIntegration(EngineIntegration):
    """Is transformers here, and of a version known to work?"""

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def check(self) -> list[Finding]:
        """One finding for transformers."""
        try:
            found = version("transformers")
        except PackageNotFoundError:
            return [Finding("note", "transformers", "transformers is not installed here", "pip install transformers")]
        data = {"distribution": "transformers", "version": found, "tested": TESTED}
        if is_tested(found):
            return [Finding("ok", "transformers", f"transformers {found}", data=data)]
        return [
            Finding(
                "warning", "transformers", f"transformers {found} is not a version that kvcore-transformers was tested "
                f"with ({TESTED}.x)", f"if generate() fails, pip install transformers=={TESTED}.*", data,
            )
        ]  # fmt: skip

    def usage(self) -> str:
        """The three lines."""
        return USAGE

    def key_source(self, prompt: Prompt) -> KeySource:
        """With the block hashes of a row of these tokens."""
        hashes = block_hashes(prompt.tokens, len(prompt.tokens) // BLOCK_TOKENS)
        return KeySource(prompt.chunk_tokens, prompt.block_tokens, prompt.tokens, hashes)
