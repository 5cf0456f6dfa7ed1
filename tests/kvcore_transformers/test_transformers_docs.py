"""What the README and docs/transformers.md show works: their Python is run, their YAML is checked."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers_small import FLAGS, gqa, plain, tokens

from docs_blocks import lines
from kvcore_transformers import PrefixCache, integration

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "plugins" / "engine_transformers" / "README.md", ROOT / "docs" / "transformers.md")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_pages_python_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks(PAGES[0], "yaml")
    small = text.replace("4GiB", "64MiB").replace("/var/cache/kvcore", str(tmp_path / "disk")) + "chunk_tokens: 32\n"
    (tmp_path / "kvcore.yaml").write_text(small)
    model, ids = gqa(), tokens(100)
    names = {"model": model, "input_ids": ids, "inputs": {"input_ids": ids, "do_sample": False}}
    code = blocks(page, "python")
    assert code
    for block in code:
        exec(block, names)
    cache = names["cache"]
    assert isinstance(cache, PrefixCache)
    assert torch.equal(names["out"], plain(model, ids, max_new_tokens=50))
    if page.name != "README.md":
        assert capsys.readouterr().out.startswith("0 of 100 tokens, not refused")
        assert cache.last.reused_tokens == 96
    cache.close()


def test_the_three_lines_are_the_same_everywhere() -> None:
    three = "".join(line for line in integration.USAGE.splitlines(keepends=True))
    for page in PAGES:
        assert three in blocks(page, "python")[0].replace("\n\n", "\n")


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a small model and a tokenizer of words; with the real model, people run it."""
    import runpy

    import transformers

    class Words:
        @classmethod
        def from_pretrained(cls, name: str) -> "Words":
            return cls()

        def __call__(self, text: str, return_tensors: str) -> object:
            ids = [3 + sum(map(ord, word)) % 500 for word in text.split()]
            return type("Encoded", (), {"input_ids": torch.tensor([ids])})()

    class Small:
        @classmethod
        def from_pretrained(cls, name: str) -> object:
            return gqa()

    config = tmp_path / "kvcore.yaml"
    config.write_text(f"l1: {{size: 64MiB}}\nchunk_tokens: {FLAGS['chunk_tokens']}\nlookup_timeout: 20s\n")
    monkeypatch.setattr(transformers, "AutoTokenizer", Words)
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", Small)
    script = ROOT / "examples" / "transformers" / "notebook.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--config", str(config), "--tokens", "200"])
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert "0 of" in printed
    assert printed.count("the same") == 3
    assert "DIFFERENT" not in printed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_examples_readme(tmp_path: Path) -> None:
    """Both lines of examples/transformers/README.md: the real model is made, and reused from."""
    page = "examples/transformers/README.md"
    (make,), (notebook,) = (lines(page, f"python examples/{what}") for what in ("models/smollm2.py", "transformers/"))
    folder = Path(os.environ.get("KVCORE_TEST_MODELS") or tmp_path)  # where it may be already
    config = tmp_path / "kvcore.yaml"
    config.write_text((ROOT / "examples/transformers/kvcore.yaml").read_text().replace("build/", f"{tmp_path}/"))
    for line, more in ((make, []), (notebook, ["--tokens", "150", "--config", str(config)])):
        words = shlex.split(line.replace("build/models", str(folder.absolute())))[1:]
        done = subprocess.run(
            [sys.executable, *words, *more],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},  # more of them wait for each other on a busy machine
            capture_output=True, text=True, timeout=800, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same") == 3
    assert "DIFFERENT" not in done.stdout
