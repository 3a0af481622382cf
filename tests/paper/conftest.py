"""What the tests of the paper share: results that were written down, and one small real run."""

from __future__ import annotations

import pytest
from written import WrittenResults, write_folder


@pytest.fixture(scope="session")
def written_results():
    return WrittenResults


@pytest.fixture(scope="session")
def written_folder(tmp_path_factory):
    """A results folder of that world; a test that changes it copies it first."""
    return write_folder(tmp_path_factory.mktemp("written") / "results").folder
