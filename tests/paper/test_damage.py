"""A results folder that was damaged gives its numbers or one sentence, never other numbers."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from processes import output

from sgdol.paper.configuration import ResultsError
from sgdol.paper.files import seal
from sgdol.paper.measures import Reader
from sgdol.paper.results import Configuration, Results

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.results import COUNT, damage_and_read

CURVES = ("rosenbrock", "sigma=5", "SGD")


@pytest.fixture
def folder(written_folder, tmp_path):
    return Path(shutil.copytree(written_folder, tmp_path / "results"))


def test_a_flipped_bit_of_a_curve_is_found(folder):
    path = Results(folder).curves_path(*CURVES)
    content = bytearray(path.read_bytes())
    value = Results(folder).curves(*CURVES)["objective"].values
    place = content.index(value.tobytes())
    content[place + 6] ^= 1 << 4
    path.write_bytes(content)
    with pytest.raises(ResultsError, match=r"does not match its checksum.*move it away"):
        Results(folder).curves(*CURVES)
    with pytest.raises(ResultsError, match="does not match its checksum"):
        Results(folder).summary()


@pytest.mark.parametrize(
    ("source", "target", "what"),
    [
        (CURVES, ("rosenbrock", "sigma=5", "SGDOL Global"), "method 'SGD' where 'SGDOL Global' belongs"),
        (CURVES, ("rosenbrock", "sigma=0.2", "SGD"), "noise 'sigma=5' where 'sigma=0.2' belongs"),
        (CURVES, ("adult", "batch=1", "SGD"), "experiment 'rosenbrock' where 'adult' belongs"),
    ],
    ids=["method", "noise", "experiment"],
)
def test_a_file_in_the_place_of_another_is_refused(folder, source, target, what):
    results = Results(folder)
    path = results.curves_path(*target)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(results.curves_path(*source), path)
    with pytest.raises(ResultsError, match=what):
        Reader(results).curve(*target)


def test_a_search_of_another_method_is_refused_and_not_taken_for_missing(folder):
    results = Results(folder)
    shutil.copy(results.tuning_path("rosenbrock", "SGD"), results.tuning_path("rosenbrock", "Adam"))
    with pytest.raises(ResultsError, match="method 'SGD' where 'Adam' belongs"):
        Reader(results).tuning("rosenbrock", "Adam")
    results.tuning_path("rosenbrock", "SGD").write_bytes(b"")
    with pytest.raises(ResultsError, match="no checksum"):
        Reader(results).tuning("rosenbrock", "SGD")
    assert Reader(results).tuning("rosenbrock", "RMSProp") is None


def test_a_search_and_a_run_are_not_taken_for_each_other(folder):
    results = Results(folder)
    curves, search = results.curves_path("rosenbrock", "sigma=0", "SGD"), results.tuning_path("rosenbrock", "SGD")
    content = curves.read_bytes()
    curves.write_bytes(search.read_bytes())
    search.write_bytes(content)
    for read in (lambda: results.curves("rosenbrock", "sigma=0", "SGD"), lambda: results.tuning("rosenbrock", "SGD")):
        with pytest.raises(ResultsError, match="holds something else than its place says"):
            read()


def test_a_run_of_another_folder_is_refused(folder, tmp_path):
    other = Results(tmp_path / "other")
    other.prepare(Configuration(horizon=1000, repeats=4))
    path = other.curves_path(*CURVES)
    path.parent.mkdir(parents=True)
    shutil.copy(Results(folder).curves_path(*CURVES), path)
    with pytest.raises(ResultsError, match=r"repeats .*3.* where 4 belongs"):
        other.curves(*CURVES)


def test_a_resumed_run_does_not_take_a_damaged_file_for_done(folder):
    results = Results(folder)
    path = results.curves_path(*CURVES)
    assert results.has(path, "written")
    path.write_bytes(seal(b"no NetCDF"))
    with pytest.raises(ResultsError, match="cannot read"):
        Results(folder).has(path, "written")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("configuration.json", b'"horizon": 1000', b'"horizon": 1001'),
        ("configuration.json", b'"sha256"', b'"sha257"'),
        ("configuration.json", b'"figures": [', b'"figures": {'),
        ("timings.json", b"83.0", b"-83.0"),
        ("timings.json", b"83.0", b"NaN"),
        ("timings.json", b"83.0", b'"83"'),
    ],
)
def test_a_damaged_file_of_text_is_one_sentence(folder, name, old, new):
    path = folder / name
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ResultsError, match=f"cannot read .*{name}") as caught:
        _ = Results(folder).configuration, Results(folder).timings()
    assert len(str(caught.value).splitlines()) == 1


def test_twenty_damages_leave_no_other_number(folder):
    _, wrong = damage_and_read(folder, 20, seed=1)
    assert wrong == []


@pytest.mark.slow
def test_three_hundred_damages_leave_no_other_number(folder):
    _, wrong = damage_and_read(folder, COUNT)
    assert wrong == []


def test_a_full_disk_is_one_sentence_and_leaves_what_was_there(written_folder, tmp_path):
    folder = Path(shutil.copytree(written_folder, tmp_path / "results"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # A file that may not grow stands for a disk that is full: the system refuses to write on.
    program = (
        "import resource, sys; from sgdol.paper.results import Results; results = Results(sys.argv[1])\n"
        f"dataset = results.curves(*{CURVES!r}); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: results.write(results.curves_path('rosenbrock', 'sigma=5', 'Adam'), dataset, 'key')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = output([sys.executable, "-c", program, folder])
    assert said.startswith("ResultsError cannot write")
    assert "adam.nc: File too large; what was written before is whole" in said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
