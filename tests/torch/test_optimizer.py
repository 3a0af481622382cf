"""The optimizer as its users meet it: arguments, loops, precision, saving and loading, misuse."""

import copy
import gc
import io
import math
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from closures import closure_of, one_step
from pairs import pairwise

from sgdol import SGDOL, reference, theory
from sgdol.learners import FTRL, OnlineGradientDescent, OptimisticFTRL

pytestmark = pytest.mark.filterwarnings(
    "ignore:SGDOL was given the same gradient twice",  # numbers that are easy to follow
    "ignore:SGDOL got one backward",  # pairs are among what is tested
)

GRANULARITIES = ["global", "group", "tensor", "coordinate"]

granularities = pytest.mark.parametrize("granularity", GRANULARITIES)
SOURCES = [("symmetric", 1), ("symmetric", 2), ("paper", 1)]
"""Estimators, with one backward per step, which both know, and with two."""


def network(dtype=torch.float64, seed=0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).to(dtype)


class Batches:
    """Fresh random batches, the same for everybody who asks with the same seed."""

    def __init__(self, dtype=torch.float64, seed=1):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def __next__(self) -> torch.Tensor:
        return torch.randn(8, 4, generator=self.generator, dtype=torch.float64).to(self.dtype)


def objective(net, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - x[:, :2].sin()).square().mean()


def train(net, opt, batches, updates: int, k: int = 2) -> list[torch.Tensor]:
    for _ in range(updates):
        one_step(opt, (objective(net, next(batches)) / k for _ in range(k)))
    return [p.detach().clone() for p in net.parameters()]


def alternate(net, opt, batches, steps: int) -> list[torch.Tensor]:
    for _ in range(steps):
        one_step(opt, [objective(net, next(batches))])
    return [p.detach().clone() for p in net.parameters()]


def scalar(value=1.0, dtype=torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([value], dtype=dtype))


def feed(opt, p, *gradients) -> None:
    for g in gradients:
        p.grad = torch.as_tensor(g, dtype=p.dtype).reshape(p.shape)
        opt.step()


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({}, ValueError, "lr or smoothness is needed: got neither"),
        ({"lr": 0.1, "smoothness": 10.0}, ValueError, "lr or smoothness, not both.*0.1.*10.0"),
        ({"lr": 0.0}, ValueError, r"lr must be positive and finite, at most 1e\+200, got 0.0"),
        ({"lr": -0.5}, ValueError, r"lr must be positive and finite, at most 1e\+200, got -0.5"),
        ({"lr": math.nan}, ValueError, r"lr must be positive and finite, at most 1e\+200, got nan"),
        ({"lr": math.inf}, ValueError, r"lr must be positive and finite, at most 1e\+200, got inf"),
        ({"lr": torch.tensor([0.1, 0.2])}, ValueError, "Tensor lr must be 1-element.*2,"),
        ({"smoothness": 0.0}, ValueError, "smoothness must be positive and finite, got 0.0"),
        ({"smoothness": math.inf}, ValueError, "smoothness must be positive and finite, got inf"),
        ({"smoothness": 5e-324}, ValueError, "smoothness must be larger, the base rate is 1 over it, got 5e-324"),
        ({"lr": 0.1, "alpha": 0.0}, ValueError, "alpha must be None, or positive and finite, got 0.0"),
        ({"lr": 0.1, "alpha": math.nan}, ValueError, "alpha must be None, or positive and finite, got nan"),
        ({"lr": 0.1, "granularity": "layer"}, ValueError, "granularity must be one of 'global', .*, got 'layer'"),
        ({"lr": 0.1, "estimator": "half"}, ValueError, "estimator must be one of 'symmetric', 'paper', got 'half'"),
        ({"lr": 0.1, "momentum": 1.0}, ValueError, "momentum must be at least 0 and less than 1, got 1.0"),
        ({"lr": 0.1, "weight_decay": -1.0}, ValueError, "weight_decay must be at least 0 and finite, .*, got -1.0"),
        ({"lr": 0.1, "kappa": 0.0}, ValueError, "kappa must be None, or positive and finite, got 0.0"),
        (
            {"lr": 0.1, "alpha": 2.0, "kappa": 3.0},
            ValueError,
            "give alpha or kappa, not both: got alpha=2.0 and kappa=3.0",
        ),
        (
            {"lr": 0.1, "epoch": 1},
            ValueError,
            "epoch must be a whole number of updates, .*, or None, got 1",
        ),
        (
            {"lr": 0.1, "epoch": 4.0},
            ValueError,
            "epoch must be a whole number of updates, .*, or None, got 4.0",
        ),
        ({"lr": 0.1, "epoch": 4, "estimator": "paper"}, ValueError, 'epoch corrects estimator="symmetric", got'),
        ({"lr": 0.1, "bias_correction": 1}, TypeError, "bias_correction must be True or False, got 1"),
        ({"lr": 0.1, "statistics": "raw"}, ValueError, "statistics must be one of 'direction', 'gradient', got 'raw'"),
        ({"lr": 0.1, "averaging": -1}, ValueError, "averaging must be None, or finite and at least 0, got -1"),
        ({"lr": 0.1, "averaging": True}, TypeError, "averaging must be a number, .*, got True"),
        ({"lr": 0.1, "learner": object()}, TypeError, "learner must be an object with initial, predict and observe"),
    ],
)
def test_bad_arguments_are_named_with_their_value_and_what_is_allowed(options, error, sentence):
    with pytest.raises(error, match=sentence):
        SGDOL([scalar()], **options)


