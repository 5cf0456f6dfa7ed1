"""Wherever a user reads of the connector, it says that it has not run in TensorRT-LLM. And the parts by themselves."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from tensorrt_llm._torch.pyexecutor import kv_cache_connector

import kvcore_trtllm
from kvcore_trtllm import INTERFACE_TESTED, _compat, connector, integration, plugin
from kvcore_trtllm.integration import TrtllmIntegration
from kvcore_trtllm.keys import Chain
from kvcore_trtllm.reports import Inbox, Outbox, Report, _read

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "plugins" / "engine_trtllm"
README = (PACKAGE / "README.md").read_text()


def test_it_is_labelled_wherever_it_is_read_of() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    texts = {
        "README": README,
        "docs": (ROOT / "docs" / "trtllm.md").read_text(),
        "description": project["description"],
        "package": kvcore_trtllm.__doc__,
        "plugin": plugin.__doc__,
        "connector": connector.__doc__,
        "usage": TrtllmIntegration(None, None).usage(),
        "changes": (ROOT / "changes" / "trtllm.feature.md").read_text(),
    }
    for where, text in texts.items():
        assert "has not run in tensorrt-llm" in str(text).lower().replace("they have", "it has").replace("\n", " "), (
            where
        )
        assert "interface-tested" in str(text).lower(), where


def test_doctor_calls_no_version_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    (absent,) = TrtllmIntegration(None, None).check()
    assert (absent.level, absent.text) == ("note", "TensorRT-LLM is not installed here")
    monkeypatch.setattr(integration, "version", lambda name: "1.2.0")
    (there,) = TrtllmIntegration(None, None).check()
    assert there.level == "warning"
    assert INTERFACE_TESTED in there.text


def test_the_configuration_in_the_readme_names_the_classes() -> None:
    found = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", README, re.S | re.M)]
    named = next(block["kv_connector_config"] for block in found if "kv_connector_config" in block)
    assert named["connector_module"] == connector.__name__
    for key, base in (
        ("connector_scheduler_class", kv_cache_connector.KvCacheConnectorScheduler),
        ("connector_worker_class", kv_cache_connector.KvCacheConnectorWorker),
    ):
        assert issubclass(getattr(connector, named[key]), base)
    assert TrtllmIntegration(None, None).usage().count("KVCoreScheduler") == 1


def test_the_interface_is_found_where_it_was_and_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compat.base_classes()[1] is kv_cache_connector.KvCacheConnectorWorker
    monkeypatch.setattr(_compat, "_MODULES", ("tensorrt_llm.nowhere", "no_such_engine.connector"))
    with pytest.raises(ImportError, match=r"is in none of tensorrt_llm\.nowhere"):
        _compat.base_classes()


def test_block_hashes_are_pinned() -> None:
    pinned = "be8fa985356a8c6e71f9bd0a77017542a53074ac68886de1fe69e7940341abfa"
    assert Chain(8, "").extend(range(16))[1].hex() == pinned
    salted = "3b8dfda8c333a6710cf692d77b02eb2907c2fb8f4fe645fa462f51407cbc5156"
    assert Chain(8, "s").extend(range(16))[1].hex() == salted


def test_block_hashes_grow_with_the_request_and_depend_on_all_before_and_on_the_salt() -> None:
    tokens = list(range(40))
    chain = Chain(8, "")
    assert len(chain.extend(tokens[:20])) == 2
    assert chain.extend(tokens) == Chain(8, "").extend(tokens)
    assert len(chain.hashes) == 5
    changed = Chain(8, "").extend([99, *tokens[1:]])
    assert not set(changed) & set(chain.hashes)
    assert not set(Chain(8, "salt").extend(tokens)) & set(chain.hashes)


@pytest.mark.parametrize(
    "message", [b"", b"{", b"[]", b'[0,"loaded",1]x', b'["0","loaded",1,true]', b'[0,"other",1,true]', b"\xff" * 9,
                b'[0,"loaded",1.5,true]', b'[0,"saved",1,2]', b'{"a":1}'],
)  # fmt: skip
def test_what_no_rank_has_written_is_not_heard(message: bytes) -> None:
    assert _read(message) is None


def test_reports_arrive_in_order_and_a_closed_inbox_is_an_error_at_the_sender() -> None:
    import threading

    heard: list[Report] = []
    all_there = threading.Event()

    def hear(report: Report) -> None:
        heard.append(report)
        if len(heard) == 500:
            all_there.set()

    inbox = Inbox(hear, lambda: None)
    outbox = Outbox(inbox.address)
    sent = [Report(1, "saved", i, i % 2 == 0) for i in range(500)]
    for report in sent:
        outbox.send(report)
    assert all_there.wait(60)
    assert heard == sent
    inbox.close()
    with pytest.raises(OSError, match=r"."):
        outbox.send(sent[0])
    outbox.close()
