"""The optimizer against the reference on the same gradients, in float64, to 1e-12."""

import itertools

import numpy as np
import pytest
import torch
from dense_metric import Dense, dense
from loops import as_on_a_device, closure_of, one_step
from pairs import all_pairs, name, sample

from sgdol import PAPER, SGDOL, reference
from sgdol.learners import FTRL, MeasuredCurvature
from sgdol.metrics import RMS, Identity
from sgdol.reference_kronecker import kronecker

pytestmark = pytest.mark.filterwarnings(
    "ignore:SGDOL got one backward",  # pairs are among what is tested
    "ignore:SGDOL's step size has been exactly 0",  # vectors that clip it there
)

SHAPES = [(3,), (2, 2), ()]
D = 8
BLOCKS = {
    "global": None,
    "group": [0, 0, 0, 1, 1, 1, 1, 1],
    "tensor": [0, 0, 0, 1, 1, 1, 1, 2],
    "coordinate": list(range(D)),
}
T, TURNS = 34, 10
SMOOTHNESS = 4.0


def vectors(k: int, seed: int = 0) -> np.ndarray:
    """Gradients that drive the multiplier to both clips: agreeing far beyond alpha, opposed, noisy, turning back."""
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(T - TURNS, k, D))
    mean = rng.normal(size=D)
    g[:6] = mean + 0.1 * g[:6]
    g[6:18, 0] = mean
    g[6:18, 1:] = -3 * mean * (1 + 0.1 * g[6:18, 1:])
    g[3, 0] = 0.2 * mean  # ||g_1|| small and <g_1, g_2> large: the paper's u exceeds n
    g[3, 1] = 60.0 * mean
    g[20, 0], g[20, 1] = mean, -mean  # the symmetric direction vanishes for k = 2
    turns = (-2.0) ** np.arange(TURNS)[:, None, None]  # each step was too long: the next gradient opposes it
    return np.concatenate([g, turns * mean * (1 + 0.1 * rng.normal(size=(TURNS, k, D)))])


def parameters() -> list[torch.nn.Parameter]:
    rng = np.random.default_rng(7)
    x = rng.normal(size=D)
    parts = np.split(x, [3, 7])
    return [torch.nn.Parameter(torch.tensor(v).reshape(s)) for v, s in zip(parts, SHAPES, strict=True)]


def flat(params) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in params]).numpy().copy()


def linear_loss(params, g: np.ndarray) -> torch.Tensor:
    """A loss whose gradient is g wherever it is evaluated."""
    parts = np.split(g, [3, 7])
    return sum((p * torch.tensor(v).reshape(p.shape)).sum() for p, v in zip(params, parts, strict=True))


def groups(params):
    return [{"params": params[:1]}, {"params": params[1:]}]


def run(source: str, gradients: np.ndarray, params, host: bool = True, **options) -> np.ndarray:
    opt = SGDOL(groups(params), smoothness=SMOOTHNESS, **options)
    opt = opt if host else as_on_a_device(opt)
    iterates = [flat(params)]
    for step in gradients:
        k = len(step)
        if source == "microbatches":
            for g in step:
                (linear_loss(params, g) / k).backward()
            opt.step()
        elif source == "alternating":
            for g in step:
                opt.zero_grad()
                linear_loss(params, g).backward()
                opt.step()
        elif source == "by hand":
            for g in step:
                for p, v in zip(params, np.split(g, [3, 7]), strict=True):
                    p.grad = torch.tensor(v).reshape(p.shape)
                opt.step()
        else:
            opt.step(closure_of(opt, lambda step=step: [linear_loss(params, g) / len(step) for g in step]))
        opt.zero_grad()
        iterates.append(flat(params))
    return np.array(iterates)