def test_no_parameters_are_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        SGDOL([], lr=0.1)


def test_a_single_tensor_is_refused():
    with pytest.raises(TypeError, match="iterable"):
        SGDOL(scalar(), lr=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lr_is_that_of_sgd(momentum):
    """Step by step, as long as the learner leaves s at 1; the step size that is shown is lr itself."""
    a, b = scalar(), scalar()
    ours, theirs = SGDOL([a], lr=0.03, momentum=momentum), torch.optim.SGD([b], lr=0.03, momentum=momentum)
    generator = torch.Generator().manual_seed(0)
    for t in range(20):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.03 / (1 + t)
        for noise in torch.randn(2, generator=generator).tolist():
            (a * a / 2 + 0.1 * noise * a).div(2).backward()
            (b * b / 2 + 0.1 * noise * b).div(2).backward()
        for opt in (ours, theirs):
            opt.step()
            opt.zero_grad()
        assert float(ours.param_groups[0]["step_size"]) == ours.param_groups[0]["lr"]
        assert a.item() == pytest.approx(b.item(), rel=1e-14)


def test_a_cycle_of_rate_and_momentum_is_that_of_sgd():
    """OneCycleLR moves both. Of a momentum that falls, SGD keeps the sum and SGDOL the average: 3 % of the way."""
    found = []
    for kind in (SGDOL, torch.optim.SGD):
        x = scalar()
        opt = kind([x], lr=0.001, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.002, total_steps=100)
        for _ in range(90):
            one_step(opt, ((x + 0.1 * sign * x).div(2) for sign in (-1, 1)))
            schedule.step()
        found.append(x.item() - 1)
    assert found[0] == pytest.approx(found[1], rel=0.03)
    assert found[0] < -0.5


def test_a_weight_decay_takes_away_what_that_of_sgd_does():
    """Where there is no gradient, in 200 steps: the factor is exp(-200 lr weight_decay/(1 - momentum)) for both."""
    left = []
    for kind in (SGDOL, torch.optim.SGD):
        x = scalar()
        opt = kind([x], lr=0.01, momentum=0.9, weight_decay=0.1)
        for _ in range(200):
            one_step(opt, (0.0 * x for _ in range(2)))
        left.append(math.log(x.item()))
    assert left[0] == pytest.approx(-2.0, rel=0.01)
    assert left[1] == pytest.approx(-2.0, rel=0.06)  # its momentum begins at 0


def test_smoothness_is_the_reciprocal_of_the_base_rate_whatever_the_momentum():
    for momentum in (0.0, 0.5):
        (group,) = SGDOL([scalar()], smoothness=4.0, momentum=momentum).param_groups
        assert group["lr"] / (1 - momentum) == 0.25
    opt = SGDOL([{"params": [scalar()]}, {"params": [scalar()], "momentum": 0.5}], smoothness=4.0, momentum=0.0)
    assert [group["lr"] for group in opt.param_groups] == [0.25, 0.125]


def test_a_momentum_of_one_is_refused_also_when_a_group_gets_it_later():
    x = scalar()
    opt = SGDOL([x], lr=0.1)
    opt.param_groups[0]["momentum"] = 1.0
    feed(opt, x, 1.0)
    with pytest.raises(ValueError, match=r"momentum must be at least 0 and less than 1, parameter groups have \[1.0\]"):
        feed(opt, x, 1.0)


def test_every_group_may_bring_its_own_rate():
    a, b = scalar(), scalar()
    opt = SGDOL([{"params": [a], "lr": 0.1}, {"params": [b], "smoothness": 4.0, "momentum": 0.5}])
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.125]


# What an update does --------------------------------------------------------------------------------------------------


def test_groups_share_the_multiplier_and_keep_their_rates():
    a, b = scalar(0.0), scalar(0.0)
    opt = SGDOL([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.4}], alpha=1.0, learner=FTRL())
    for g1, g2 in [(1.0, 0.5), (2.0, -1.0)]:
        for g in (g1, g2):
            a.grad, b.grad = torch.full_like(a, g), torch.full_like(b, g)
            opt.step()
    assert (b / a).item() == pytest.approx(4.0)
    first, second = (float(group["step_size"]) for group in opt.param_groups)
    assert second == pytest.approx(4 * first)
    assert 0 < first < 0.1


