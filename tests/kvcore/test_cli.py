"""The command line: what it prints, its exit status, and that no error is a traceback."""

import argparse
import json
import logging
import os
import pty
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from plugin_samples import storage

from kvcore.api import Finding, PluginError
from kvcore.cli import main
from kvcore.cli.app import COMMANDS, _parser
from kvcore.cli.child import Outcome, call
from kvcore.engine import CacheEngine
from kvcore.plugins import known
from kvcore.testing import dist


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No variables of ours, and an own working folder."""
    for name in [n for n in os.environ if n.startswith("KVCORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def acme(site):
    """A third-party storage with options."""
    dist(site, "kvcore-acme", {"kvcore.storage": {"acme": "fake_acme"}}, {"fake_acme": storage()})
    return site


def test_usage(capsys):
    assert main([]) == 2
    assert main(["nonsense"]) == 2
    assert main(["plugins"]) == 2
    assert main(["config", "check"]) == 2
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    out, err = capsys.readouterr()
    assert "kvcore 0." in out
    assert "Traceback" not in err


COMMAND = """
from kvcore.api import ApiVersion, Command, Component, ConfigError, hookimpl
class Greet(Command):
    help = "greet 100% of them"
    words_follow = True
    def add_arguments(self, parser):
        parser.add_argument("whom")
    def run(self, args):
        if args.whom == "nobody":
            raise ConfigError("nobody: greet somebody")
        print("hello", args.whom, args.words)
        return 0
@hookimpl
def kvcore_command():
    return Component(api=ApiVersion(1, 0), factory=Greet)
