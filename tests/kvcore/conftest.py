"""Fixtures of the core's tests."""

import pytest

from kvcore.testing import installed


@pytest.fixture
def site(tmp_path):
    """A folder of fake distributions, first on the path; what is imported from it is forgotten afterwards."""
    with installed(tmp_path / "site") as folder:
        yield folder
