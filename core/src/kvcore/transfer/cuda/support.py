"""Which devices the CUDA kernels serve, and what is missing where they do not."""

import os

INSTALL = "pip install 'kvcore[cuda]' (CUDA 12) or 'kvcore[cuda13]'"


def obstacle(device_type: str) -> str | None:
    """Why KV on torch devices of this type is not copied by the kernels; None when it is, as far as can be told without
    using the device."""
    if device_type != "cuda":
        return f"the kernels are for NVIDIA GPUs, not for {device_type}"
    if os.environ.get("KVCORE_CUDA_KERNELS", "").lower() in ("off", "0", "false"):
        return "KVCORE_CUDA_KERNELS says so"
    import torch

    if torch.version.hip:
        return "this torch is built for ROCm, the kernels are for NVIDIA GPUs"
    try:
        import cupy  # noqa: F401
    except Exception as error:  # a build that does not fit the machine raises more than ImportError
        return f"CuPy cannot be imported ({error}): {INSTALL}"
    return None