def test_weight_decay_is_decoupled_and_scaled_by_the_learned_step_size():
    x = scalar(2.0)
    opt = SGDOL([x], lr=0.5, alpha=1.0, weight_decay=0.1, momentum=0.0, learner=FTRL())
    feed(opt, x, 1.0, 0.0)
    after_one = 2.0 - 0.5 * (0.5 + 0.1 * 2.0)
    assert x.item() == pytest.approx(after_one)
    s = 1.0 / 1.25  # (alpha + <g, g'>) / (alpha + mean^2)
    feed(opt, x, 1.0, 1.0)
    assert x.item() == pytest.approx(after_one - 0.5 * s * (1.0 + 0.1 * after_one))


@granularities
@pytest.mark.parametrize(("estimator", "k"), SOURCES)
def test_momentum_follows_its_definition(granularity, estimator, k):
    """m_t = beta m_{t-1} + (1 - beta) g, d = m_t / (1 - beta^t), u without the same-sample product, in plain numpy."""
    beta, lr, alpha, d = 0.8, 0.25, 0.7, 3
    rng = np.random.default_rng(3)
    gradients = rng.normal(size=(12, 2, d)) + 1
    blocks = {"global": [[0, 1, 2]], "group": [[0, 1], [2]], "tensor": [[0, 1], [2]], "coordinate": [[0], [1], [2]]}
    x, m = np.zeros(d), np.zeros(d)
    history = {tuple(b): ([], []) for b in blocks[granularity]}
    for t, (g1, g2) in enumerate(gradients, start=1):
        g = g1 if estimator == "paper" else (g1 + g2) / 2
        correction = 1 - beta**t
        u_each = (beta * m * g + (1 - beta) * g1 * g2) / correction
        m = beta * m + (1 - beta) * g
        for b, (us, ns) in history.items():
            rows = list(b)
            x[rows] -= reference.step_size(us, ns, smoothness=(1 - beta) / lr, alpha=alpha) * m[rows] / correction
            us.append(u_each[rows].sum())
            ns.append(((m[rows] / correction) ** 2).sum())
    a, b = torch.nn.Parameter(torch.zeros(2).double()), torch.nn.Parameter(torch.zeros(1).double())
    opt = SGDOL(
        [{"params": [a]}, {"params": [b]}],
        lr=lr,
        alpha=alpha,
        momentum=beta,
        estimator=estimator,
        granularity=granularity,
        learner=FTRL(),
    )
    for pair in torch.tensor(gradients):
        for g in pair:
            ((a * g[:2]).sum() / k + (b * g[2:]).sum() / k).backward()
            if k == 1:
                opt.step()
                opt.zero_grad()
        if k == 2:
            opt.step()
            opt.zero_grad()
    np.testing.assert_allclose(torch.cat([a, b]).detach().numpy(), x, rtol=1e-12)


@pytest.mark.parametrize("granularity", ["group", "tensor", "coordinate"])
def test_momentum_of_a_group_that_takes_no_part_does_not_age(granularity):
    a, b, alone = scalar(), scalar(), scalar()
    options = {"lr": 0.1, "alpha": 0.5, "granularity": granularity, "momentum": 0.9}
    both, other = SGDOL([{"params": [a]}, {"params": [b]}], **options), SGDOL([alone], **options)
    generator = torch.Generator().manual_seed(0)
    for update in range(12):
        for g, h in torch.randn(2, 2, generator=generator, dtype=torch.float64) + 1:
            if update % 4:  # b is there in a quarter of the updates
                (g * a / 2).backward()
            else:
                ((g * a + h * b) / 2).backward()
                (h * alone / 2).backward()
        for opt in (both, other):
            opt.step()
            opt.zero_grad()
    assert alone.item() != 1.0
    assert b.item() == pytest.approx(alone.item(), rel=1e-12)


def test_the_first_move_of_a_group_that_joins_late_is_not_shrunk_by_momentum():
    a, b = scalar(), scalar()
    opt = SGDOL([{"params": [a]}, {"params": [b]}], smoothness=10.0, momentum=0.9, bias_correction=True)
    for update in range(11):
        for _ in range(2):
            ((a + b if update == 10 else a) / 2).backward()
        opt.step()
        opt.zero_grad()
    assert b.item() == pytest.approx(1 - 0.1)


@granularities
@pytest.mark.parametrize("estimator", ["symmetric", "paper"])
def test_momentum_that_a_scheduler_switches_off_and_on_is_not_resurrected(granularity, estimator):
    """The definition, for a scalar: the weights of the gradients in m sum to w, whichever way beta goes."""
    betas = [0.9] * 4 + [0.0] * 4 + [0.9] * 4
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(12, 2, generator=generator, dtype=torch.float64) * 0.3
    pairs += torch.tensor([1.0] * 4 + [-1.0] * 8, dtype=torch.float64)[:, None]
    lr, alpha, x, m, w, u_sum, n_sum = 0.1, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0
    p = scalar(x)
    opt = SGDOL([p], lr=lr, alpha=alpha, granularity=granularity, estimator=estimator, momentum=0.9, learner=FTRL())
    for beta, (g1, g2) in zip(betas, pairs.tolist(), strict=True):
        g = g1 if estimator == "paper" else (g1 + g2) / 2
        w = beta * w + 1 - beta
        u = (beta * m * g + (1 - beta) * g1 * g2) / w
        m = beta * m + (1 - beta) * g
        x -= lr / (1 - beta) * min(max((alpha + u_sum) / (alpha + n_sum), 0), 2) * m / w
        u_sum, n_sum = u_sum + u, n_sum + (m / w) ** 2
        opt.param_groups[0]["momentum"] = beta
        feed(opt, p, g1, g2)
        assert p.item() == pytest.approx(x, rel=1e-12)


