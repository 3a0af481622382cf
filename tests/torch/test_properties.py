"""Properties of the optimizer on arbitrary gradients, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from loops import GRANULARITIES, one_step

from sgdol import SGDOL
from sgdol.learners import FTRL

pytestmark = pytest.mark.filterwarnings(
    "ignore:SGDOL got one backward",  # pairs are among what is tested
    "ignore:SGDOL was given the same gradient twice",
)

D = 6
LR = 0.125


def examples(count: int):
    """The same ones in every run; fewer where a test is parametrized as well, for the sake of its time."""
    return settings(deadline=None, derandomize=True, max_examples=count)


estimators = st.sampled_from(["symmetric", "paper"])
granularities = st.sampled_from(GRANULARITIES)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)
every_way = pytest.mark.parametrize(
    ("estimator", "source"), [("symmetric", "microbatches"), ("symmetric", "alternating"), ("paper", "alternating")]
)
"""The paper's estimator takes one backward per step."""


@st.composite
def noises(draw, horizons=(1, 8), ks=(2, 4), largest=10.0, d=D):
    """Arrays of shape (T, k, D). Between 0 and 1e-100 nothing: squares of less would leave the normal numbers."""
    shape = (draw(st.integers(*horizons)), draw(st.integers(*ks)), d)
    elements = st.floats(-largest, largest).map(lambda v: v if abs(v) > 1e-100 else 0.0)
    return draw(hnp.arrays(np.float64, shape, elements=elements))


@st.composite
def moderate(draw, horizons=(1, 8), ks=(2, 4)):
    """Gaussian noise of any level, loud or silent: for comparisons to rounding, where mixed magnitudes would only
    measure conditioning.
    """
    shape = (draw(st.integers(*horizons)), draw(st.integers(*ks)), D)
    level = draw(st.sampled_from([0.0, 0.1, 1.0, 10.0]))
    return level * np.random.default_rng(draw(st.integers(0, 10**6))).normal(size=shape)


def objective(x: torch.Tensor, noise: np.ndarray) -> torch.Tensor:
    """A quadratic with curvatures 1/4 to 4 and a linear noise term: its gradient depends on x."""
    curvature = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    center = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5, 0.0], dtype=torch.float64)
    return (curvature * (x - center) ** 2).sum() / 2 + (torch.from_numpy(noise) * x).sum()


class Problem:
    """Six numbers in some tensors and groups, the optimizer of them, and what a training loop does with both.

    Args:
        cuts: where to cut the six numbers into tensors.
        groups: how many groups the tensors are dealt out to, in order.
        f_scale: a, the loss is a f(x / b).
        x_scale: b.
        source: ``"microbatches"`` (k backward passes and one step) or ``"alternating"`` (a step after each).
        divide: divide the loss by the number of microbatches, as one does.
        options: those of the optimizer.
    """

    def __init__(
        self, *, cuts=(2, 3), groups=1, f_scale=1.0, x_scale=1.0, source="microbatches", divide=True, **options
    ):
        self.f_scale, self.x_scale, self.source, self.divide = f_scale, x_scale, source, divide
        start = x_scale * torch.linspace(-2, 2, D, dtype=torch.float64)
        self.params = [torch.nn.Parameter(part.clone()) for part in torch.tensor_split(start, list(cuts))]
        count = len(self.params)
        dealt = [[p for i, p in enumerate(self.params) if i * groups // count == g] for g in range(groups)]
        self.opt = SGDOL([{"params": params} for params in dealt if params], **options)

    def run(self, gradients: np.ndarray) -> np.ndarray:
        """The iterates, in the units of x rather than of b x."""
        iterates, alternating = [], self.source == "alternating"
        for step in gradients:
            weight = 1 / len(step) if self.divide and not alternating else 1.0
            for i, noise in enumerate(step[:2] if alternating else step):
                (weight * self.f_scale * objective(torch.cat(self.params) / self.x_scale, noise)).backward()
                if alternating or i == len(step) - 1:
                    one_step(self.opt, [])
            iterates.append(torch.cat([p.detach() for p in self.params]).numpy() / self.x_scale)
        return np.array(iterates)

    def step_sizes(self) -> list[float]:
        return [float(group["step_size"]) for group in self.opt.param_groups]


def run(gradients: np.ndarray, **options) -> np.ndarray:
    return Problem(**{"lr": LR, **options}).run(gradients)


def close(one: np.ndarray, other: np.ndarray, tolerance: float) -> None:
    """Equal up to a fraction of the largest number on the way."""
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1.0, np.abs(one).max()))


