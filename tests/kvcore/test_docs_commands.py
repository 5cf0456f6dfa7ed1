"""The commands of docs/operations.md, docs/gpu.md, docs/plan.md, docs/server.md and core/README.md, run as they stand
there: only paths and sizes are smaller, and a word in capitals is what a reader puts there."""

import json
import os
import re
import runpy
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
from docs_named import parsed

from docs_blocks import ROOT, blocks, commands, lines
from kvcore.api import KeySource
from kvcore.cli import main
from kvcore.cli.child import Outcome
from kvcore.engine import CacheEngine
from kvcore.service.inspect import Subject, show
from kvcore.testing.chunks import contents, hashes, put, spec
from kvcore.testing.servers.process import Server


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [n for n in os.environ if n.startswith("KVCORE_") and not n.startswith("KVCORE_TEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configuration(page: str) -> str:
    """The page's first YAML, small."""
    text = next(block.text for block in blocks(page) if block.language == "yaml")
    return re.sub(r"\d+GiB", "256MiB", text).replace("/var/cache/kvcore", "disk")


def begins(page: str, *starts: str) -> list[list[str]]:
    """The page's commands of blocks that begin so."""
    return [words for b in blocks(page) if b.language == "" and b.first.startswith(starts) for words in commands(b)]


def fill(config: str = "kvcore.yaml") -> str:
    """Six chunks in the tiers; the namespace that they are in."""
    engine = CacheEngine.open(config, flags={"min_object_size": "128KiB"})
    space = engine.register(spec())
    put(engine, space, hashes())
    engine.close()
    return space.namespace.hex()


def test_operations(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In the page's order; what was removed is stored again before it is copied."""
    (folder / "kvcore.yaml").write_text(configuration("docs/operations.md"))
    new = "l2: [{name: new, storage: {plugin: disk, path: new, capacity: 64MiB}}]\n"
    (folder / "new.yaml").write_text(new)
    (folder / "new").mkdir()
    monkeypatch.setenv("KVCORE_CONFIG", "kvcore.yaml")
    namespace = fill()
    found = begins("docs/operations.md", "kvcore doctor", "kvcore store")
    assert len(found) == 11
    said = {}
    for words in found:
        if "cp" in words:
            assert fill() == namespace
        given = [namespace if word == "NAMESPACE" else word for word in words[1:]]
        status = main(given)
        assert status == 0 or words[1] == "doctor", (words, capsys.readouterr())
        said[" ".join(words)] = capsys.readouterr().out
    assert namespace in said["kvcore store ls"]
    doctor_tells(said["kvcore doctor kvcore.yaml"])
    assert any((folder / "new").rglob(f"{namespace}-0-*"))


def test_core_readme(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # What takes seconds, and is looked at elsewhere here.
    monkeypatch.setattr("kvcore.cli.doctor.command.call", NOT_LOOKED_AT)
    (folder / "kvcore.yaml").write_text(configuration("core/README.md"))
    (folder / "disk").mkdir()
    found = begins("core/README.md", "kvcore config check")
    assert [words[1] for words in found] == ["config", "plugins", "doctor"]
    *others, doctor = found
    for words in others:
        assert main(words[1:]) == 0, (words, capsys.readouterr())
    main(doctor[1:])
    doctor_tells(capsys.readouterr().out)


def test_doctor(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/gpu.md, where there is none."""
    (folder / "kvcore.yaml").write_text("l1: {size: 64MiB}\nl2: [{storage: {plugin: disk, path: disk}}]\n")
    monkeypatch.setenv("KVCORE_CONFIG", "kvcore.yaml")
    (line,) = lines("docs/gpu.md", "kvcore doctor")
    main(shlex.split(line, comments=True)[1:])
    doctor_tells(capsys.readouterr().out)


NOT_LOOKED_AT = lambda *words, timeout_s: Outcome(False, "not looked at", 0.0)  # noqa: E731


def doctor_tells(said: str) -> None:
    """It has looked at everything; what it says of this machine, and so its status, is the machine's."""
    for subject in ("memory", "torch", "tier disk"):
        assert re.search(rf"\b{subject}\b", said), said


def test_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/plan.md shows what is printed, for the shape of Llama 3.1 8B."""
    (folder / "llama").mkdir()
    shape = {
        "torch_dtype": "bfloat16", "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "vocab_size": 128256,
    }  # fmt: skip
    (folder / "llama" / "config.json").write_text(json.dumps(shape))
    ((command,),) = [commands(b) for b in blocks("docs/plan.md") if b.first.startswith("kvcore plan")]
    (shown,) = [b.text for b in blocks("docs/plan.md") if b.language == "text"]
    assert main(command[1:]) == 0
    assert capsys.readouterr().out.rstrip() == shown.rstrip()


@pytest.mark.parametrize("page", ["docs/server.md", "README.md"])
def test_serve(page: str) -> None:
    """One file, that of docs/server.md, and one command."""
    ((command,),) = [commands(b) for b in blocks(page) if b.first.startswith("kvcore serve")]
    with tempfile.TemporaryDirectory(prefix="kv") as short:
        text = configuration("docs/server.md").replace("/run/kvcore", short)
        (Path(short) / "kvcore.yaml").write_text(text)
        ready = (Path(short) / "kvcore.sock").is_socket
        with Server("kvcore", [sys.executable, "-m", "kvcore", *command[1:]], ready=ready, folder=Path(short)):
            assert ready()


def test_what_the_benchmark_of_engines_runs(folder: Path) -> None:
    """docs/performance.md: the script's own parser takes the line, and kvcore's the commands that it makes of it."""
    (line,) = lines("docs/performance.md", "python benchmarks/engines.py")
    script = runpy.run_path(str(ROOT / "benchmarks" / "engines.py"))
    words = shlex.split(line)[2:]
    options = script["arguments"]().parse_args(words)
    assert options.only == list(script["WORKLOADS"])
    options.out.mkdir(parents=True)
    for name in options.only:
        _, _, *command = script["command"](name, options)
        assert command[:4] == ["kvcore", "bench", "engine", name]
        parsed(command)


def test_what_runs_is_pinned_and_cleared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/operations.md, of an engine's cache that is open."""
    pins, clears = (begins("docs/operations.md", start) for start in ("kvcore pin", "kvcore clear"))
    assert (len(pins), len(clears)) == (3, 3)
    with tempfile.TemporaryDirectory(prefix="kv") as short:
        monkeypatch.setenv("KVCORE_RUN_DIR", f"{short}/run")
        Path("kvcore.yaml").write_text(configuration("docs/operations.md"))
        engine = CacheEngine.open("kvcore.yaml", flags={"min_object_size": "128KiB", "keys": "tokens"})
        show(Subject(engine, "vllm", engine.manager))
        try:
            space, tokens = engine.register(spec(), "alice"), list(range(100))
            Path("system.json").write_text(json.dumps(tokens))
            keys = space.hashes(KeySource(space.chunk_tokens, space.spec.block_tokens, tokens))
            put(engine, space, keys)
            contents(engine, space, keys)
            values = {"PREFIX": keys[2].hex()[:12], "NAMESPACE": space.namespace.hex()}
            for words in pins:
                tenant = ["--tenant", "alice"] if "--prompt-file" in words else []
                assert main([values.get(word, word) for word in words[1:]] + tenant) == 0, capsys.readouterr()
                kept = "are no longer" if "--end" in words else "3 of 3 chunks"
                assert kept in capsys.readouterr().out
            for words in clears:
                assert main([values.get(word, word) for word in words[1:]]) == 0, capsys.readouterr()
                assert "3 objects of l1" in capsys.readouterr().out
                assert contents(engine, space, keys) == ([] if "--tiers" in words else [1, 2, 3])
                put(engine, space, keys)
        finally:
            engine.close()