def test_groups_may_differ_in_momentum():
    a, b, c = scalar(0.0), scalar(0.0), scalar(0.0)
    both = SGDOL([{"params": [a]}, {"params": [b], "momentum": 0.0}], lr=0.1, granularity="group", alpha=1.0)
    alone = SGDOL([c], lr=0.1, momentum=0.9, alpha=1.0)
    for g in (1.0, 0.5, -1.0, 2.0, 0.1, 0.4):
        a.grad, b.grad, c.grad = (torch.full_like(p, g) for p in (a, b, c))
        both.step()
        alone.step()
    assert a.item() == c.item()
    assert a.item() != b.item()


@pytest.mark.parametrize("learner", [OptimisticFTRL(), OnlineGradientDescent(), FTRL(strength=10.0, center=0.5)])
@granularities
def test_any_learner_chooses_the_multiplier(learner, granularity):
    gradients = np.random.default_rng(0).normal(size=(10, 2, 3)) + 0.5
    x, state = np.zeros(3), learner.initial(np.zeros(3) if granularity == "coordinate" else 0.0)
    for g1, g2 in gradients:
        d, u = (g1 + g2) / 2, g1 * g2
        n = d * d
        if granularity != "coordinate":
            u, n = u.sum(), n.sum()
        s = learner.predict(state, 2.0)
        x -= 0.1 * s * d
        state = learner.observe(state, s, u, n, 2.0)
    p = torch.nn.Parameter(torch.zeros(3).double())
    opt = SGDOL([p], lr=0.1, alpha=2.0, momentum=0.0, learner=learner, granularity=granularity)
    feed(opt, p, *gradients.reshape(-1, 3))
    np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-12)


def test_alpha_none_is_the_first_squared_gradient_that_is_not_zero():
    x = scalar(0.0)
    opt = SGDOL([x], lr=1.0, momentum=0.0, learner=FTRL())
    feed(opt, x, 0.0, 0.0)
    assert x.item() == 0
    feed(opt, x, 3.0, 1.0)  # d = 2, so alpha = 4, u = 3, n = 4
    assert x.item() == -2.0
    feed(opt, x, 1.0, 1.0)
    assert float(opt.param_groups[0]["step_size"]) == pytest.approx((4 + 3) / (4 + 4))


def test_a_group_that_joins_later_gets_the_share_of_alpha_that_its_size_had():
    a, b = torch.nn.Parameter(torch.zeros(4).double()), torch.nn.Parameter(torch.zeros(2).double())
    opt = SGDOL([a], lr=1.0, granularity="group", momentum=0.0, learner=FTRL())
    feed(opt, a, [1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0])  # d = 2 everywhere: alpha = 16, 4 per coordinate
    opt.add_param_group({"params": [b]})
    for g in (2.0, -1.0):
        a.grad, b.grad = torch.full_like(a, g), torch.full_like(b, g)
        opt.step()
    for g in (1.0, 1.0):
        b.grad = torch.full_like(b, g)
        opt.step()
    u, n = 2 * (2.0 * -1.0), 2 * 0.5**2  # of its only update before
    assert float(opt.param_groups[1]["step_size"]) == pytest.approx((8.0 + u) / (8.0 + n))


@pairwise(metric=["rms", "adagrad"], granularity=["tensor", "coordinate"], skips=[False, True], k=[1, 2])
def test_a_tensor_that_joins_later_is_measured_by_its_own_gradient_over_those_of_the_past(
    metric, granularity, skips, k
):
    """Its first D is sqrt((v / m + 1e-4) / (1 + 1e-4)), v its own mean square, m that of the past; eta is lr.

    That of the other, whose past is all there is, is 1.
    """
    x, late = scalar(0.0), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = SGDOL([x, late], lr=0.1, momentum=0.0, learner=FTRL(), granularity=granularity, metric=metric)
    for g in (2.0, 4.0):  # m = 9, so that alpha of x, of three numbers, is 3
        (x * g / 2).sum().backward()
    opt.step()
    opt.zero_grad()
    pairs = [([math.nan, 1.0], [1.0, 1.0])] if skips else []
    for pair in [*pairs, ([9.0, -2.0], [7.0, -2.0])]:
        for g in torch.tensor(pair, dtype=torch.float64):
            ((late @ g + x.sum()) / k).backward()
            if k == 1:
                opt.step()
                opt.zero_grad()
        if k == 2:
            opt.step()
            opt.zero_grad()
    D = math.sqrt(((64 + 4) / 2 / 9 + 1e-4) / (1 + 1e-4))
    assert late.tolist() == pytest.approx([-0.1 * 8 / D, 0.1 * 2 / D], rel=1e-12)
    assert x.item() == pytest.approx(-0.1 * 3 - 0.1 * (3 + 2 * 4) / (3 + 9), rel=1e-12)


