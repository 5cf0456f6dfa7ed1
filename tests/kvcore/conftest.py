"""Fixtures of the core's tests."""

import sys

import pytest


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of fake distributions, first on the path; what is imported from it is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]