"""


def test_a_command_of_another_package(site, capsys, monkeypatch):
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_greet"}}, {"acme_greet": COMMAND})
    assert main(["greet", "all", "--", "-x"]) == 0
    assert capsys.readouterr().out == "hello all ['-x']\n"
    assert main(["greet@kvcore-acme", "all"]) == 0
    assert main(["--help"]) == 0
    assert "\n  greet (kvcore-acme)\n" in capsys.readouterr().out
    assert main(["greet", "--help"]) == 0
    assert "\n\ngreet 100% of them\n\n" in capsys.readouterr().out
    assert main(["greet", "nobody"]) == 1
    assert capsys.readouterr().err == "kvcore: nobody: greet somebody\n"
    assert main(["greet"]) == 2
    assert "usage: kvcore greet" in capsys.readouterr().err
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert main(["plugins", "check", "greet"]) == 0
    monkeypatch.setenv("KVCORE_BLOCK_PLUGINS", "greet")
    capsys.readouterr()
    assert main(["greet", "all"]) == 1
    assert "is blocked here" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "greet" not in capsys.readouterr().out
    monkeypatch.setenv("KVCORE_BLOCK_PLUGINS", "kvcore-bench")
    assert main(["--help"]) == 0
    assert "bench" not in capsys.readouterr().out  # it is there


def test_a_command_that_does_not_import_hurts_no_other(site, capsys):
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_broken"}}, {"acme_broken": "import acme_absent"})
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "\n  greet (kvcore-acme)\n" in out
    assert "doctor" in out
    assert main(["greet"]) == 1
    assert "command plugin 'greet' (kvcore-acme 1.0) cannot be imported" in capsys.readouterr().err
    assert main(["plugins", "list"]) == 0


@pytest.mark.parametrize(
    ("of_class", "said"),
    [
        ("pass", "its help is None: it must be a line of text"),
        ("help = 5", "its help is 5: it must be a line of text"),
        ("help = ''", "its help is '': it must be a line of text"),
        ("help = property(lambda self: 1 / 0)", "cannot say its help: ZeroDivisionError: division by zero, at "),
    ],
)
def test_a_command_without_a_help(site, capsys, monkeypatch, of_class, said):
    source = COMMAND.replace('help = "greet 100% of them"', of_class)
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_greet"}}, {"acme_greet": source})
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert main(["plugins", "check", "greet"]) == 1
    assert said in capsys.readouterr().out
    assert main(["greet", "all"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvcore: command plugin 'greet' (kvcore-acme 1.0)")
    assert said in err


def test_a_commands_help_does_nothing_to_the_terminal(site, capsys):
    source = COMMAND.replace("greet 100% of them", "100% \\x1b[2J\\u202e\\udcff of %(prog)s\\n all")
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_greet"}}, {"acme_greet": source})
    assert main(["greet", "--help"]) == 0
    assert "100% ?[2J?? of %(prog)s all" in capsys.readouterr().out


def test_a_command_has_no_options(site, capsys):
    source = COMMAND.replace("factory=Greet", "factory=Greet, config=Config").replace(
        "class Greet", "from kvcore.api import PluginConfig\nclass Config(PluginConfig):\n    a: int\nclass Greet"
    )
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_greet"}}, {"acme_greet": source})
    assert main(["greet", "all"]) == 1
    assert "command plugin 'greet' (kvcore-acme 1.0) has a config: a command has arguments" in capsys.readouterr().err
    source = COMMAND.replace(
        "    def add_arg", "    def __init__(self, *_):\n        raise ConfigError('no')\n    def add_arg"
    )
    dist(site, "kvcore-other", {"kvcore.command": {"wave": "other_wave"}}, {"other_wave": source})
    assert main(["wave", "all"]) == 1
    assert "command plugin 'wave' (kvcore-other 1.0)" in capsys.readouterr().err


def test_what_a_package_says_of_itself_does_nothing_to_the_help(site):
    metadata = {"Summary": "100% of it, %(prog)s,\n  gr\u00fc\u00dft"}
    modules = {"acme_greet": COMMAND.replace("greet 100%", "gr\u00fc\u00dfe 100%")}
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_greet"}}, modules, metadata=metadata)
    env = {**os.environ, "PYTHONPATH": str(site), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words, shown in (
        (["--help"], "    100% of it, %(prog)s, gr\\xfc\\xdft\n"),
        (["greet", "--help"], "gr\\xfc\\xdfe 100% of"),
    ):
        command = [sys.executable, "-m", "kvcore", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert shown in done.stdout


def test_what_a_command_raises_names_it(site, capsys):
    raising = COMMAND.replace("raise ConfigError(", "raise KeyError(")
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_greet"}}, {"acme_greet": raising})
    assert main(["greet", "nobody"]) == 1
    assert re.fullmatch(
        r"kvcore: command plugin 'greet' \(kvcore-acme 1.0\) failed: KeyError: .*, at .*acme_greet.py:\d+\n",
        capsys.readouterr().err,
    )


def test_a_command_with_commands_of_its_own(site, capsys):
    source = COMMAND.replace("words_follow = True", "").replace(
        'parser.add_argument("whom")',
        'parser.add_subparsers(dest="command").add_parser("go").add_argument("n", type=lambda n: 1 // int(n))',
    )
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_greet"}}, {"acme_greet": source})
    assert main(["greet", "go", "1", "2"]) == 2
    assert "kvcore greet go: error: unrecognized arguments: 2" in capsys.readouterr().err
    assert main(["greet", "go", "0"]) == 1
    assert "command plugin 'greet' (kvcore-acme 1.0) failed: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raises", "status", "said"),
    [
        ("SystemExit", 0, ""),
        ("SystemExit(3)", 3, ""),
        ("SystemExit('no more')", 1, "kvcore: no more\n"),
        ("BrokenPipeError(32, 'Broken pipe')", 1, "kvcore: [Errno 32] Broken pipe\n"),
        ("TimeoutError", 1, "kvcore: TimeoutError\n"),
    ],
)
def test_how_a_command_may_end(site, capsys, raises, status, said):
    source = COMMAND.replace('raise ConfigError("nobody: greet somebody")', f"raise {raises}")
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_greet"}}, {"acme_greet": source})
    assert main(["greet", "nobody"]) == status
    assert capsys.readouterr().err == said


def test_a_command_may_call_an_argument_words(site, capsys):
    source = COMMAND.replace("words_follow = True", "").replace('"whom")', '"whom"); parser.add_argument("words")')
    dist(site, "kvcore-acme", {"kvcore.command": {"greet": "acme_greet"}}, {"acme_greet": source})
    assert main(["greet", "all", "twice"]) == 0
    assert capsys.readouterr().out == "hello all twice\n"


def test_a_command_cannot_take_the_place_of_the_cores(site, capsys):
    dist(site, "kvcore-acme", {"kvcore.command": {"plugins": "acme_greet"}}, {"acme_greet": COMMAND})
    assert main(["plugins", "list"]) == 0
    assert re.search(r"^command +plugins +kvcore-acme +1.0 +reserved", capsys.readouterr().out, re.M)
    assert set(COMMANDS) == known.COMMANDS


def test_a_command_that_nobody_offers(site, capsys, monkeypatch):
    assert main(["docter"]) == 2
    assert capsys.readouterr().err == "kvcore: there is no command 'docter': did you mean kvcore doctor?\n"
    assert main(["bencg"]) == 2
    assert "did you mean kvcore bench?" in capsys.readouterr().err
    assert main(["zzzzzz"]) == 2
    assert "`kvcore --help` lists them" in capsys.readouterr().err
    monkeypatch.setattr("kvcore.plugins.registry.scan", lambda path: ([], []))
    assert main(["bench"]) == 2
    err = capsys.readouterr().err
    install = "pip install kvcore-bench, in a checkout ./plugins/command_bench"
    assert err == f"kvcore: kvcore bench is in a package of its own: {install}\n"
    assert (Path(__file__).parents[2] / "plugins/command_bench/pyproject.toml").is_file()
    assert main(["--help"]) == 0
    assert f"\n  bench, plan, record, replay, simulate: {install}\n" in capsys.readouterr().out


def leaves(parser):
    """It, or the commands below it."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [leaf for a in below for child in a.choices.values() for leaf in leaves(child)] or [parser]


def test_the_configuration_is_taken_with_its_flag_and_where_there_is_no_other_word_without():
    by_word, by_flag = set(), set()
    for name in (*COMMANDS, "bench", "plan", "record", "replay", "simulate", "from-lmcache"):
        parser = argparse.ArgumentParser(prog=name)
        _parser(name)[1].add_arguments(parser)
        for leaf in leaves(parser):
            words = {a.metavar or a.dest: a.dest for a in leaf._actions if not a.option_strings}
            if any("--config" in a.option_strings for a in leaf._actions):
                (by_flag if words.get("FILE") is None else by_word).add(leaf.prog)
                assert words in ({}, {"FILE": "config"}) or "FILE" not in words
    assert by_word == {
        "config check", "config show", "doctor", "serve", "bench l2",
        *(f"store {action}" for action in ("ls", "stat", "verify", "rm", "gc")),
    }  # fmt: skip
    workloads = {prog for prog in by_flag if prog.startswith("bench engine ")}
    assert by_flag - workloads == {"run", "replay", "plan", "store cp"}
    assert workloads


@pytest.mark.parametrize("words", [["a.yaml"], ["--config", "a.yaml"], ["--set", "salt=x", "a.yaml"]])
def test_the_same_file_both_ways(tmp_path, capsys, words):
    (tmp_path / "a.yaml").write_text("l1: {size: 70MiB}\nl2: []\n")
    for action in ("check", "show"):
        assert main(["config", action, *words]) == 0
        assert "a.yaml" in capsys.readouterr().out
    assert main(["store", "stat", *words]) == 1
    assert "a.yaml has no tiers" in capsys.readouterr().err
    assert main(["serve", *words]) == 1
    assert "server: is missing" in capsys.readouterr().err


