"""kvcore under TensorRT-LLM: a KV cache connector. Interface-tested: it has not run in TensorRT-LLM.

Written to the published interface and driven in tests by a stand-in that keeps to its call order and rules. The classes
that TensorRT-LLM is told of stand in `kvcore_trtllm.connector`.
"""

__version__ = "0.1.0"

INTERFACE_TESTED = "interface-tested: it has not run in TensorRT-LLM"
"""Said wherever a user reads of this connector."""

__all__ = ["INTERFACE_TESTED", "__version__"]
