"""Without a GPU nothing here may look as if it had passed."""

import pytest


def pytest_sessionstart() -> None:
    """Called when tests/gpu is what pytest was told to run, not when it finds this folder among others."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        pytest.exit("make test-gpu needs an NVIDIA GPU that torch can use, and torch sees none here", returncode=1)
    try:
        import cupy  # noqa: F401
    except ImportError:
        pytest.exit("make test-gpu needs CuPy: pip install 'kvcore[cuda]' (CUDA 12) or 'kvcore[cuda13]'", returncode=1)
