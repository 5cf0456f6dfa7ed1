"""Fake distributions are what `importlib.metadata` and the import system see, and leave nothing behind."""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

import pytest

from kvcore.testing import dist, installed


def test_it_is_installed_and_gone_afterwards(tmp_path: Path) -> None:
    path = list(sys.path)
    with installed(tmp_path / "site") as site:
        dist(
            site,
            "fake-acme",
            {"fake.group": {"one": "fake_acme.plugin:make"}},
            {"fake_acme.__init__": "", "fake_acme.plugin": "    def make():\n        return 1\n"},
            version="2.3",
            requires=["kvcore>=0.1,<1", "other; extra == 'x'"],
            metadata={"License-Expression": "MIT"},
            files={"fake_acme/py.typed": ""},
            text="# Acme\n",
        )
        found = distribution("fake-acme")
        assert (found.version, found.metadata["License-Expression"]) == ("2.3", "MIT")
        assert found.requires == ["kvcore>=0.1,<1", "other; extra == 'x'"]
        assert found.metadata.json["description"] == "# Acme\n"
        assert [str(f) for f in found.files or ()] == [
            "fake_acme/__init__.py",
            "fake_acme/plugin.py",
            "fake_acme/py.typed",
        ]
        [point] = entry_points(group="fake.group")
        assert point.load()() == 1
        assert import_module("fake_acme.plugin").__file__ == str(site / "fake_acme" / "plugin.py")
        with pytest.raises(FileExistsError):
            dist(site, "fake_acme", version="2.3")
    assert sys.path == path
    assert not [name for name in sys.modules if name.startswith("fake_acme")]
    with pytest.raises(PackageNotFoundError):
        distribution("fake-acme")
    with pytest.raises(ModuleNotFoundError):
        import_module("fake_acme")