# Where gradients come from --------------------------------------------------------------------------------------------


def test_one_backward_per_step_holds_the_first_and_updates_at_the_second():
    net = network()
    opt, batches = SGDOL(net.parameters(), lr=0.1), Batches()
    before = [p.detach().clone() for p in net.parameters()]
    after = alternate(net, opt, batches, 1)
    assert opt.pending
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
    after = alternate(net, opt, batches, 1)
    assert not opt.pending
    assert not any(torch.equal(p, q) for p, q in zip(before, after, strict=True))


@pytest.mark.parametrize("zero", [True, False])
def test_a_closure_is_called_once_and_its_gradient_held_if_it_is_the_only_one(zero):
    """As torch.optim calls it: a closure evaluates the batch of the moment, however often it is called."""
    one, other = network(), network()
    a, b = SGDOL(one.parameters(), lr=0.1), SGDOL(other.parameters(), lr=0.1)
    batches, calls = Batches(), []

    def closure():
        if zero:
            a.zero_grad()
        value = objective(one, next(batches))
        value.backward()
        calls.append(value)
        return value

    for t in range(6):
        assert a.step(closure) is calls[-1]
        assert len(calls) == t + 1
        assert a.pending == (t % 2 == 0)
        a.zero_grad()
    expected = alternate(other, b, Batches(), 6)
    for p, q in zip(one.parameters(), expected, strict=True):
        assert torch.equal(p.detach(), q)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_closure_is_called_once_if_it_has_two_backward_passes_or_completes_a_pair(passes):
    net = network()
    opt, batches, calls = SGDOL(net.parameters(), lr=0.1), Batches(), []
    if passes == 1:
        alternate(net, opt, batches, 1)

    def losses():
        calls.append(None)
        return [objective(net, next(batches)) / passes for _ in range(passes)]

    opt.step(closure_of(opt, losses))
    assert len(calls) == 1
    assert not opt.pending
    assert opt.diagnostics()["updates"] == 1


@pairwise(granularity=GRANULARITIES, unscale=[False, True], k=[1, 2])
def test_grad_scaler_changes_nothing(granularity, unscale, k):
    plain, scaled = network(torch.float32), network(torch.float32)
    a = SGDOL(plain.parameters(), lr=0.1, granularity=granularity)
    b = SGDOL(scaled.parameters(), lr=0.1, granularity=granularity)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    batches = Batches(torch.float32)
    for step in range(8):
        inputs = [next(batches) for _ in range(k)]
        for x in inputs:
            (objective(plain, x) / k).backward()
            scaler.scale(objective(scaled, x) / k).backward()
        if step == 4:  # an overflow: the scaler skips the step and lowers its scale
            next(iter(scaled.parameters())).grad[0, 0] = torch.inf
        else:
            a.step()
        if unscale:
            scaler.unscale_(b)
        scaler.step(b)
        scaler.update()
        a.zero_grad()
        scaled.zero_grad()  # the module's, which the optimizer does not see
    assert scaler.get_scale() != 1024.0
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_parameters_without_a_gradient_stay_where_they_are():
    used, unused = scalar(), scalar()
    opt = SGDOL([used, unused], lr=0.1, weight_decay=0.1)
    feed(opt, used, 1.0, 2.0)
    assert unused.item() == 1.0
    assert used.item() != 1.0


def test_sparse_gradients_are_refused_with_what_to_do():
    table = torch.nn.Embedding(5, 2, sparse=True)
    opt = SGDOL(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients: parameter 0 of shape \(5, 2\).*sparse=False"):
        opt.step()


def test_a_pair_whose_shapes_differ_is_refused():
    x = torch.nn.Parameter(torch.zeros(3))
    opt = SGDOL([x], lr=0.1, momentum=0.0)
    feed(opt, x, [1.0, 2.0, 3.0])
    x.data = torch.zeros(2)
    x.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"parameter 0 is \(2,\) now, the gradient that is held \(3,\)"):
        opt.step()
    x.data = torch.zeros(3)
    feed(opt, x, [1.0, 2.0, 5.0])  # nothing was lost
    torch.testing.assert_close(x.detach(), torch.tensor([-0.1, -0.2, -0.4]))


# Noise, bad and absent ------------------------------------------------------------------------------------------------


@pairwise(
    granularity=GRANULARITIES,
    source=SOURCES,
    on_device=[False, True],
    bad=[math.nan, math.inf],
    member=[0, 1],
)
def test_a_gradient_that_is_not_finite_skips_the_update(granularity, source, on_device, bad, member):
    estimator, k = source
    one, other = network(), network()
    options = {"lr": 0.1, "granularity": granularity, "estimator": estimator, "momentum": 0.5, "weight_decay": 0.01}
    a, b = SGDOL(one.parameters(), **options), SGDOL(other.parameters(), **options)
    a._host = b._host = not on_device
    first, second = Batches(), Batches()
    if k == 2:
        train(one, a, first, 3), train(other, b, second, 3)
    else:
        alternate(one, a, first, 6), alternate(other, b, second, 6)
    for i in range(2):
        (objective(one, next(Batches(seed=99 + i))) * (bad if i == member else 1.0)).backward()
        if k == 1:
            a.step()
            a.zero_grad()
    if k == 2:
        a.step()
        a.zero_grad()
    assert not a.pending
    assert a.diagnostics()["skipped"] == 1
    assert a.diagnostics()["updates"] == 3
    run = train if k == 2 else alternate
    for p, q in zip(run(one, a, first, 4), run(other, b, second, 4), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)


