import subprocess
import sys
from importlib.metadata import entry_points

import pytest

HEAVY = "import sys; print([m for m in ('torch', 'vllm', 'pydantic', 'prometheus_client') if m in sys.modules])"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_entry_points() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvcore")
    assert plugin.value == "kvcore_vllm.register:register"
    (engine,) = entry_points(group="kvcore.engine", name="vllm")
    assert engine.value == "kvcore_vllm.plugin"


def test_the_import_is_light() -> None:
    assert run(f"import kvcore_vllm.register; {HEAVY}").strip() == "[]"


def test_never_raises_without_vllm() -> None:
    code = "import sys; sys.modules['vllm'] = None\nfrom kvcore_vllm.register import register\nregister(); print('ok')"
    assert run(code).strip() == "ok"


@pytest.mark.vllm
def test_idempotent_under_vllm() -> None:
    code = """
from kvcore_vllm.register import register
register(); register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
cls = KVConnectorFactory.get_connector_class_by_name("KVCoreConnector")
print(cls.__module__, issubclass(cls, SupportsHMA))
"""
    assert run(code).splitlines()[-1] == "kvcore_vllm.connector True"
