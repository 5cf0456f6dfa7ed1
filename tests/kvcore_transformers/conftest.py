"""transformers and torch warn of their own deprecations when they are imported; tests turn warnings into errors."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers.models.deepseek_v3.modeling_deepseek_v3
    import transformers.models.gemma3.modeling_gemma3
    import transformers.models.llama.modeling_llama  # noqa: F401

import torch

torch.set_num_threads(1)  # the models are tiny, and the machine may be busy
