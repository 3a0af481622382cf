"""A metric whose D is a full matrix: nobody but the metric may know what D looks like."""

import numpy as np
import pytest
from dense_metric import Dense, dense
from free_problems import PROBLEMS, train
from free_problems import reference as reference_free
from loops import as_on_a_device, one_step
from test_exact_vectors import BLOCKS, SMOOTHNESS, flat, groups, linear_loss, parameters, vectors

from sgdol import SGDOL, reference
from sgdol.learners import FTRL, MeasuredCurvature

LEARNERS = {"ftrl": FTRL(), "measured": MeasuredCurvature()}
TENSORS = BLOCKS["tensor"]


def run(opt, params, gradients, pairs=False) -> np.ndarray:
    """The iterates, from gradients of which all of a step, or each, is followed by step()."""
    iterates = [flat(params)]
    for step in gradients:
        losses = [linear_loss(params, g) / (1 if pairs else len(step)) for g in step]
        for several in [[loss] for loss in losses] if pairs else [losses]:
            one_step(opt, several)
        iterates.append(flat(params))
    return np.array(iterates)


@pytest.mark.parametrize(
    ("granularity", "k", "estimator", "momentum", "learner", "bias_correction"),
    [
        ("global", 2, "symmetric", 0.0, "ftrl", True),
        ("global", 2, "symmetric", 0.9, "measured", False),
        ("global", 2, "symmetric", 0.0, "measured", True),
        ("tensor", 5, "symmetric", 0.9, "measured", True),
        ("group", 3, "symmetric", 0.9, "ftrl", True),
        ("tensor", 2, "paper", 0.0, "ftrl", True),
    ],
)
@pytest.mark.parametrize("host", [True, False], ids=["on the host", "as on a device"])
def test_sgdol_equals_the_reference(granularity, k, estimator, momentum, learner, bias_correction, host):
    gradients, params = vectors(k), parameters()
    options = {"estimator": estimator, "momentum": momentum, "bias_correction": bias_correction, "kappa": 10.0}
    made = {"smoothness": SMOOTHNESS, "alpha": None, **options}
    blocks = {"blocks": BLOCKS[granularity], "learner": learner}
    truth = reference.replay(gradients, flat(params), **made, **blocks, metric=dense, tensors=TENSORS)
    opt = SGDOL(groups(params), granularity=granularity, metric=Dense(), learner=LEARNERS[learner], **made)
    found = run(opt if host else as_on_a_device(opt), params, gradients, pairs=estimator == "paper")
    np.testing.assert_allclose(found, truth.iterates, rtol=1e-12, atol=1e-12)
    last = truth.diagonals[-1]
    assert np.abs(last - np.diag(np.diag(last))).max() > 0.01, "D is a diagonal: nothing was tested"


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        *((problem, {}) for problem in PROBLEMS),
        ("quadratic", {"momentum": 0.0}),
        ("quadratic", {"momentum": 0.5, "averaging": 2.0, "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_sgdol_free_equals_the_reference(problem, options):
    found, truth = train(problem, metric=Dense(), **options), reference_free(problem, metric=dense, **options)
    found.agrees_with(truth)
    assert found.calls == truth.evaluations


def test_a_step_size_for_each_coordinate_needs_a_diagonal_metric():
    with pytest.raises(ValueError, match=r'granularity="coordinate" needs a metric whose D is diagonal.*Dense\('):
        SGDOL(parameters(), lr=0.25, metric=Dense(), granularity="coordinate")


@pytest.mark.parametrize("exponent", [-400, 400])
def test_gradients_of_any_size_give_the_same_run(exponent):
    gradients, found = vectors(2), []
    for scale in (1.0, 2.0**exponent):
        params = parameters()
        found.append(run(SGDOL(params, lr=0.25 / scale, metric=Dense()), params, gradients * scale))
    np.testing.assert_array_equal(*found)