# The range of the step size -------------------------------------------------------------------------------------------


@every_granularity
@pytest.mark.parametrize("estimator", ["symmetric", "paper"])
@examples(10)
@given(
    gradients=noises(horizons=(1, 6), largest=1e100),
    lr=st.floats(1e-3, 1e3),
    alpha=st.sampled_from([None, 1.0]),
    learner=st.sampled_from([None, FTRL()]),
)
def test_step_sizes_are_at_least_0_and_at_most_twice_lr(estimator, granularity, gradients, lr, alpha, learner):
    """Of each coordinate, measured: the parameters are put to 0 before every step, so that x = -eta d after it.

    For the mean of k gradients u <= n, by Cauchy-Schwarz: the symmetric step never grows beyond lr.
    """
    params = [torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in (2, 1, 3)]
    opt = SGDOL([{"params": params[:1]}, {"params": params[1:]}], lr, alpha=alpha, estimator=estimator,
                granularity=granularity, momentum=0.0, learner=learner)  # fmt: skip
    pair, limit = estimator == "paper", lr * (2 if estimator == "paper" else 1 + 1e-12)
    for step in gradients:
        for p in params:
            p.data.zero_()
        for g in step[:2] if pair else step:
            (torch.cat(params) @ torch.from_numpy(g)).backward()
            direction = step[0] if pair else torch.cat([p.grad for p in params]).numpy()
            if pair:
                opt.step()
                opt.zero_grad()
        if not pair:
            opt.step()
            opt.zero_grad()
        moved = torch.cat([p.detach() for p in params]).numpy()
        eta = -moved[direction != 0] / direction[direction != 0]
        assert np.all(eta >= 0)
        assert np.all(eta <= limit * (1 + 1e-14))
        for group in opt.param_groups:  # a root mean square for the finer granularities: some roundings
            assert 0 <= float(group["step_size"]) <= limit * (1 + 1e-14)


# Equivariance ---------------------------------------------------------------------------------------------------------

configurations = st.fixed_dictionaries(
    {
        "granularity": granularities,
        "estimator": estimators,
        "momentum": st.sampled_from([0.0, 0.9]),
        "source": st.sampled_from(["microbatches", "alternating"]),
        "groups": st.sampled_from([1, 2]),
    }
).filter(lambda row: row["estimator"] == "symmetric" or row["source"] == "alternating")
powers_of_two = st.sampled_from([2.0**-7, 0.5, 2.0, 2.0**5])


@examples(50)
@given(gradients=moderate(), a=powers_of_two, b=powers_of_two, configuration=configurations)
def test_powers_of_two_of_the_objective_and_the_parameters_change_no_bit(gradients, a, b, configuration):
    plain = run(gradients, **configuration)
    scaled = run(gradients, f_scale=a, x_scale=b, lr=LR / a * b**2, **configuration)
    np.testing.assert_array_equal(scaled, plain)


# What is one tensor, one group, one order -----------------------------------------------------------------------------


@every_way
@examples(16)
@given(
    gradients=moderate(),
    cuts=st.sets(st.integers(1, D - 1)).map(sorted),
    groups=st.integers(1, 3),
    momentum=st.sampled_from([0.0, 0.9]),
    alpha=st.sampled_from([None, 1.0]),
)
def test_cutting_into_tensors_and_groups_of_the_same_lr_changes_nothing_under_global(
    source, estimator, gradients, cuts, groups, momentum, alpha
):
    options = {"estimator": estimator, "source": source, "momentum": momentum, "alpha": alpha, "weight_decay": 0.01}
    close(run(gradients, cuts=cuts, groups=groups, **options), run(gradients, cuts=(), **options), 1e-12)


def test_a_tensor_of_one_number_is_a_coordinate_also_if_it_was_away_when_momentum_began():
    def trained(granularity):
        x, y = (torch.nn.Parameter(torch.tensor([v], dtype=torch.float64)) for v in (1.0, -2.0))
        opt = SGDOL([x, y], lr=6.0, momentum=0.0, granularity=granularity, epoch=2, alpha=0.01)
        rng = np.random.default_rng(0)
        for step in range(9):
            if step == 2:
                opt.param_groups[0]["momentum"] = 0.9
            here = [x] if step in (2, 4) else [x, y]
            one_step(opt, (sum(((p + rng.normal()) ** 2).sum() / 4 for p in here) for _ in range(2)))
        return [x.item(), y.item(), opt.state[y]["learner.h_sum"].item()]

    assert trained("coordinate") == pytest.approx(trained("tensor"), rel=1e-12)
