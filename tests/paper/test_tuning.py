"""Which rate is chosen, and why."""

from __future__ import annotations

import numpy as np
import pytest

from sgdol.paper.experiments import ADULT, EXPERIMENTS, ROSENBROCK
from sgdol.paper.methods import methods
from sgdol.paper.problems import AdultClassifier, Rosenbrock
from sgdol.paper.tuning import Criterion, Grid, choose, grid_for, tune

TABLE = methods()


def test_grids_are_the_numbers_that_one_would_type():
    assert Grid(1e-3, 1e-1).rates().tolist() == [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]
    assert str(Grid(1e-3, 1e-1)) == "1-2-5 per decade from 0.001 to 0.1"
    with pytest.raises(ValueError, match="a grid needs 0 < low <= high < inf, got low=0"):
        Grid(0, 1)


def test_every_tuned_method_has_a_grid_for_each_of_its_hyperparameters():
    for grids in (experiment.grids for experiment in EXPERIMENTS.values()):
        assert set(grids) == {name for name, method in TABLE.items() if method.tuned}
        for name, axes in grids.items():
            assert set(axes) == set(TABLE[name].tuned)


def test_hypergradient_is_tuned_over_both_its_first_rate_and_beta():
    trials = grid_for(TABLE["Hypergradient"], {"learning_rate": Grid(0.1, 1), "beta": Grid(1e-2, 1e-1, digits=(1,))})
    pairs = set(zip(trials["learning_rate"], trials["beta"], strict=True))
    assert len(pairs) == 4 * 2


def test_the_smallest_running_mean_wins_among_those_that_did_not_diverge():
    mean, objective = np.array([3.0, 1.0, np.nan, 0.5]), np.array([1.0, 1.0, 1.0, 1.0])
    diverged = np.array([False, False, False, True])
    assert choose(mean, objective, diverged, Criterion()) == 1
    with pytest.raises(ValueError, match="extend the grid to smaller rates"):
        choose(mean, objective, np.ones(4, bool), Criterion())


def test_a_step_into_the_flat_region_is_not_admitted(monkeypatch):
    monkeypatch.setattr(AdultClassifier, "ceiling", float("inf"))
    rng = np.random.default_rng(0)
    features = np.column_stack([(rng.random((60, 5)) < 0.5).astype(float), np.ones(60)])
    labels = np.sign(features @ rng.normal(size=6) + 0.1)
    problem = AdultClassifier(features, labels)
    grids = {"SGD": {"learning_rate": Grid(1e-1, 1e6)}}
    (search,) = tune(problem, [TABLE["SGD"]], 300, grids=grids, criterion=ADULT.criterion)
    (careless,) = tune(problem, [TABLE["SGD"]], 300, grids=grids, criterion=Criterion())
    assert careless.objective[careless.index] > 0.9
    assert search.objective[search.index] <= search.objective.min() + 0.002
    assert search.chosen["learning_rate"] < careless.chosen["learning_rate"]
    assert "within 0.002" in search.criterion


def test_sgd_on_rosenbrock_is_tuned_to_the_edge_of_stability():
    (search,) = tune(Rosenbrock(), [TABLE["SGD"]], 3000, grids=ROSENBROCK.grids, criterion=ROSENBROCK.criterion)
    assert search.chosen == {"learning_rate": 0.002}  # the curvature at the optimum is 1002
    assert search.at_edge == ()
    assert search.diverged[search.hyperparameters["learning_rate"] >= 0.1].all()
    assert search.horizon == 3000


def test_a_choice_at_the_edge_of_its_grid_is_reported():
    narrow = {"SGD": {"learning_rate": Grid(1e-5, 1e-4)}}
    (search,) = tune(Rosenbrock(), [TABLE["SGD"]], 100, grids=narrow, criterion=Criterion())
    assert search.at_edge == ("learning_rate",)
    with pytest.raises(ValueError, match="SGD GL has no rate to tune"):
        tune(Rosenbrock(), [TABLE["SGD GL"]], 100, grids=narrow, criterion=Criterion())