@pairwise(
    granularity=GRANULARITIES,
    source=SOURCES,
    metric=["euclidean", "rms"],
    dtype=[torch.float64, torch.float32, torch.bfloat16],
)
def test_deciding_on_the_device_gives_the_same_numbers(granularity, source, metric, dtype):
    results, (estimator, k) = [], source
    options = {"lr": 0.1, "granularity": granularity, "estimator": estimator, "metric": metric}
    for host in (True, False):
        net = network(dtype)
        opt = SGDOL(net.parameters(), **options, weight_decay=0.1, averaging=8)
        opt._host = host  # False: torch.where decides, as on an accelerator
        run = train if k == 2 else alternate
        iterates = run(net, opt, Batches(dtype), 6)
        with opt.averaged():
            results.append([*iterates, *(p.detach().clone() for p in net.parameters())])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(results[0], results[1], rtol=8 * eps, atol=8 * eps)


def test_the_same_batch_twice_warns_once_and_points_at_the_loop():
    net = network()
    opt, x = SGDOL(net.parameters(), lr=0.1), next(Batches())
    torch.optim.lr_scheduler.StepLR(opt, step_size=1)  # schedulers wrap step(), which must not hide the caller
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for _ in range(2):
                objective(net, x).backward()
            opt.step()
            opt.zero_grad()
    assert len(caught) == 1
    assert "the same gradient twice" in str(caught[0].message)
    assert "fresh batch" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_the_same_gradient_twice_has_no_noise_to_the_last_bit():
    """In a pair of float32 vectors so long that two ways to sum their squares would differ."""
    x, g = (
        torch.nn.Parameter(torch.zeros(1_000_000)),
        torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)),
    )
    opt = SGDOL([x], lr=0.1)
    one_step(opt, [(x * g).sum()])
    (x * g).sum().backward()
    with pytest.warns(UserWarning, match="the same gradient twice"):
        opt.step()
    assert opt.diagnostics()["noise_scale"] == 0


# Types ----------------------------------------------------------------------------------------------------------------


@pairwise(granularity=GRANULARITIES, dtype=[torch.bfloat16, torch.float16], k=[1, 2])
def test_half_precision_follows_full_precision(granularity, dtype, k):
    """Sums are kept in float32 or wider; what remains is the rounding of parameters and gradients themselves."""
    nets = network(torch.float32), network(dtype)
    results = []
    for net, kind in zip(nets, (torch.float32, dtype), strict=True):
        opt = SGDOL(net.parameters(), lr=0.1, granularity=granularity)
        run = train if k == 2 else alternate
        results.append(run(net, opt, Batches(kind), 10))
        for state in [*opt.state.values(), *opt.param_groups]:
            for key, value in state.items():
                if key.startswith("learner.") and isinstance(value, torch.Tensor):
                    assert value.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close([p.float() for p in results[1]], results[0], rtol=0.05, atol=5 * torch.finfo(dtype).eps)


def test_mixed_types_zero_dimensional_and_empty_tensors_in_one_optimizer():
    params = [
        torch.nn.Parameter(torch.ones((), dtype=torch.float64)),
        torch.nn.Parameter(torch.ones(0, 3)),
        torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)),
    ]
    for granularity in GRANULARITIES:
        opt = SGDOL(params, lr=0.01, granularity=granularity)
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            opt.step()
        assert opt.diagnostics()["updates"] == 2
    assert all(torch.isfinite(torch.view_as_real(p) if p.is_complex() else p).all() for p in params)


