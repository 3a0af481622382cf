"""The whole way: from a configuration to a folder of results, through interruptions."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import LIMIT, output

from sgdol import cli
from sgdol.paper.methods import METHODS
from sgdol.paper.reproduce import reproduce
from sgdol.paper.results import SUMMARY_COLUMNS, Configuration, Results, ResultsError


class Watcher:
    def __init__(self):
        self.totals, self.done, self.finished = {}, {}, {}

    def plan(self, parts):
        self.totals.update(parts)

    def advance(self, part, iterations):
        self.done[part] = self.done.get(part, 0) + iterations

    def finish(self, part, seconds):
        self.finished[part] = seconds


@pytest.fixture(scope="module")
def results(reproduction):
    return Results(reproduction.folder)


@pytest.fixture
def copied(reproduction, tmp_path):
    return Path(shutil.copytree(reproduction.folder, tmp_path / "copy"))


def files(folder):
    """The bytes of every result; the timings are not one, and the report shows them."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "timings.json"
    }


def test_every_run_that_was_asked_for_is_there_and_every_one_without_noise(results, reproduction):
    expected = {("rosenbrock", "sigma=0", m) for m in METHODS} | {("adult", "batch=all", m) for m in METHODS}
    expected |= {("rosenbrock", n, m) for n in ("sigma=0.2", "sigma=5") for m in reproduction.arguments["only"]}
    expected |= {("adult", n, m) for n in ("batch=50", "batch=1") for m in reproduction.arguments["only"]}
    assert set(results.available()) == expected
    assert len(results.tuned()) == 2 * 8


def test_curves_have_what_the_figures_need(results):
    for run in results.available():
        curves = results.curves(*run)
        assert curves["mean_squared_gradient"].dims == ("repeat", "iteration")
        assert curves["mean_squared_gradient"].dtype == np.float64
        assert {"squared_gradient", "objective", "step_size", "sampling_error"} <= set(curves)
        assert curves["iteration"].values[0] == 1
        assert curves["iteration"].values[-1] == curves.attrs["horizon"] == 60
        assert curves["diverged"].shape == (2,)
        assert tuple(curves.attrs[name] for name in ("experiment", "noise", "method")) == run
        assert curves.attrs["gradients_per_iteration"] == (2 if run[2].startswith("SGDOL") else 1)
        np.testing.assert_array_equal(
            curves["mean_squared_gradient"].values[:, 0], curves["squared_gradient"].values[:, 0]
        )


def test_what_tuning_chose_is_what_the_runs_used(results):
    for experiment, method in results.tuned():
        search = results.tuning(experiment, method)
        assert search["rate"].values[search.attrs["index"]] == search.attrs["chosen"]
        for run in results.available():
            if run[0] == experiment and run[2] == method:
                assert results.curves(*run).attrs["learning_rate"] == search.attrs["chosen"]
    for experiment, noise, method in results.available():
        if method.startswith("SGDOL"):
            attributes = results.curves(experiment, noise, method).attrs
            assert attributes["smoothness"] == 1 / results.tuning(experiment, "SGD").attrs["chosen"]
            assert attributes["alpha"] == 10.0


def test_the_summary_has_the_columns_of_the_design(results):
    lines = (results.folder / "summary.csv").read_text().splitlines()
    assert lines[0] == ",".join(SUMMARY_COLUMNS)
    assert len(lines) == 1 + len(results.available())
    row = results.summary()[0]
    last = results.curves(row["experiment"], row["noise"], row["method"]).isel(iteration=-1)
    assert row["objective"] == pytest.approx(float(last["objective"].mean()))


ROSENBROCK = {"figures": (2,), "horizon": 50, "repeats": 2, "only": ("SGDOL Global", "SGD")}


def test_progress_and_times_cover_every_part(tmp_path):
    watcher = Watcher()
    results = reproduce(Configuration(**ROSENBROCK), tmp_path, watcher)
    assert watcher.totals == watcher.done
    assert watcher.finished.keys() == watcher.totals.keys() == results.timings().keys()
    assert all(seconds > 0 for seconds in watcher.finished.values())


