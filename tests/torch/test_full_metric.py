"""A metric whose D is a full matrix: nobody but the metric may know what D looks like."""

import copy
import io

import numpy as np
import pytest
import torch
from dense_metric import Dense, dense
from test_exact_vectors import BLOCKS, SMOOTHNESS, flat, groups, linear_loss, parameters, vectors
from test_free import PROBLEMS, SIZES, START, STEPS, oracle_of, train

from sgdol import SGDOL, SGDOLFree, reference
from sgdol.learners import FTRL, MeasuredCurvature
from sgdol.reference_free import sgdol_free

LEARNERS = {"ftrl": FTRL(), "measured": MeasuredCurvature()}
TENSORS = BLOCKS["tensor"]


def run(opt, params, gradients, pairs=False) -> np.ndarray:
    """The iterates, from gradients of which all of a step, or each, is followed by step()."""
    iterates = [flat(params)]
    for step in gradients:
        for g in step:
            (linear_loss(params, g) / (1 if pairs else len(step))).backward()
            if pairs:
                opt.step()
                opt.zero_grad()
        if not pairs:
            opt.step()
            opt.zero_grad()
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
    opt._host = host
    found = run(opt, params, gradients, pairs=estimator == "paper")
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
    steps = STEPS.get(problem, 60)
    truth = sgdol_free(oracle_of(PROBLEMS[problem](), 2), START, steps, tensors=SIZES, metric=dense, **options)
    iterates, average, step_sizes, opt, calls = train(problem, steps, metric=Dense(), **options)
    np.testing.assert_allclose(iterates, truth.iterates, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(average, truth.averages[-1], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(step_sizes, truth.step_sizes, rtol=1e-11)
    for name in ("evaluations", "rejections", "rollbacks", "skipped"):
        assert opt.diagnostics()[name] == getattr(truth, name), name
    assert len(calls) == truth.evaluations


def test_a_state_that_is_a_factor_is_kept_for_each_tensor_and_loads():
    gradients, params = vectors(2), parameters()
    opt = SGDOL(params, lr=0.25, metric=Dense())
    run(opt, params, gradients[:5])
    assert [opt.state[p]["metric.outer"].shape for p in params] == [(p.numel(), p.numel()) for p in params]
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    twins = copy.deepcopy(params)
    resumed = SGDOL(twins, lr=0.25, metric=Dense())
    resumed.load_state_dict(torch.load(file, weights_only=True))
    np.testing.assert_array_equal(run(resumed, twins, gradients[5:]), run(opt, params, gradients[5:]))


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


def test_sgdol_free_goes_on_from_a_state_that_is_a_factor():
    *_, opt, _ = train("quadratic", 10, metric=Dense())
    other = SGDOLFree(copy.deepcopy(opt.param_groups[0]["params"]), metric=Dense())
    other.load_state_dict(opt.state_dict())
    for p, q in zip(opt.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(opt.state[p]["metric.outer"], other.state[q]["metric.outer"])