OPTIONS = {
    "source": ["microbatches", "alternating", "by hand", "closure"],
    "k": [2, 3, 5],
    "estimator": ["symmetric", "paper"],
    "granularity": list(BLOCKS),
    "alpha": ["1 first", "10 first", 10.0, 0.01],
    "momentum": [0.0, 0.8],
    "bias_correction": [True, False],
    "epoch": [None, 2, 5],
    "statistics": ["direction", "gradient"],
    "metric": ["euclidean", "rms", "adagrad", "kronecker", "dense"],
    "learner": ["ftrl", "measured"],
    "maximize": [False, True],
    "host": [True, False],
}
LEARNERS = {"ftrl": FTRL(), "measured": MeasuredCurvature()}
METRICS = {"kronecker": lambda past, present, tensors: kronecker(past, present, SHAPES)[0], "dense": dense}
"""Those whose D is a full matrix, of which the second is known to nobody but the tests, as the reference has them."""


def allowed(row) -> bool:
    """Two gradients where each is a step of its own, as the paper's are; epochs correct the symmetric estimator.

    A step size for each coordinate needs a metric whose D is a diagonal.
    """
    together = row["source"] in ("microbatches", "closure")
    symmetric = row["estimator"] == "symmetric"
    split = (row["k"] == 2 or together) and (symmetric or not together) and (symmetric or row["epoch"] is None)
    return split and not (row["metric"] in METRICS and row["granularity"] == "coordinate")


def regulariser(alpha: str | float) -> dict[str, float | None]:
    """Alpha itself, or kappa where alpha is so many times the first squared gradient."""
    return {"alpha": None, "kappa": float(alpha.split()[0])} if isinstance(alpha, str) else {"alpha": alpha}


@pytest.mark.parametrize("row", [*all_pairs(OPTIONS, allowed), *sample(OPTIONS, 20, allowed)], ids=name)
def test_agrees_with_the_reference(row):
    """What is maximised has the opposite gradients. Eigenvectors, of sums that nearly cancel, lose some digits."""
    options = {**row, **regulariser(row["alpha"])}
    words = {name: options.pop(name) for name in ("source", "k", "granularity", "learner", "maximize", "host")}
    gradients, params, learner = vectors(words["k"]), parameters(), words["learner"]
    blocks = {"blocks": BLOCKS[words["granularity"]], "tensors": BLOCKS["tensor"], "learner": learner}
    made = {**options, "smoothness": SMOOTHNESS, "metric": METRICS.get(row["metric"], row["metric"])}
    expected = reference.replay(gradients, flat(params), **made, **blocks)
    asked = {**options, **{name: words[name] for name in ("granularity", "maximize", "host")}}
    asked["metric"] = Dense() if row["metric"] == "dense" else row["metric"]
    sign = -1 if words["maximize"] else 1
    found = run(words["source"], sign * gradients, params, learner=LEARNERS[learner], **asked)
    tolerance = 1e-10 if row["metric"] == "kronecker" else 1e-12
    np.testing.assert_allclose(found, expected.iterates, rtol=tolerance, atol=tolerance)
    last = expected.diagonals[-1]
    assert last.ndim == 1 or np.abs(last - np.diag(np.diag(last))).max() > 0.01, "D is a diagonal: nothing was tested"


def test_every_pair_of_options_is_tried():
    rows = all_pairs(OPTIONS, allowed)
    assert len(rows) < 60
    tried = {(a, row[a], b, row[b]) for row in rows for a, b in itertools.combinations(OPTIONS, 2)}
    for a, b in itertools.combinations(OPTIONS, 2):
        for one, other in itertools.product(OPTIONS[a], OPTIONS[b]):
            # The least that other options may be: pairs of the symmetric estimator; k > 2 needs another source.
            usual = {"k": 2, "estimator": "symmetric", "epoch": None, "metric": "rms", "granularity": "global"}
            least = [{"source": source, **usual} for source in OPTIONS["source"]]
            possible = any(allowed({**row, a: one, b: other}) for row in least)
            assert ((a, one, b, other) in tried) == possible


def replay(gradients, **options):
    """By the reference, of the symmetric estimator."""
    made = {"smoothness": SMOOTHNESS, "alpha": None, "estimator": "symmetric"}
    return reference.replay(gradients, flat(parameters()), **{**made, **options})


MEASURED = {"kappa": 10.0, "momentum": 0.9, "bias_correction": False}
"""What the default learner brings along."""