def test_a_file_is_named_once(capsys):
    assert main(["config", "show", "a.yaml", "--config", "b.yaml"]) == 2
    assert "argument --config: not allowed with argument FILE" in capsys.readouterr().err


# --- plugins


def test_plugins_list_json_is_stable(acme, capsys):
    assert main(["plugins", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert all(list(p) == ["kind", "name", "distribution", "version", "module", "builtin", "status"] for p in listed)
    by_name = {(p["kind"], p["name"]): p for p in listed}
    assert by_name["storage", "acme"]["distribution"] == "kvcore-acme"
    assert by_name["storage", "memory"]["builtin"] is True
    assert {"tokens", "engine"} == {n for k, n in by_name if k == "keys" and by_name[k, n]["builtin"]}
    assert "fake_acme" not in sys.modules


def test_plugins_list_as_text_names_what_is_wrong(site, capsys):
    dist(site, "kvcore-acme", {"kvcore.storage": {"memory": "fake_acme"}})
    assert main(["plugins", "list", "--kind", "storage"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS"]
    assert "warning: storage plugin 'memory' (kvcore-acme 1.0) is not used" in out
    assert "\x1b" not in out


def test_plugins_show(acme, capsys):
    assert main(["plugins", "show", "acme", "--json"]) == 0
    [shown] = json.loads(capsys.readouterr().out)
    assert shown["api"] == "1.0"
    assert shown["options"][0] == {
        "name": "bucket",
        "type": "text",
        "required": True,
        "default": None,
        "description": "Where the objects are kept.",
    }
    assert {o["name"]: o["default"] for o in shown["options"]} == {
        "bucket": None,
        "secret_key": None,
        "part": "8MiB",
        "retries": 3,
    }
    assert main(["plugins", "show", "acme"]) == 0
    out = capsys.readouterr().out
    assert "storage acme: kvcore-acme 1.0 (fake_acme), API 1.0" in out
    assert "(required)" in out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("acmee", "Did you mean 'acme'?"),
        ("elsewhere", "pip install kvcore-elsewhere"),
        ("qqqqqq", "no plugin is named 'qqqqqq'; see them with: kvcore plugins list"),
    ],
)
def test_plugins_show_unknown(acme, capsys, monkeypatch, name, says):
    monkeypatch.setitem(known.PACKAGES, ("storage", "elsewhere"), "kvcore-elsewhere")  # type: ignore[call-overload]
    assert main(["plugins", "show", name]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcore: no ")
    assert says in err


def test_plugins_check_survives_what_aborts_and_what_hangs(site, monkeypatch, capsys):
    for name, source in {
        "good": storage(),
        "abort": "import os\nprint('a library talks')\nos.abort()\n",
        "hang": "import time\ntime.sleep(60)\n",
        "noisy": "print('kvcore-child:')\n" + storage().replace("factory=Store", "factory=None"),
    }.items():
        dist(site, f"acme-{name}", {"kvcore.storage": {name: f"fake_{name}"}}, {f"fake_{name}": source})
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    results = {}
    for name in ("good", "abort", "hang", "noisy"):
        status = main(["plugins", "check", name, "--json", "--timeout", "3" if name == "hang" else "60"])
        found = json.loads(capsys.readouterr().out)
        [plugin] = found["plugins"]
        results[name] = (status, found["ok"], plugin["text"])
    assert results["good"] == (0, True, "")
    assert results["abort"][:2] == (1, False)
    assert "was killed by SIGABRT" in results["abort"][2]
    assert results["hang"] == (1, False, "did not end within 3 s")
    assert "factory None cannot be called" in results["noisy"][2]


UNMADE = {
    "abstract": ("storage", storage().replace("def delete(self, keys)", "def remove(self, keys)")),
    "bare": (
        "eviction",
        "from kvcore.api import ApiVersion, Component, hookimpl\n"
        "from kvcore.builtin.eviction_lru import LruPolicy\n"
        "class Bare(LruPolicy):\n"
        "    def __init__(self, config, context):\n"
        "        self.share = config.share\n"
        "@hookimpl\n"
        "def kvcore_eviction():\n"
        "    return Component(api=ApiVersion(1, 0), factory=Bare)\n",
    ),
}


@pytest.mark.parametrize(
    ("name", "says"),
    [("abstract", "Store does not implement delete: it cannot be made"), ("bare", "AttributeError: 'NoneType' object")],
)
def test_plugins_check_of_what_cannot_be_made(site, monkeypatch, capsys, name, says):
    kind, source = UNMADE[name]
    dist(site, f"acme-{name}", {f"kvcore.{kind}": {name: f"fake_{name}"}}, {f"fake_{name}": source})
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for more in ([], ["--quality"]):
        assert main(["plugins", "check", name, "--json", *more]) == 1
        [plugin] = json.loads(capsys.readouterr().out)["plugins"]
        assert says in plugin["text"]
        assert plugin.get("level") is None


def test_plugins_check_of_the_builtins(monkeypatch, capsys):
    monkeypatch.setenv("KVCORE_ALLOW_PLUGINS", "none-but-the-core")
    assert main(["plugins", "check", "--kind", "keys"]) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["ok", "keys", "engine"],
        ["ok", "keys", "tokens"],
    ]


# --- config


def test_config_check(tmp_path, capsys):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("l1: {size: 1GiB}\n")
    bad.write_text("l1: {size: 8}\nkees: tokens\n")
    assert main(["config", "check", str(good)]) == 0
    out = capsys.readouterr().out
    assert out == f"{good}: no faults\nnote: no l2 tier is configured: what leaves L1 is lost\n"
    assert main(["config", "check", str(good), "--set", "l2=[{storage: memory}]"]) == 0
    assert capsys.readouterr().out == f"{good}: no faults\n"
    assert main(["config", "check", str(bad)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"{bad}:1:12: l1.size: 8 is not a size: write a number and a unit, such as 8GiB or 500MB",
        f"{bad}:2:1: kees: no such option, given 'tokens'; allowed: chunk_tokens, hooks, inspect, keys, l1, l2, "
        "log_level, lookup_timeout, metrics_port, min_object_size, plugins, salt, server, tenants; did you mean "
        "'keys'?",
        f"{bad}: 2 faults",
    ]
    assert err == ""
    assert main(["config", "check", str(bad), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], len(found["faults"])) == (False, 2)
    assert found["faults"][0]["path"] == "l1.size"
    assert found["faults"][0]["place"] == f"{bad}:1:12"


def test_config_check_of_a_capacity_that_is_the_storages_own(tmp_path, capsys):
    file = tmp_path / "kvcore.yaml"
    file.write_text(
        "l2:\n"
        "- {storage: {plugin: memory, capacity: 1GiB}, capacity: 2GiB}\n"
        "- {storage: {plugin: faulty, storage: {plugin: memory, capacity: 1GiB}}, capacity: 2GiB}\n"
        "- {storage: memory, capacity: 2GiB}\n"
    )
    own = "the storage keeps to a capacity of its own, see the options of {}: leave this one out"
    assert main(["config", "check", str(file)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{file}:2:57: l2[0].capacity: {own.format('l2[0].storage')}",
        f"{file}:3:84: l2[1].capacity: {own.format('l2[1].storage')}",
        f"{file}: 2 faults",
    ]
    assert main(["config", "check", str(file), "--set", "l2=[{storage: disk, capacity: 2GiB}]", "--json"]) == 1
    [fault] = json.loads(capsys.readouterr().out)["faults"]
    assert fault == {"place": "flag l2", "path": "l2[0].capacity", "text": own.format("l2[0].storage")}


def test_config_check_and_doctor_of_a_storage_that_cannot_list(site, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvcore.cli.doctor.command._torch", lambda: iter(()))
    monkeypatch.setattr("kvcore.cli.doctor.command._engines", lambda registry: iter(()))
    monkeypatch.setenv("KVCORE_ALLOW_PLUGINS", "kvcore-blind,kvcore-made")
    blind = storage()
    made = blind.replace("factory=Store", "factory=lambda config, context: Store(config, context)")
    dist(site, "kvcore-blind", {"kvcore.storage": {"blind": "fake_blind"}}, {"fake_blind": blind})
    dist(site, "kvcore-made", {"kvcore.storage": {"made": "fake_made"}}, {"fake_made": made})
    text = (
        "the storage {!r} cannot list what it holds, and this needs it: leave it out, or implement `list` in the plugin"
    )
    file = tmp_path / "kvcore.yaml"
    for plugin in ("blind", "made"):  # whose class is known without making it, and one that is made by a function
        file.write_text(
            "l1: {size: 64MiB}\n"
            f"l2:\n- {{storage: {{plugin: {plugin}, bucket: b}}, capacity: 1GiB}}\n"
            f"- {{name: far, storage: {{plugin: {plugin}, bucket: b}}, ttl: 1h}}\n"
            f"- {{name: free, storage: {{plugin: {plugin}, bucket: b}}}}\n"
            "tenants: {alice: {far: 1MiB, l1: 1MiB}}\n"
        )
        faults = [
            f"{file}:3:51: l2[0].capacity: {text.format(plugin)}",
            f"{file}:4:57: l2[1].ttl: {text.format(plugin)}",
            f"{file}:6:24: tenants.alice.far: {text.format(plugin)}",
        ]
        column = 0 if plugin == "blind" else -1
        faults = [f.replace(":51:", f":{51 + column}:").replace(":57:", f":{57 + column}:") for f in faults]
        assert main(["config", "check", str(file)]) == 1
        assert capsys.readouterr().out.splitlines() == [*faults, f"{file}: 3 faults"]
        assert main(["doctor", str(file)]) == 1
        out = capsys.readouterr().out
        for fault in faults:
            assert f"error   config: {fault}" in out
    with pytest.raises(PluginError, match=r"cannot list what it holds.*leave them out, or implement `list`"):
        CacheEngine.open(str(file))


def test_config_check_notes_what_has_no_effect(tmp_path, capsys):
    file = tmp_path / "kvcore.yaml"
    file.write_text(
        "l2:\n"
        "- {storage: memory, write: none, promote: true}\n"
        "- {storage: memory, eviction: lfu}\n"
        "- {storage: memory, write: none}\n"
        "- {storage: memory, promote: true, eviction: lfu, capacity: 1GiB}\n"
    )
    assert main(["config", "check", str(file)]) == 0
    head, *notes = capsys.readouterr().out.splitlines()
    assert head == f"{file}: no faults"
    assert [note.partition(" has no effect ")[0] for note in notes] == [
        f"note: {file}:2:43: l2[0].promote:",
        f"note: {file}:3:31: l2[1].eviction:",
    ]


def test_config_check_notes_paths_that_are_not_absolute(tmp_path, capsys):
    file = tmp_path / "kvcore.yaml"
    file.write_text("l2:\n- storage: {plugin: disk, path: cache}\n- storage: {plugin: disk, path: /a}\n")
    assert main(["config", "check", str(file)]) == 0
    _, note = capsys.readouterr().out.splitlines()
    assert note.startswith(f"note: {file}:2:33: l2[0].storage.path: begins at the working directory of each process")


def test_config_check_notes_keys_that_are_not_there(tmp_path, capsys):
    """No fault: another machine may have them."""
    file, key = tmp_path / "kvcore.yaml", tmp_path / "key"
    file.write_text(f"l2:\n- storage: memory\n  serde: [zstd, {{plugin: aesgcm, keys: {{a: 'file:{key}'}}}}]\n")
    assert main(["config", "check", str(file)]) == 0
    head, note = capsys.readouterr().out.splitlines()
    assert head == f"{file}: no faults"
    assert note.startswith(f"note: {file}:3:")
    assert "l2[0].serde[1]: cannot be used here, and stops a start" in note
    assert f"{key} cannot be read (No such file or directory)" in note
    key.write_text("ab" * 32)
    assert main(["config", "check", str(file)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("make", ["directory", "absent", "text"])
def test_config_check_of_what_is_no_configuration(tmp_path, capsys, make):
    path = tmp_path / "x"
    if make == "directory":
        path.mkdir()
    elif make == "text":
        path.write_text("{]")
    assert main(["config", "check", str(path)]) == 1
    out, err = capsys.readouterr()
    assert str(path) in out
    assert "Traceback" not in out + err


def test_config_show(acme, tmp_path, monkeypatch, capsys):
    file = tmp_path / "kvcore.yaml"
    file.write_text("l2: [{storage: {plugin: acme, bucket: b, secret_key: hunter2}}]\n")
    monkeypatch.setenv("KVCORE_LOOKUP_TIMEOUT", "1s")
    assert main(["config", "show", "kvcore.yaml", "--set", "l1.size=2GiB", "--json"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    shown = {v["path"]: (v["value"], v["source"]) for v in json.loads(out)["values"]}
    assert shown["l1.size"] == ("2GiB", {"kind": "flag", "name": "l1.size", "line": 0, "column": 0})
    assert shown["lookup_timeout"][1]["name"] == "KVCORE_LOOKUP_TIMEOUT"
    assert shown["l2[0].storage.bucket"] == ("b", {"kind": "file", "name": "kvcore.yaml", "line": 1, "column": 39})
    assert shown["l2[0].storage.secret_key"][0] == "**********"
    assert shown["salt"] == ("", {"kind": "default", "name": "", "line": 0, "column": 0})
    monkeypatch.setenv("KVCORE_CONFIG", "kvcore.yaml")
    assert main(["config", "show"]) == 0
    assert "environment KVCORE_LOOKUP_TIMEOUT" in capsys.readouterr().out


def test_config_show_of_a_wrong_configuration(capsys):
    assert main(["config", "show", "--set", "l1.size=8", "--set", "x=1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcore: flag l1.size: '8' is not a size")
    assert main(["config", "show", "--set", "l1.size"]) == 1
    assert "write PATH=VALUE" in capsys.readouterr().err


# --- doctor


def test_doctor(acme, monkeypatch, capsys):
    monkeypatch.setenv("KVCORE_BLOCK_PLUGINS", "vllm")
    code = main(["doctor", "--json", "--set", "l2=[{storage: memory, serde: [raw]}]", "--set", "l1.size=64MiB"])
    found = json.loads(capsys.readouterr().out)
    levels = {f["subject"]: f["level"] for f in found["findings"]}
    assert code == (0 if found["ok"] else 1)
    assert {"python", "memory", "/dev/shm", "memlock", "torch", "plugins", "config", "l1", "tier memory"} <= set(levels)
    assert levels["tier memory"] in ("ok", "warning")
    tier = next(f for f in found["findings"] if f["subject"] == "tier memory")
    assert tier["data"]["load_bytes_s"] > 0
    assert "holds 0 objects" in tier["text"]  # the probe left nothing
    assert all(f["remedy"] for f in found["findings"] if f["level"] in ("warning", "error"))


def test_doctor_finds_what_is_wrong(acme, monkeypatch, capsys):
    monkeypatch.setenv("KVCORE_BLOCK_PLUGINS", "vllm,torch")
    monkeypatch.setattr("kvcore.cli.doctor.command.call", NOT_LOOKED_AT)
    flags = ["--set", "l2=[{storage: {plugin: acme, bucket: b}}]", "--set", "l1.size=900TiB"]
    assert main(["doctor", "--json", *flags]) == 1
    errors = {f["subject"]: f for f in json.loads(capsys.readouterr().out)["findings"] if f["level"] == "error"}
    assert "are available" in errors["l1"]["text"]
    assert "cannot be loaded" in errors["tier acme"]["text"]  # it forgets what it is given
    assert main(["doctor", "--set", "l1.size=8"]) == 1
    out = capsys.readouterr().out
    assert "error   config: flag l1.size: '8' is not a size" in out
    assert "        -> " in out


def found_by_doctor(capsys, *flags, code=0):
    """The texts of doctor's warnings and errors by subject."""
    arguments = [word for flag in flags for word in ("--set", flag)]
    assert main(["doctor", "--json", *arguments]) == code
    findings = json.loads(capsys.readouterr().out)["findings"]
    bad = [f for f in findings if f["level"] in ("warning", "error")]
    assert all(f["remedy"] for f in bad)
    texts: dict[str, str] = {}
    for f in bad:
        texts[f["subject"]] = f"{texts.get(f['subject'], '')}{f['level']}: {f['text']} -> {f['remedy']}\n"
    return texts


@pytest.fixture
def quick(monkeypatch):
    """Doctor without what takes seconds and is tested above."""
    monkeypatch.setenv("KVCORE_ALLOW_PLUGINS", "kvcore,kvcore-disk,kvcore-listener")
    monkeypatch.setattr("kvcore.cli.doctor.command.call", NOT_LOOKED_AT)


@pytest.mark.usefixtures("quick")
def test_doctor_warns_of_what_a_configuration_promises_too_much(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = found_by_doctor(
            capsys,
            "l1.size=2MiB",
            f"metrics_port={port}",
            f"l2=[{{storage: memory}}, {{storage: {{plugin: memory, capacity: 900TiB}}}}, "
            f"{{storage: {{plugin: disk, path: {tmp_path}/x, capacity: 900TiB}}}}, "
            f"{{storage: {{plugin: disk, path: {tmp_path}/y/../x}}}}]",
            code=int(find_spec("torch") is not None),  # where it is installed, it was "not looked at"
        )
    assert "l1.size is 2 MiB: room for a few objects" in found["l1"]
    assert f"metrics_port {port} cannot be served: Address already in use" in found["metrics"]
    assert "has no capacity: it grows until memory is full" in found["tier memory"]
    assert "its capacity is 900 TiB, but it holds 0 B and " in found["tier memory-2"]
    assert "its capacity is 900 TiB, but it holds 0 B and " in found["tier disk"]
    assert "are free on its file system -> lower its capacity to at most " in found["tier disk"]
    assert f"keeps its objects in {tmp_path}/x, as tier disk does" in found["tier disk-2"]
    assert "capacity" not in found["tier disk-2"]


@pytest.mark.usefixtures("quick")
def test_doctor_makes_the_policies(site, capsys, monkeypatch):
    monkeypatch.setenv("KVCORE_ALLOW_PLUGINS", "acme-bare")
    dist(site, "acme-bare", {"kvcore.eviction": {"bare": "fake_bare"}}, {"fake_bare": UNMADE["bare"][1]})
    found = found_by_doctor(
        capsys, "l1={size: 64MiB, eviction: bare}", "l2=[{storage: memory, capacity: 1GiB, eviction: bare}]", code=1
    )
    for place in ("l1.eviction", "l2[0].eviction"):
        assert f"failed to start ({place}): AttributeError" in found[place]


@pytest.mark.usefixtures("quick")
def test_doctor_fails_for_hooks_that_cannot_be_used(site, capsys, monkeypatch):
    monkeypatch.setattr("kvcore.cli.doctor.command._torch", lambda: iter(()))
    monkeypatch.setattr("kvcore.cli.doctor.command._engines", lambda registry: iter(()))
    code = "from kvcore.api import hookimpl\n@hookimpl\ndef kvcore_stored(events, tier): pass\n"
    dist(site, "kvcore-listener", {"kvcore.hooks": {"listener": "fake_listener"}}, {"fake_listener": code})
    small = ("l1.size=64MiB", "l2=[]")
    assert "hooks" not in found_by_doctor(capsys, *small)
    found = found_by_doctor(capsys, *small, "hooks=[listener]", code=1)
    assert "error: hooks plugin 'listener' (kvcore-listener 1.0) has a wrong hook" in found["hooks"]


def test_doctor_says_what_an_invalid_file_keeps_it_from_and_how_much_it_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KVCORE_BLOCK_PLUGINS", "vllm,torch")
    monkeypatch.setattr("kvcore.cli.doctor.command.call", NOT_LOOKED_AT)
    file = tmp_path / "kvcore.yaml"
    file.write_text("l1: {size: 8}\nl2: [{storage: dsik}, {storage: {plugin: memory, sz: 1}}, memory]\nfoo: 1\n")
    assert main(["doctor", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith("error   config: ")]
    assert [lines[i + 1].removeprefix("        -> see ") for i in at] == [
        "docs/configuration.md", "`kvcore plugins list` and docs/configuration.md",
        "`kvcore plugins show memory` and docs/configuration.md", "docs/configuration.md", "docs/configuration.md",
    ]  # fmt: skip
    assert lines[-3].startswith("note    config: the rest of it, its sizes and its tiers were not examined")
    counts = [sum(line.startswith(level) for line in lines) for level in ("error", "warning", "note", "ok ")]
    told = [int(n) for n in re.findall(r"\d+", lines[-1])]
    assert (counts, lines[-1].partition(" ")[0]) == (told, "found:")


def test_doctor_of_a_file_that_is_not_there_says_only_that(tmp_path, capsys, monkeypatch):
    file = tmp_path / "nope.yaml"
    assert main(["doctor", str(file)]) == 1
    error, remedy, counted = capsys.readouterr().out.splitlines()
    assert counted == "found: 1 error, 0 warnings, 0 notes, 0 ok; nothing else was examined"
    assert error.startswith("error   config: ")
    assert str(file) in error
    assert remedy == "        -> give the path of a YAML file, or none"
    monkeypatch.setenv("KVCORE_CONFIG", str(file))
    assert main(["doctor", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["remedy"] == "correct KVCORE_CONFIG, or unset it"


ABSENT = """
from kvcore.api import ApiVersion, Component, EngineIntegration, Finding, hookimpl
class Absent(EngineIntegration):
    def check(self):
        return [Finding("note", "absent", "Absent is not installed here", "pip install absent")]
    def usage(self):
        return ""
@hookimpl
def kvcore_engine():
    return Component(api=ApiVersion(1, 0), factory=Absent)
"""


def test_doctor_says_how_to_install_from_a_checkout_too(capsys, monkeypatch):
    monkeypatch.setenv("KVCORE_ALLOW_PLUGINS", "kvcore")
    monkeypatch.setattr("kvcore.cli.doctor.command.call", NOT_LOOKED_AT)
    main(["doctor", "--json", "--set", "l2=[]", "--set", "l1.size=64MiB"])
    remedies = {f["subject"]: f["remedy"] for f in json.loads(capsys.readouterr().out)["findings"]}
    for subject in ("engines", "tiers"):
        (folder,) = re.findall(r"pip install kvcore-\w+, in a checkout \./(plugins/\w+)", remedies[subject])
        assert (Path(__file__).parents[2] / folder / "pyproject.toml").exists()


def test_doctor_does_not_ask_for_engines_that_are_not_here(site, capsys, monkeypatch):
    dist(site, "acme-absent", {"kvcore.engine": {"absent": "acme_absent"}}, {"acme_absent": ABSENT})
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("KVCORE_ALLOW_PLUGINS", "kvcore,acme-absent")
    main(["doctor", "--json", "--set", "l2=[]", "--set", "l1.size=64MiB"])
    (found,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["subject"] == "absent"]
    assert (found["level"], found["text"], found["remedy"]) == ("note", "Absent is not installed here", "")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("path", ["/" + "x" * 5000, "~nobody-here/x", "/proc/none", '"a\\0b"'])
def test_doctor_of_a_path_that_cannot_be(capsys, path):
    found = found_by_doctor(capsys, "l1.size=64MiB", f"l2=[{{storage: {{plugin: disk, path: {path}}}}}]", code=1)
    assert "error: " in found["tier disk"]


NOT_LOOKED_AT = lambda *words, timeout_s: Outcome(False, "not looked at", 0.0)  # noqa: E731
SILENT = """
import logging
from kvcore.api import *
from kvcore.builtin.memory import MemoryStorage
class Config(PluginConfig):
    when: str
    capacity: Size | None = None
    eviction: str = "lru"
class Silent(MemoryStorage):
    shared = True
    def __init__(self, config, context):
        super().__init__(config, context)
        self.when, self.log = config.when, context.log
    def open(self):
        if self.when == "open": raise StorageUnavailable("192.0.2.1:7000 does not answer")
        if self.when == "wrong": raise StorageError("no such bucket")
        if self.when == "caused":
            try: raise ConnectionRefusedError("refused")
            except OSError as e: raise StorageError("192.0.2.1:7000 does not answer") from e
        self.log.warning("192.0.2.1:7000 does not answer: requests go on without it")
    def ping(self):
        if self.when == "open": self.client.ping()
        if self.when == "ping": raise StorageError("192.0.2.1:7000 does not answer")
@hookimpl
def kvcore_storage():
    return Component(api=ApiVersion(1, 0), config=Config, factory=Silent)
"""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("when", "says", "does"),
    [
        ("open", "does not answer", "start it, or check host, port and firewall; then correct its options, or remove"),
        ("caused", "does not answer", "start it, or check host, port and firewall; then correct"),
        ("ping", "does not answer", "start it, or check host, port and firewall; then correct"),
        ("wrong", "no such bucket", "correct its options, or remove the tier"),
        ("never", "", ""),
    ],
)
def test_doctor_of_a_server_that_does_not_answer(site, capsys, monkeypatch, when, says, does):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a process of its own: what is logged is printed
    monkeypatch.setattr("kvcore.cli.doctor.command._torch", lambda: iter(()))
    monkeypatch.setattr("kvcore.cli.doctor.command._engines", lambda registry: iter(()))
    monkeypatch.setenv("KVCORE_ALLOW_PLUGINS", "acme-silent")
    dist(site, "acme-silent", {"kvcore.storage": {"silent": "fake_silent"}}, {"fake_silent": SILENT})
    tier = f"l2=[{{storage: {{plugin: silent, when: {when}}}}}]"
    assert main(["doctor", "--set", "l1.size=64MiB", "--set", tier]) == (when != "never")
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.strip() for line in out.splitlines()]
    if when == "never":
        assert "note    tier silent: warns: 192.0.2.1:7000 does not answer: requests go on without it" in lines
        return
    [at] = [i for i, line in enumerate(lines) if line.startswith("error   tier silent: silent: ")]
    assert says in lines[at]
    assert lines[at + 1].startswith(f"-> {does}")
    assert len([line for line in lines if "tier silent" in line]) == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "faults",
    [
        "operations: [store], fail_rate: 0.5",
        "operations: [delete], error_rate: 0.5",
        "operations: [load], fail_rate: 1",
    ],
)
def test_doctor_leaves_nothing_of_its_speed_test(tmp_path, capsys, monkeypatch, faults):
    monkeypatch.setattr("kvcore.cli.doctor.command._torch", lambda: iter(()))
    monkeypatch.setattr("kvcore.cli.doctor.command._engines", lambda registry: iter(()))
    inner = f"{{plugin: disk, path: {tmp_path}/store, capacity: 1GiB}}"
    tier = f"l2=[{{storage: {{plugin: faulty, storage: {inner}, {faults}}}}}]"
    found = found_by_doctor(capsys, "l1.size=64MiB", tier, code=0 if "delete" in faults else 1)
    assert ("of 16 objects" in found.get("tier faulty", "")) == ("delete" not in faults)
    assert (tmp_path / "store").is_dir()
    assert not list((tmp_path / "store").glob("?/?/*"))


@pytest.mark.usefixtures("quick")
def test_doctor_names_what_it_had_to_leave(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvcore.cli.doctor.command._torch", lambda: iter(()))
    monkeypatch.setattr("kvcore.cli.doctor.command._engines", lambda registry: iter(()))
    inner = f"{{plugin: disk, path: {tmp_path}/store, capacity: 1GiB}}"
    tier = f"l2=[{{storage: {{plugin: faulty, storage: {inner}, operations: [delete], error_rate: 1}}}}]"
    found = found_by_doctor(capsys, "l1.size=64MiB", tier, code=1)
    left = {path.name.partition("-")[0] for path in (tmp_path / "store").glob("?/?/*")}
    (namespace,) = left
    assert namespace.startswith(b"kvcore.doctor".hex())
    assert (
        f"16 objects of this test cannot be deleted -> kvcore store rm --tier faulty --namespace {namespace}"
        in (found["tier faulty"])
    )


@pytest.mark.usefixtures("quick")
def test_doctor_survives_a_check_that_fails(capsys, monkeypatch):
    def fails():
        yield Finding("strange", "before", "a level of its own")
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("kvcore.cli.doctor.machine.memory", fails)
    assert main(["doctor", "--set", "l1.size=64MiB", "--set", "l2=[]"]) == 1
    out = capsys.readouterr().out
    assert "strange before: a level of its own" in out
    assert "error   doctor: a check failed: ZeroDivisionError: oh" in out
    assert "ok      config: " in out
    assert "write PATH=VALUE" in found_by_doctor(capsys, "l1.size", code=1)["doctor"]


# --- the terminal


def test_no_traceback_when_the_reader_leaves():
    command = f"set -o pipefail; {sys.executable} -m kvcore plugins list --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[", "")


NO_SPACE = "kvcore: cannot write: No space left on device\n"
CLOSED = "kvcore: standard output is closed: send it somewhere, if only to /dev/null\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("config show >/dev/full", 1, NO_SPACE),
        ("config show --json >/dev/full", 1, NO_SPACE),
        ("plugins list >&-", 1, CLOSED),
        ("plugins show qqqqqq 2>/dev/full", 1, ""),
        ("plugins show qqqqqq 2>&-", 1, ""),
        ("config check gone.yaml >&- 2>&-", 1, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_line(command, status, says, unbuffered):
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m kvcore {command}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, says)


def test_a_pipe_without_a_reader_is_left_in_silence():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "kvcore", "config", "show"],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_that_cannot_be_written():
    command = f"PYTHONUNBUFFERED= {sys.executable} -m kvcore --help >/dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, NO_SPACE)


@pytest.mark.parametrize(("env", "colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_only_on_a_terminal(env, colour):
    own, theirs = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "kvcore", "plugins", "show", "qqqqqq"],
            stderr=theirs,
            stdout=subprocess.DEVNULL,
            env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **env},
            timeout=60,
            check=False,
        )
        assert (b"\x1b[31m" in os.read(own, 4096)) is colour
    finally:
        os.close(own)
        os.close(theirs)


INTERRUPTS = """
import builtins, os, signal, sys, weakref
from kvcore.cli import main
real = builtins.__import__
def late(name, *rest, **more):
    global late
    if name == {module!r} and late is not None:
        late = None
        {act}
    return real(name, *rest, **more)
builtins.__import__ = late
sys.exit(main({words!r}))
"""
RAISED = "os.kill(os.getpid(), signal.SIGINT)"
DROPPED = """class Thing: pass
        thing = Thing()
        ref = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
        del thing"""
CHANGED = 'raise ValueError("Error building `literal` serializer:\\n  KeyboardInterrupt: ")'


@pytest.mark.parametrize("act", [RAISED, DROPPED, CHANGED], ids=["raised", "dropped", "changed"])
@pytest.mark.parametrize(
    ("module", "words"),
    [("kvcore.cli.app", ["--version"]), ("kvcore.plugins", ["serve"]), ("kvcore.config.yaml_file", ["doctor"])],
)
def test_an_interrupt_is_one_line_wherever_it_comes(module, words, act):
    """As an error, in a callback, where Python prints and drops it, or as what pydantic makes of it."""
    code = INTERRUPTS.format(module=module, words=words, act=act)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "kvcore: interrupted\n")


def test_an_interrupt_in_the_midst_of_an_import_makes_no_panic():
    """This module pydantic's compiled part imports itself, and panics where that fails."""
    code = INTERRUPTS.format(module="datetime", words=["doctor"], act=RAISED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "kvcore: interrupted\n")


def test_an_import_that_hangs_is_interrupted():
    hangs = f"import kvcore.cli, time; kvcore.cli.HOLD_S = 0.2; {RAISED}; [time.sleep(0.01) for _ in iter(int, 1)]"
    code = INTERRUPTS.format(module="pydantic", words=["doctor"], act=hangs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "kvcore: interrupted\n")


def test_doctor_does_not_take_an_interrupt_for_a_finding(capsys, monkeypatch):
    def changed():
        raise ValueError("SchemaError: Error building `literal` serializer:\n  KeyboardInterrupt: ")
        yield

    monkeypatch.setattr("kvcore.cli.doctor.machine.memory", changed)
    assert main(["doctor"]) == 130
    out, err = capsys.readouterr()
    assert "a check failed" not in out
    assert err == "kvcore: interrupted\n"


def test_a_child_reports_how_it_ended():
    outcome = call("plugin", "storage", "nobody", timeout_s=60)
    assert not outcome.ok
    assert outcome.text.startswith("no storage plugin is named 'nobody'")


def test_config_check_loads_the_hooks(site, tmp_path, capsys):
    """So that a misspelt hook is not first seen when the engine starts."""
    code = "from kvcore.api import hookimpl\n\n@hookimpl\ndef kvcore_stord(events):\n    pass\n"
    dist(site, "kvcore-listener", {"kvcore.hooks": {"listener": "fake_listener"}}, {"fake_listener": code})
    file = tmp_path / "kvcore.yaml"
    file.write_text("hooks: [listener]\n")
    assert main(["config", "check", str(file)]) == 1
    out = capsys.readouterr().out
    assert "kvcore_stord" in out
    assert "did you mean kvcore_stored?" in out
