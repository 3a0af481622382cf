"""What the tests of the paper share: results that were written down, the report of them, and one small real run."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from processes import output
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


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all processes of one test run have in common."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cached(shared):
    """An environment in which no program is compiled twice."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(shared / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


NOISY = ("SGDOL Global", "SGDOL Coordinate", "SGD", "Adam")


def write_small_data(path: Path) -> None:
    """A LIBSVM file of 40 samples."""
    rng = np.random.default_rng(0)
    lines = []
    for row in range(40):
        indices = np.sort(rng.choice(np.arange(1, 124), size=14, replace=False))
        lines.append(f"{'+1' if row % 2 else '-1'} " + " ".join(f"{i}:1" for i in indices) + "\n")
    path.write_text("".join(lines))


@pytest.fixture(scope="session")
def reproduction(shared, cached):
    """A small run, by the command line: all methods without noise, some with it. To change it, copy it first.

    It is the dearest thing here, so the first process that needs it makes it for all of them.
    """
    data, folder, said = shared / "small", shared / "results", shared / "stdout"
    arguments = {"horizon": 60, "repeats": 2, "data": str(data)}
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    words += [word for method in NOISY for word in ("--method", method)]
    arguments["only"] = NOISY
    with open(shared / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            write_small_data(data)
            command = [sys.executable, "-m", "sgdol", "reproduce", *words, "--out", str(folder)]
            said.write_text(output(command, env=cached))
    return SimpleNamespace(folder=folder, arguments=arguments, words=words, stdout=said.read_text())
