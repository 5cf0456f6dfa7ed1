"""A stand-in for tests, not TensorRT-LLM: only what a KV cache connector touches, written from the published interface.

It is found on `sys.path` by the tests alone. See `trtllm_runtime.py` for what drives a connector through it.
"""

__version__ = "stand-in"
