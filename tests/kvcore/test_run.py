"""`kvcore run`: it becomes the engine that a plugin describes, a third party's too."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from kvcore.cli import main
from kvcore.testing import dist

TOY = '''
import json, os, sys
from kvcore.api import ApiVersion, Component, EngineIntegration, Finding, Launch, hookimpl

ENGINE = """
import json, os, signal, sys
def ended(number, frame):
    os.write(1, b"asked to end" + bytes([10]))  # print may have been interrupted
    os._exit(7)
signal.signal(signal.SIGTERM, ended)
print(json.dumps([os.getpid(), sys.argv[1:], os.environ["TOY"]]), flush=True)
if "wait" in sys.argv:
    signal.pause()
sys.exit(5)
"""

class Toy(EngineIntegration):
    ways = ("front", "back")

    def check(self):
        level = os.environ.get("TOY_LEVEL", "ok")
        return [Finding(level, "toy", "it has no wheels", "give it some")]

    def usage(self):
        return "toy serve MODEL"

    def launch(self, request):
        if "interrupted" in request.words:
            import acme_interrupted
        told = {"via": request.via, "role": request.role, "config": request.config, "values": dict(request.values),
                "l1": request.l1_bytes}
        added = ("--cache", json.dumps(told))
        untested = f"toy {os.environ['TOY_VERSION']} was not tested" if "TOY_VERSION" in os.environ else ""
        command = (sys.executable, "-c", ENGINE, *request.words, *added)
        return Launch(command, added, {"TOY": "it's here"}, untested)

class Old(EngineIntegration):
    def check(self):
        return []

    def usage(self):
        return "old serve MODEL"

@hookimpl
def kvcore_engine():
    return Component(api=ApiVersion(1, 0), factory=FACTORY)
'''
LONG_S = 60.0


@pytest.fixture(autouse=True)
def toys(site, monkeypatch, tmp_path):
    """Two engines of others: one that says how it is started, and one from before that was asked."""
    for name in [n for n in os.environ if n.startswith("KVCORE_")]:
        monkeypatch.delenv(name)
    dist(site, "acme-toy", {"kvcore.engine": {"toy": "acme_toy"}}, {"acme_toy": TOY.replace("FACTORY", "Toy")})
    dist(site, "acme-old", {"kvcore.engine": {"old": "acme_old"}}, {"acme_old": TOY.replace("FACTORY", "Old")})
    monkeypatch.setenv("PYTHONPATH", str(site))
    (tmp_path / "kvcore.yaml").write_text("l1: {size: 64MiB}\nl2: []\n")
    monkeypatch.chdir(tmp_path)


def start(*words):
    command = [sys.executable, "-m", "kvcore", "run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_becomes_the_engine(tmp_path):
    """In one and the same process, with its exit status; stdout is the engine's alone."""
    process = start("toy", "--config", "kvcore.yaml", "--", "serve", "a model", "--", "x")
    out, err = process.communicate(timeout=LONG_S)
    pid, words, variable = json.loads(out)
    assert (pid, process.returncode, variable) == (process.pid, 5, "it's here")
    assert words[:5] == ["serve", "a model", "--", "x", "--cache"]
    told = {"via": "front", "role": "both", "config": str(tmp_path / "kvcore.yaml"), "values": {}, "l1": 64 << 20}
    assert json.loads(words[5]) == told
    adds, runs = err.splitlines()[0], err.splitlines()[1]
    assert adds == f"kvcore adds: --cache {shlex.quote(words[5])}"
    assert runs.startswith("kvcore runs: TOY='it'\"'\"'s here' ")


def test_an_interrupt_while_the_last_modules_are_imported_is_not_lost(site):
    """It comes again a little later, when the process would be the engine's."""
    (site / "acme_interrupted.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    process = start("toy", "--", "interrupted")
    out, err = process.communicate(timeout=LONG_S)
    assert (out, process.returncode, err.splitlines()[-1]) == ("", 130, "kvcore: interrupted")


def test_signals_are_the_engines():
    process = start("toy", "--", "wait")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())[0] == process.pid
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LONG_S)
    assert (out, process.returncode) == ("asked to end\n", 7)


def test_print_gives_a_line_to_copy(capsys):
    words = ["--config", "kvcore.yaml", "--set", "l1.size=70MiB", "--via", "back", "--role", "decode", "--print"]
    assert main(["run", *words, "toy", "--", "it's", "$HOME"]) == 0
    line = capsys.readouterr().out
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=LONG_S, check=False)
    _, words, variable = json.loads(done.stdout)
    assert (done.returncode, words[:2], variable) == (5, ["it's", "$HOME"], "it's here")
    told = json.loads(words[3])
    assert (told["via"], told["role"]) == ("back", "decode")
    assert (told["values"], told["l1"]) == ({"l1.size": "70MiB"}, 70 << 20)


def test_the_file_of_the_environment(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KVCORE_CONFIG", "kvcore.yaml")
    assert main(["run", "toy", "--print", "--", "serve"]) == 0
    assert f'"config": "{tmp_path}/kvcore.yaml"' in capsys.readouterr().out
    monkeypatch.delenv("KVCORE_CONFIG")
    assert main(["run", "toy", "--print", "--", "serve"]) == 0
    assert '"config": null' in capsys.readouterr().out


def test_a_version_that_was_not_tested_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("TOY_VERSION", "9.9")
    assert main(["run", "toy", "--print", "--", "serve"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "kvcore: toy 9.9 was not tested (--untested starts it all the same)\n")
    assert main(["run", "toy", "--untested", "--print", "--", "serve"]) == 0
    assert "--cache" in capsys.readouterr().out


def test_an_engine_that_could_not_work_is_not_started(capsys, monkeypatch):
    monkeypatch.setenv("TOY_LEVEL", "warning")
    assert main(["run", "toy", "--print", "--", "serve"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("TOY_LEVEL", "error")
    assert main(["run", "toy", "--untested", "--print", "--", "serve"]) == 1
    assert capsys.readouterr().err == "kvcore: toy: it has no wheels. Next: give it some\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["old", "--"], "kvcore run cannot start 'old'. Start it so:\n\n    old serve MODEL\n"),
        (["toy"], "the words of toy's own command are missing: write them behind `--`, as in kvcore run toy -- serve"),
        (["toy", "--via", "side", "--"], "--via side: toy uses kvcore via front or back"),
        (["tyo", "--"], "Did you mean 'toy'?"),
        (
            ["toy", "serve", "--port", "1"],
            "arguments: serve --port 1: what is another program's stands behind",
        ),
        (["toy", "--port", "1", "--", "serve"], "unrecognized arguments: --port 1"),
        (["toy", "--set", "l1.size=2", "--", "serve"], "l1.size"),
        (["toy", "--config", "nothere.yaml", "--", "serve"], "nothere.yaml"),
        ([], "required: ENGINE"),
    ],
)
def test_what_is_refused(words, said, capsys):
    assert main(["run", *words]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_an_integration_without_ways_says_how_it_is_started(site):
    from kvcore.api import LaunchRequest, PluginError
    from kvcore.plugins import PluginSpec, Registry

    old = Registry().create("engine", PluginSpec("old", {}, "engine"))
    with pytest.raises(PluginError, match="old serve MODEL"):
        old.launch(LaunchRequest((), "any"))
