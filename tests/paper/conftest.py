"""What the tests of the paper share: results that were written down, and the report of them."""

from __future__ import annotations

import pytest
from written import WrittenResults, write_folder

from sgdol.paper import claims, figures, report
from sgdol.paper.measures import Reader


@pytest.fixture(scope="session")
def written_results():
    return WrittenResults


@pytest.fixture(scope="session")
def written_folder(tmp_path_factory):
    """A results folder of that world; a test that changes it copies it first."""
    return write_folder(tmp_path_factory.mktemp("written") / "results").folder


@pytest.fixture(scope="session")
def written_page(tmp_path_factory):
    """The report of that world, with two of its figures."""
    results, folder = WrittenResults(repeats=40), tmp_path_factory.mktemp("report")
    read = Reader(results)
    for number in (1, 4):
        figures.save(figures.draw(number, read), folder, f"figure{number}")
    found = claims.check_claims(read, theorems=False)
    claims.write_claims(found, folder / "claims.json")
    (folder / "summary.csv").write_text("experiment,noise,method\n")
    timings = {"adult: tuning": 83.0, "adult: batch=1: SGD": 40.0, "adult: batch=1: Adam": 2.5}
    return report.write_report(read, results.summary(), found, folder, timings)
