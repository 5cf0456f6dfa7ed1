"""What `kvcore doctor` says of versions: core, plugins and engines that do not belong together."""

import pytest

from kvcore import __version__
from kvcore.cli.doctor import versions as module
from kvcore.cli.doctor.versions import versions
from kvcore.plugins import Registry
from kvcore.plugins.known import ENGINES, PACKAGES
from kvcore.testing import dist

NEXT = f"{__version__.split('.')[0]}.{int(__version__.split('.')[1]) + 1}.0"


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch):
    """No engine but those that a test installs."""
    monkeypatch.setattr(module, "ENGINES", {"acme-engine": "vllm", "acme-engine-cpu": "vllm"})


def found(site):
    return [(f.level, f.text, f.remedy) for f in versions(Registry(path=[str(site)]))]


def test_all_of_one_release(site):
    dist(site, "kvcore-disk", {"kvcore.storage": {"disk": "fake_disk"}}, version=f"{__version__}.post1")
    dist(site, "other-store", {"kvcore.storage": {"other": "fake_other"}}, version="77.0")
    assert found(site) == [("ok", f"kvcore {__version__} and its packages are of one release", "")]


def test_a_package_of_another_release(site):
    dist(site, "kvcore-disk", {"kvcore.storage": {"disk": "fake_disk"}}, version=NEXT)
    text = f"kvcore-disk {NEXT} is of another release than kvcore {__version__}"
    assert found(site) == [("warning", text, "pip install --upgrade kvcore kvcore-disk")]


def test_an_update_of_the_core_that_was_not_finished(site):
    dist(site, "kvcore", version=NEXT)
    (only,) = found(site)
    assert only[0] == "warning"
    assert f"kvcore {__version__} runs, but the metadata of this environment says {NEXT}" in only[1]


def test_an_engine_without_its_plugin(site):
    dist(site, "acme-engine-cpu", version="1.2.3")
    text = "acme-engine-cpu 1.2.3 is installed, and its engine plugin is not: it does not find kvcore"
    assert found(site) == [("warning", text, "pip install kvcore-vllm")]
    dist(site, "kvcore-vllm", {"kvcore.engine": {"vllm": "fake_vllm"}}, version=__version__)
    assert [level for level, _, _ in found(site)] == ["ok"]


def test_every_engine_has_a_plugin_of_ours():
    assert {("engine", plugin) for plugin in ENGINES.values()} <= set(PACKAGES)