# Ecosystem ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_move_lr(tensor_lr):
    x = scalar(0.0)
    opt = SGDOL([x], lr=torch.tensor(0.5) if tensor_lr else 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    seen = []
    for _ in range(3):
        feed(opt, x, 1.0, 1.0)
        seen.append(float(opt.param_groups[0]["step_size"]))
        scheduler.step()
    assert seen == pytest.approx([0.5, 0.25, 0.125])


def test_one_cycle_moves_lr_and_momentum():
    net = network()
    opt = SGDOL(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=10)
    batches, before = Batches(), objective(net, next(Batches(seed=5))).item()
    for _ in range(9):
        train(net, opt, batches, 1)
        scheduler.step()
    assert opt.param_groups[0]["momentum"] > 0.9
    assert objective(net, next(Batches(seed=5))).item() < before


@pairwise(granularity=GRANULARITIES, source=SOURCES, metric=["euclidean", "rms"])
def test_step_does_not_wait_for_a_device(granularity, source, metric):
    """The meta device has no numbers at all: whoever asks it for one gets an error."""
    estimator, k = source
    net = torch.nn.Sequential(network(torch.float32), torch.nn.Linear(2, 10_000)).to("meta")  # small tensors and large
    options = {"granularity": granularity, "estimator": estimator, "metric": metric, "averaging": 8}
    opt = SGDOL(net.parameters(), lr=0.1, weight_decay=0.1, **options)
    for _ in range(4):
        for _ in range(k):
            net(torch.zeros(8, 4, device="meta")).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
    assert opt.param_groups[0]["step_size"].device.type == "meta"


def test_nothing_is_printed_or_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    net = network()
    train(net, SGDOL(net.parameters(), lr=0.1), Batches(), 3)
    out = capfd.readouterr()
    assert out.out == ""
    assert out.err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("k", [1, 2])
def test_compiled_steps_equal_plain_ones_and_never_recompile(k):
    torch._dynamo.reset()
    one, other = network(), network()
    a, b = SGDOL(one.parameters(), lr=0.1), SGDOL(other.parameters(), lr=0.1)
    compiled = torch.compile(b.step, backend="eager")
    first, second = Batches(), Batches()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(6):
            for net, batches in ((one, first), (other, second)):
                for _ in range(k):
                    (objective(net, next(batches)) / k).backward()
            for group in [*a.param_groups, *b.param_groups]:
                group["lr"] = 0.1 / (step + 1)
            a.step(), compiled()
            a.zero_grad(), b.zero_grad()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_compiled_model_is_seen_as_the_plain_one_is():
    torch._dynamo.reset()
    one, other = network(), network()
    a, b = SGDOL(one.parameters(), lr=0.1), SGDOL(other.parameters(), lr=0.1)
    expected = train(one, a, Batches(), 3)
    found = train(torch.compile(other, backend="aot_eager"), b, Batches(), 3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert b.diagnostics()["gradients"] == 2


# Saving and loading ---------------------------------------------------------------------------------------------------


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pairwise(
    granularity=GRANULARITIES,
    estimator=["symmetric", "paper"],
    dtype=[torch.float64, torch.bfloat16],
    steps=[4, 5],
    way=["state_dict", "pickle", "deepcopy"],
)
def test_resuming_is_exact_also_in_the_middle_of_a_pair(granularity, estimator, dtype, steps, way):
    net = network(dtype)
    options = {"lr": 0.1, "granularity": granularity, "estimator": estimator, "momentum": 0.9}
    opt, batches = SGDOL(net.parameters(), **options), Batches(dtype)
    alternate(net, opt, batches, steps)
    if way == "state_dict":
        twin = copy.deepcopy(net)
        resumed = SGDOL(twin.parameters(), **options)
        resumed.load_state_dict(through_a_file(opt.state_dict()))
    else:
        twin, resumed = pickle.loads(pickle.dumps((net, opt))) if way == "pickle" else copy.deepcopy((net, opt))
    assert resumed.pending == opt.pending
    more = copy.deepcopy(batches.generator.get_state())
    expected = alternate(net, opt, batches, 5)
    if estimator == "symmetric":
        expected += train(net, opt, batches, 2)
    batches.generator.set_state(more)
    found = alternate(twin, resumed, batches, 5)
    if estimator == "symmetric":
        found += train(twin, resumed, batches, 2)
    assert all(torch.equal(p, q) for p, q in zip(expected, found, strict=True))
    assert resumed.diagnostics() == opt.diagnostics()


def test_a_loaded_state_shares_no_memory_with_what_was_loaded():
    net = network()
    opt = SGDOL(net.parameters(), lr=0.1, granularity="coordinate", momentum=0.9)
    train(net, opt, Batches(), 2)
    saved = opt.state_dict()
    kept = pickle.dumps(saved)
    twin = copy.deepcopy(net)
    resumed = SGDOL(twin.parameters(), lr=0.1, granularity="coordinate", momentum=0.9)
    resumed.load_state_dict(saved)
    train(twin, resumed, Batches(), 2)
    assert pickle.dumps(saved) == kept


@pytest.mark.parametrize(
    ("name", "saved", "here"),
    [
        ("granularity", "tensor", "global"),
        ("estimator", "paper", "symmetric"),
        ("learner", OptimisticFTRL(), None),
        ("alpha", 10.0, None),
        ("kappa", None, 1.0),
        ("bias_correction", True, None),
        ("metric", "rms", "euclidean"),
        ("statistics", "gradient", "direction"),
        ("averaging", 8, None),
    ],
)
def test_the_state_of_another_configuration_is_refused(name, saved, here):
    one, other = network(), network()
    state = SGDOL(one.parameters(), lr=0.1, **{name: saved}).state_dict()
    opt = SGDOL(other.parameters(), lr=0.1, **{name: here})
    with pytest.raises(ValueError, match=f"state_dict was saved with {name}=.*construct it with the same {name}"):
        opt.load_state_dict(state)


def test_add_param_group_in_the_middle_of_a_pair():
    a, b = scalar(), scalar()
    opt = SGDOL([a], lr=0.1, momentum=0.0)
    feed(opt, a, 1.0)
    opt.add_param_group({"params": [b], "lr": 0.2})
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    opt.step()
    assert not opt.pending
    assert b.item() == pytest.approx(1 - 0.2 * 0.5)  # it had no first gradient, which counts as zero


# Memory and diagnostics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "vectors"),
    [
        ({"momentum": 0.0, "learner": FTRL()}, set()),
        ({}, {"momentum"}),  # which without bias correction is the direction that hindsight asks for
        ({"learner": FTRL()}, {"momentum"}),
    ],
    ids=["neither momentum nor hindsight", "defaults", "momentum alone"],
)
def test_microbatches_keep_nothing_that_grows_with_the_model_but_the_momentum(options, vectors):
    net = network()
    opt = SGDOL(net.parameters(), lr=0.1, **options)
    train(net, opt, Batches(), 3)
    assert all(set(opt.state.get(p, {})) == vectors for p in net.parameters())
    kept = [v for group in opt.param_groups for v in group.values() if isinstance(v, torch.Tensor)]
    assert max(v.numel() for v in kept) < 10


def test_a_recorder_keeps_a_few_numbers_of_a_large_tensor():
    x = torch.nn.Parameter(torch.zeros(20_000))
    opt = SGDOL([x], lr=0.1)
    for seed in range(3):
        (x * torch.randn(20_000, generator=torch.Generator().manual_seed(seed))).sum().backward()
    kept = [v for field in vars(opt._passes).values() for v in (field if isinstance(field, list) else [field])]
    assert all(v.numel() < 100 for v in kept if isinstance(v, torch.Tensor) and v is not x)


def test_the_optimizer_dies_with_its_last_reference_and_takes_its_hooks_along():
    net = network()
    opt = SGDOL(net.parameters(), lr=0.1)
    train(net, opt, Batches(), 1)
    gone, hooks = weakref.ref(opt), opt._passes._taps[0]._handle.hooks_dict_ref
    assert len(hooks()) == 1
    del opt
    gc.collect()
    assert gone() is None
    assert not hooks()


def test_diagnostics_are_those_of_the_run():
    gradients = np.random.default_rng(0).normal(size=(30, 2, 3)) + 0.3
    run = reference.replay(gradients, np.zeros(3), smoothness=4.0, alpha=1.0, estimator="symmetric")
    p = torch.nn.Parameter(torch.zeros(3).double())
    opt = SGDOL([p], smoothness=4.0, alpha=1.0, momentum=0.0, learner=FTRL())
    feed(opt, p, *gradients.reshape(-1, 3))
    found = opt.diagnostics()
    u, n = run.u[:, 0], run.n[:, 0]
    assert found["updates"] == 30
    assert found["step_size"] == [pytest.approx(run.step_sizes[-1])]
    assert found["regret"] == pytest.approx(theory.regret(run.step_sizes, u, n, 4.0))
    assert found["cumulative_surrogate"] == pytest.approx(theory.regret(run.step_sizes, u, n, 4.0, against=0.0))
    weights = 0.99 ** np.arange(30)[::-1]
    signal, length = (weights * u).sum(), (weights * n).sum()
    assert found["signal_to_noise"] == pytest.approx(signal / (length - signal))
    assert found["noise_scale"] == pytest.approx(2 * (length - signal) / signal)


def test_the_step_size_falls_as_gradients_get_noisy():
    """Gradients of ||x||^2/2 with noise of variance v: near the minimum nearly all of ||d||^2 is noise."""
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.full((50,), 3.0))
    opt = SGDOL([x], lr=1.0, momentum=0.0, learner=FTRL())
    seen = []
    for _ in range(300):
        one_step(opt, (((x * x).sum() / 2 + (torch.randn(50) * x).sum()).div(2) for _ in range(2)))
        seen.append(float(opt.param_groups[0]["step_size"]))
    assert seen[0] == 1.0
    assert seen[-1] < 0.4
    assert x.detach().square().mean() < 0.2  # plain SGD at lr = 1 hovers at half the noise's variance, 0.5


@pytest.mark.parametrize(("momentum", "limit"), [(0.0, 2.0), (0.9, 3.8)])
@pytest.mark.parametrize("factor", [0.25, 1.5, 5.0])
def test_the_default_step_is_lr_until_that_is_too_long(momentum, limit, factor):
    """||x||^2/2 with little noise: SGD converges below 2 (1 + beta) times its curvature's inverse.

    With a factor of 0.25 nothing is too long, but noise that the iterates hover in takes off a little.
    """
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.full((50,), 3.0, dtype=torch.float64))
    opt = SGDOL([x], lr=factor * limit, momentum=momentum)
    for _ in range(300):
        one_step(opt, (((x * x).sum() / 2 + 0.1 * (torch.randn(50) * x).sum()).div(2) for _ in range(2)))
    step_size = float(opt.param_groups[0]["step_size"])
    assert (0.9 * opt.param_groups[0]["lr"] if factor < 1 else 0) < step_size < limit
    assert x.detach().square().mean() < 0.2  # from 9
