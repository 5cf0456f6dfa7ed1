"""Options of the quant serde."""

from typing import Literal

from pydantic import Field

from kvcore.api import PluginConfig


class QuantConfig(PluginConfig):
    """Options of `serde: [quant]`. `format` decides what is lost, so each has a namespace of its own."""

    format: Literal["fp8", "int4"] = "fp8"
    """`fp8`: e4m3 with a scale for 128 elements, half of bfloat16. `int4`: four bits with a scale and a minimum for 32
    elements, less than a third of bfloat16, and answers change sooner."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """`cpu`, or `cuda` (`cuda:1`): kernels on a GPU, which need CuPy and some of its memory. The bytes are the same.
    Compiled and emulated in tests, not run on a GPU yet."""
