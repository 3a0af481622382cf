"""The results folder: validated, atomic, the same bytes, and refusing what it should."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
import xarray as xr

from sgdol.paper import results as module
from sgdol.paper.results import Configuration, Results, ResultsError, write_atomically


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"figures": (1, 7)}, "figures must be among 1, 2, 3 and 4, got 7"),
        ({"figures": ()}, "figures must name at least one"),
        ({"horizon": 0}, "horizon must be an integer from 10 to 1000000000, got 0"),
        ({"horizon": 1e5}, "horizon must be an integer .*, got 100000.0"),
        ({"repeats": 0}, "repeats must be an integer from 1"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"alpha": float("nan")}, "alpha must be positive and finite, got nan"),
        ({"alpha": "ten"}, "alpha must be a positive number, got 'ten'"),
        ({"noise_model": "white"}, "noise_model must be one of"),
        ({"adagrad_form": "late"}, "adagrad_form must be one of"),
        ({"tuning_horizon": 1}, "tuning_horizon must be an integer from 10"),
    ],
)
def test_bad_configurations_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Configuration(**arguments)


def test_defaults_are_the_papers():
    configuration = Configuration()
    assert configuration.repeats_of("rosenbrock") == 40
    assert configuration.repeats_of("adult") == 5
    assert configuration.horizons("rosenbrock") == (100_000, 100_000, 100_000)
    assert configuration.horizons("adult") == (100_000, 10_000, 10_000)
    assert Configuration(quick=True).horizon < 10_000
    assert Configuration(quick=True, horizon=20_000).horizon == 20_000
    assert Configuration(figures=(2, 2, 1)).figures == (1, 2)
    assert set(Configuration(figures=(2,)).methods("rosenbrock")) >= {"SGD GL", "SGDOL Coordinate"}


def dataset(value=1.0):
    return xr.Dataset(
        {"objective": (("repeat", "iteration"), np.full((2, 3), value))},
        coords={"iteration": [1, 2, 3], "repeat": [0, 1]},
        attrs={"method": "SGD", "learning_rate": 0.1},
    )


def test_equal_content_is_equal_bytes_whenever_and_wherever_it_is_written(tmp_path):
    contents = []
    for name in ("one", "another-folder"):
        if contents:
            time.sleep(1.1)  # HDF5 can store times, in seconds
        results = Results(tmp_path / name)
        results.prepare(Configuration())
        path = results.curves_path("adult", "batch=1", "SGD")
        results.write(path, dataset(), key="k")
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    again = results.curves("adult", "batch=1", "SGD")
    xr.testing.assert_equal(again, dataset())
    assert again.attrs["key"] == "k"


def test_a_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_killed_run_left_half_written_is_swept_away(tmp_path):
    results = Results(tmp_path)
    results.prepare(Configuration())
    (tmp_path / "curves").mkdir()
    (tmp_path / "curves" / ".unfinished-abc").write_bytes(b"half")
    (tmp_path / ".unfinished-folder").mkdir()
    (tmp_path / ".unfinished-folder" / "dataset.nc").write_bytes(b"half")
    results.prepare(Configuration())
    assert not list(tmp_path.rglob(".unfinished*"))


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_configuration_is_refused_and_nothing_is_changed(tmp_path):
    Results(tmp_path).prepare(Configuration(seed=0))
    before = snapshot(tmp_path)
    with pytest.raises(ResultsError, match=r"another configuration, seed=0 \(now 1\): give another folder"):
        Results(tmp_path).prepare(Configuration(seed=1))
    assert snapshot(tmp_path) == before


def test_another_version_is_refused_and_nothing_is_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sgdol, "__version__", "0.0.1")
    Results(tmp_path).prepare(Configuration())
    monkeypatch.undo()
    before = snapshot(tmp_path)
    with pytest.raises(ResultsError, match=r"holds results of sgdol 0\.0\.1 and this is sgdol"):
        Results(tmp_path).prepare(Configuration())
    assert snapshot(tmp_path) == before


def test_more_figures_of_the_same_configuration_are_welcome(tmp_path):
    Results(tmp_path).prepare(Configuration(figures=(2,)))
    Results(tmp_path).prepare(Configuration(figures=(1, 2)))
    assert Results(tmp_path).configuration.figures == (1, 2)
    assert Results(tmp_path).version == module.sgdol.__version__


def test_unusable_folders_get_one_sentence(tmp_path):
    with pytest.raises(ResultsError, match="holds no results"):
        _ = Results(tmp_path).configuration
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="is a file: give a folder"):
        Results(tmp_path / "file").prepare(Configuration())
    with pytest.raises(ResultsError, match="cannot write to"):
        Results(tmp_path / "file" / "below").prepare(Configuration())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "configuration.json").write_text("{")
    with pytest.raises(ResultsError, match=r"cannot read .*configuration\.json"):
        Results(tmp_path / "broken").prepare(Configuration())
    (tmp_path / "strange" / "curves" / "x").mkdir(parents=True)
    (tmp_path / "strange" / "curves" / "x" / "y.nc").write_text("")
    with pytest.raises(ResultsError, match="without their configuration"):
        Results(tmp_path / "strange").prepare(Configuration())
    with pytest.raises(ResultsError, match="cannot read the data file"):
        Results(tmp_path / "new").prepare(Configuration(data=str(tmp_path / "absent")))


def test_unknown_names_and_missing_or_damaged_files_are_named(tmp_path):
    results = Results(tmp_path)
    results.prepare(Configuration())
    with pytest.raises(ResultsError, match="unknown method 'Sgd': known are SGDOL Global"):
        results.curves("adult", "batch=1", "Sgd")
    with pytest.raises(ResultsError, match="unknown noise 'sigma=5'"):
        results.curves("adult", "sigma=5", "SGD")
    with pytest.raises(ResultsError, match="there is no"):
        results.curves("adult", "batch=1", "SGD")
    path = results.curves_path("adult", "batch=1", "SGD")
    results.write(path, dataset(), key="k")
    with pytest.raises(ResultsError, match="is not a result of this configuration"):
        results.has(path, "other")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ResultsError, match="cannot read"):
        results.curves("adult", "batch=1", "SGD")


def test_timings_are_kept_apart(tmp_path):
    results = Results(tmp_path)
    results.prepare(Configuration())
    results.record_time("a", 1.23456)
    results.record_time("b", 2.0)
    assert results.timings() == {"a": 1.235, "b": 2.0}
    assert json.loads((tmp_path / "timings.json").read_text())["b"] == 2.0