@pytest.mark.parametrize("granularity", list(BLOCKS))
def test_the_defaults_are_measured_curvature_and_momentum_without_bias_correction(granularity):
    expected = replay(vectors(3), blocks=BLOCKS[granularity], learner="measured", **MEASURED)
    found = run("microbatches", vectors(3), parameters(), granularity=granularity)
    np.testing.assert_allclose(found, expected.iterates, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_defaults_with_ftrl_are_the_first_squared_gradient_and_bias_correction(momentum):
    expected = replay(vectors(2), momentum=momentum)
    found = run("microbatches", vectors(2), parameters(), momentum=momentum, learner=FTRL())
    np.testing.assert_allclose(found, expected.iterates, rtol=1e-12, atol=1e-12)


def test_the_settings_of_the_paper_are_algorithm_1():
    expected = replay(vectors(2), alpha=10.0, estimator="paper")
    found = run("alternating", vectors(2), parameters(), **PAPER)
    np.testing.assert_allclose(found, expected.iterates, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("power", [0.0, 8.0])
@pytest.mark.parametrize("granularity", list(BLOCKS))
def test_the_average_agrees_with_the_reference(granularity, power):
    gradients, params = vectors(2), parameters()
    expected = replay(gradients, blocks=BLOCKS[granularity], learner="measured", **MEASURED)
    opt = SGDOL(groups(params), smoothness=SMOOTHNESS, granularity=granularity, averaging=power)
    for step in gradients:
        one_step(opt, (linear_loss(params, g) / 2 for g in step))
    last = flat(params)
    with opt.averaged():
        average = flat(params)
    np.testing.assert_allclose(average, reference.polynomial_average(expected.iterates[1:], power), rtol=1e-12)
    np.testing.assert_array_equal(flat(params), last)


@pytest.mark.parametrize("estimator", ["symmetric", "paper"])
def test_the_vectors_hit_both_clips(estimator):
    """Else the test above would not notice a missing clip."""
    paper = reference.replay(vectors(2), np.zeros(D), smoothness=SMOOTHNESS, alpha=0.01, estimator=estimator)
    assert paper.step_sizes.min() == 0
    if estimator == "paper":
        assert paper.step_sizes.max() == 2 / SMOOTHNESS
    coordinate = reference.replay(
        vectors(3), np.zeros(D), smoothness=SMOOTHNESS, alpha=0.01, estimator=estimator, blocks=range(D)
    )
    assert coordinate.step_sizes.min() == 0


@pytest.mark.parametrize("k", OPTIONS["k"])
@pytest.mark.parametrize("momentum", OPTIONS["momentum"])
@pytest.mark.parametrize("estimator", OPTIONS["estimator"])
def test_the_vectors_make_a_constant_step_too_long(estimator, momentum, k):
    """Else measured curvature would be a constant step above, and nothing of it would be tried."""
    for alpha in OPTIONS["alpha"]:
        options = {"estimator": estimator, "momentum": momentum, **regulariser(alpha)}
        found = replay(vectors(k), learner="measured", bias_correction=False, **options).step_sizes
        assert found[0] == 1 / SMOOTHNESS
        assert ((found > 0) & (found < 0.9 / SMOOTHNESS)).sum() >= 3


@pytest.mark.parametrize("exponent", [-400, 400])
def test_gradients_of_any_size_give_the_same_run_in_a_metric_that_nobody_knows(exponent):
    found = []
    for scale in (1.0, 2.0**exponent):
        params = parameters()
        opt = SGDOL(params, lr=0.25 / scale, metric=Dense())
        for step in vectors(2):
            one_step(opt, (linear_loss(params, g * scale) / 2 for g in step))
        found.append(flat(params))
    np.testing.assert_array_equal(*found)


class Overridden(RMS):
    """D = 1, as a subclass."""

    def operator(self, state, means):
        return Identity()


def test_methods_that_a_subclass_of_a_metric_overrides_are_called():
    found = run("microbatches", vectors(2), parameters(), metric=Overridden(), learner=FTRL())
    expected = replay(vectors(2), momentum=0.9)
    np.testing.assert_allclose(found, expected.iterates, rtol=1e-12, atol=1e-12)