def test_lost_files_come_back_with_the_same_bytes_in_any_order(copied, reproduction, cached):
    before = files(copied)
    for lost in (
        "curves/rosenbrock/sigma=5/adam.nc",
        "curves/adult/batch=all/sgd.nc",
        "tuning/rosenbrock/sgd.nc",
        "curves/adult/batch=1/sgdol-global.nc",
    ):
        (copied / lost).unlink()
    output(command(copied, reproduction.arguments, workers=1), env=cached)
    assert files(copied) == before


def test_the_command_leaves_everything(reproduction):
    names = {path.name for path in reproduction.folder.iterdir()}
    figures = {f"{name}.{suffix}" for name in ("figure1", "figure4", "tuning") for suffix in ("png", "svg")}
    assert figures | {"summary.csv", "claims.json", "report.html", "curves", "configuration.json"} <= names
    assert not [name for name in names if name.startswith(".")]
    for words in ("rosenbrock: tuning", "rosenbrock: sigma=5", "altogether", "theorem-4", "report.html"):
        assert words in reproduction.stdout


def test_the_command_again_computes_nothing_and_leaves_the_same_bytes(copied, reproduction, monkeypatch, capsys):
    before = files(copied)
    (copied / "report.html").unlink()
    monkeypatch.setattr(sys, "argv", ["sgdol", "reproduce", *reproduction.words, "--out", str(copied)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().err.count("done before") == len(Results(copied).timings())
    assert files(copied) == before


def test_a_failure_stops_the_other_parts_and_what_is_written_stays(tmp_path):
    class Impatient(Watcher):
        def advance(self, part, iterations):
            super().advance(part, iterations)
            if part == "rosenbrock: sigma=0.2: SGD":
                raise KeyboardInterrupt

    watcher = Impatient()
    with pytest.raises(KeyboardInterrupt):
        reproduce(Configuration(**ROSENBROCK), tmp_path, watcher)
    written = set(Results(tmp_path).available())
    assert ("rosenbrock", "sigma=0", "SGD") in written
    assert ("rosenbrock", "sigma=0.2", "SGD") not in written
    assert len(watcher.finished) < len(watcher.totals)
    assert not list(tmp_path.rglob(".unfinished*"))


def test_a_folder_at_work_is_refused(tmp_path):
    results = Results(tmp_path)
    with results.alone(), pytest.raises(ResultsError, match="another sgdol reproduce is at work"):
        reproduce(Configuration(**ROSENBROCK), tmp_path)


def command(folder, arguments, workers=None):
    code = (
        "import sys; from sgdol.paper.reproduce import reproduce; from sgdol.paper.results import Configuration; "
        f"reproduce(Configuration(**{arguments!r}), sys.argv[1], workers={workers})"
    )
    return [sys.executable, "-c", code, str(folder)]


def killed(folder, arguments, environment, written, delay):
    """Start a run, and kill it when it has written so many files, after a delay; whether it was still running."""
    process = subprocess.Popen(command(folder, arguments), env=environment)
    end = time.monotonic() + LIMIT
    while process.poll() is None and len(list(folder.rglob("*.nc"))) < written and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(delay)
    process.kill()
    return process.wait() != 0


@pytest.mark.slow  # resuming and files that are whole or not there are tested above and in test_results.py
def test_killed_ten_times_and_run_again_it_ends_with_the_same_bytes(tmp_path, reproduction, cached):
    """Programs come from a cache, so that the test spends its time where a kill may hurt."""
    arguments, rng = {**reproduction.arguments, "only": (), "horizon": 3000, "seed": 5}, random.Random(1)
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    output(command(whole, arguments), env=cached)
    for _ in range(10):
        written = len(list(interrupted.rglob("*.nc"))) + rng.randint(1, 6)
        if not killed(interrupted, arguments, cached, written, rng.uniform(0, 0.1)):
            # It came to its end between two kills: that end is checked, and it starts again.
            assert files(interrupted) == files(whole)
            shutil.rmtree(interrupted)
    output(command(interrupted, arguments), env=cached)
    assert files(interrupted) == files(whole)
