"""SGDOL without M in PyTorch: against the reference, in other units, with parameters that come and stay away."""

import copy
import math

import numpy as np
import pytest
import torch
from dense_metric import Dense, dense
from free_problems import PROBLEMS, START, D, noisy, parameters, problem_closure, reference, train
from loops import batch, closure_of, fit, flat, network, parts_of
from pairs import pairwise
from torch import nn

from sgdol import SGDOLFree

metrics = pytest.mark.parametrize("metric", ["rms", "euclidean"])


# The reference --------------------------------------------------------------------------------------------------------


@pairwise(
    problem=list(PROBLEMS),
    metric=["rms", "euclidean", Dense()],
    k=[2, 3],
    options=[{}, {"momentum": 0.5, "averaging": 2.0}, {"weight_decay": 0.1}],
)
def test_agrees_with_the_reference(problem, metric, k, options):
    expected = reference(problem, k=k, metric=dense if metric == Dense() else metric, **options)
    found = train(problem, k=k, metric=metric, **options)
    found.agrees_with(expected, rtol=1e-11 if (metric, k) == (Dense(), 3) else 1e-12)
    np.testing.assert_allclose(found.step_sizes[:, 0], expected.step_sizes, rtol=1e-11)
    assert found.calls == expected.evaluations


@metrics
def test_the_problems_reach_every_branch(metric):
    """Else the tests here would not notice a fault in the guard, in a rejection or in the clip."""
    assert reference("ledge", metric=metric).rejections > 0
    assert reference("cliff", metric=metric).rollbacks > 0
    assert reference("burst", metric=metric).clipped > 5


def holes(k: int = 2):
    """Batches that are not finite anywhere, the first among them; and a tensor without a gradient at first."""
    shifts = torch.tensor(0.1 * np.random.default_rng(0).normal(size=(2000, k, D)))
    target = torch.tensor([1.0, -1.0, 0.5])

    def loss(x, t, part):
        product = x[0] * x[3:] + x[:3]
        value = ((product - target) ** 2).sum() / 2 + (shifts[t, part, :3] * x[:3]).sum()
        return value * (math.nan if t in (0, 3, 12) else 1.0)

    return loss


link = noisy(lambda x, t: (torch.exp(8 * x) - 3 * x).sum(), 0.01)
"""An exponential link far from its solution: a probe is too short, and the next one too long."""


@metrics
@pytest.mark.parametrize(
    ("problem", "start"),
    [(holes, [0.0, 0.4, 0.3, -0.2, 0.1, 0.6]), (link, [0.0] * 6), (link, [-3.0, -2.0, -4.0, -3.0, -2.5, -3.5])],
    ids=["holes", "link from 0", "link"],
)
def test_agrees_with_the_reference_where_little_is_usual(problem, start, metric):
    expected = reference(problem, 40, start=start, metric=metric)
    found = train(problem, 40, start=np.array(start), metric=metric)
    found.agrees_with(expected, rtol=1e-11)
    assert found.calls == expected.evaluations
    assert expected.skipped == (3 if problem is holes else 0)


# Other units ----------------------------------------------------------------------------------------------------------


@pairwise(problem=[*PROBLEMS, "rosenbrock from zero"], scales=[(2.0**20, 1.0), (2.0**-20, 2.0**20)])
def test_powers_of_two_change_nothing_but_the_scale(problem, scales):
    scale_f, scale_x = scales
    name, *from_zero = problem.split(" from ")
    start = START * (not from_zero)
    one = train(name, 40, start=start)
    other = train(name, 40, start=start, scale_f=scale_f, scale_x=scale_x)
    np.testing.assert_array_equal(other.iterates, scale_x * one.iterates)
    np.testing.assert_array_equal(other.average, scale_x * one.average)
    np.testing.assert_array_equal(other.step_sizes, one.step_sizes * scale_x**2 / scale_f)
    assert other.calls == one.calls


@pytest.mark.parametrize("metric", ["rms", "euclidean", "kronecker"])
@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.float32, -100), (torch.float32, 100), (torch.float64, -500), (torch.float64, 500), (torch.float64, 266)],
    ids=str,
)
def test_gradients_whose_squares_leave_the_range_give_the_same_run(dtype, exponent, metric):
    """1e30 and 1e-30 in float32, 1e150 and 1e-150 in float64; a loss times 1e80."""
    curvatures, runs = torch.tensor([[1.0, 3.0, 10.0], [2.0, 1.0, 5.0]], dtype=dtype), []
    for scale in (1.0, 2.0**exponent):
        x = nn.Parameter(torch.tensor([[1.0, -0.5, 0.25], [0.5, 1.0, -1.0]], dtype=dtype))
        opt = SGDOLFree([x], metric=metric)
        points = []
        for t in range(30):
            noise = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(t)).to(dtype)

            def losses(x=x, noise=noise, scale=scale):
                for part in noise:
                    yield (scale * curvatures * x * x).sum() / 4 + 0.1 * (scale * part * x).sum()

            opt.step(closure_of(opt, losses))
            points.append(x.detach().clone())
        runs.append((torch.stack(points), opt.diagnostics()["smoothness"] / scale))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert not torch.equal(runs[0][0][0], runs[0][0][-1])


# Weight decay ---------------------------------------------------------------------------------------------------------


def test_groups_decay_on_their_own():
    """One step: both take the same direction, and only the first group decays."""
    decaying, plain = parameters(), parameters()
    opt = SGDOLFree([{"params": decaying[:1], "weight_decay": 0.5}, {"params": decaying[1:]}])
    other = SGDOLFree(plain)
    loss = PROBLEMS["quadratic"]()
    opt.step(problem_closure(opt, decaying, loss, 0))
    other.step(problem_closure(other, plain, loss, 0))
    step = flat(plain).numpy() - START  # -eta d
    expected = step.copy()
    expected[:3] -= 0.5 * np.sqrt(np.mean(step**2)) * START[:3]
    assert flat(decaying).numpy() - START == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("metric", ["rms", "kronecker"])
def test_the_decay_does_not_depend_on_the_scale_of_the_loss(metric):
    one, other = (train("quadratic", 40, metric=metric, weight_decay=0.1, scale_f=f) for f in (1.0, 2.0**20))
    assert np.array_equal(one.iterates, other.iterates)
    assert not np.array_equal(one.iterates, train("quadratic", 40, metric=metric).iterates)


def test_a_usual_decay_does_not_stop_learning():
    """AdamW's largest usual value: logistic regression ends at 0.077 instead of 0.053, from 0.69."""
    torch.manual_seed(0)
    x = torch.randn(2000, 10)
    y = (x @ torch.randn(10) > 0).float()
    logistic, losses = nn.functional.binary_cross_entropy_with_logits, []
    for decay in (0.0, 0.1):
        w = nn.Parameter(torch.zeros(10))
        opt = SGDOLFree([w], weight_decay=decay)
        for t in range(200):

            def halves(w=w, t=t):
                return (logistic(x[i : i + 5] @ w, y[i : i + 5]) / 2 for i in (5 * t, 1000 + 5 * t))

            opt.step(closure_of(opt, halves))
        with opt.averaged():
            losses.append(float(logistic(x @ w, y).detach()))
    assert losses[1] < 2 * losses[0] < 0.15


# Gradients of some parameters alone -----------------------------------------------------------------------------------


def test_passes_that_reach_different_parameters_are_measured():
    """Each head sees one of two parts: one contribution there, two in what they share."""
    torch.manual_seed(0)
    trunk, heads = nn.Linear(5, 4).double(), [nn.Linear(4, 1).double() for _ in range(2)]
    modules = nn.ModuleList([trunk, *heads])

    def losses():
        parts = zip(batch(0).chunk(2), heads, strict=True)
        return [head(torch.tanh(trunk(part))).square().mean() / 2 for part, head in parts]

    each = [torch.autograd.grad(loss, list(modules.parameters()), materialize_grads=True, allow_unused=True)
            for loss in losses()]  # fmt: skip
    one, two = map(flat, each)
    start, found = copy.deepcopy(modules.state_dict()), {}
    for metric in ("euclidean", "rms"):
        modules.load_state_dict(start)
        opt = SGDOLFree(modules.parameters(), metric=metric)
        opt.step(closure_of(opt, losses))
        found[metric] = opt.param_groups[0]["rule"]["signal"]
    expected = 4 * (one @ two) / (one + two).square().sum()
    assert found["euclidean"] == pytest.approx(float(expected), rel=1e-12)
    assert found["euclidean"] != found["rms"]


def test_a_parameter_that_joins_later_is_looked_back_at_where_it_was():
    """Its first average, which the guard asks, and its first last point, which a look-back asks, are its own value."""
    old, late = (nn.Parameter(torch.full((3,), 5.0, dtype=torch.float64)) for _ in range(2))
    opt, seen = SGDOLFree([old, late]), []
    for t in range(40):
        noise = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        jump = {30: 1e2, 31: 1e4}.get(t, 1.0)  # the guard asks the average, a look-back the last point

        def losses(t=t, noise=noise, jump=jump):
            seen.append((t, *late.tolist()))
            for n in noise:
                loss = ((old - 4).square().sum() / 2 + n[0] @ old) * jump / 2
                yield loss if t < 30 else loss + ((late - 4).square().sum() / 2 + n[1] @ late) / 2

        opt.step(closure_of(opt, losses))
    assert [x for t, *x in seen if t == 30] == [[5.0] * 3] * 3  # now, at the average and before the last step
    assert [5.0] * 3 in [x for t, *x in seen if t == 31]


@pytest.mark.parametrize("metric", ["rms", "adagrad", "kronecker"])
def test_a_parameter_that_joins_later_counts_as_one_whose_gradients_were_zero(metric):
    """As it is in optax, where every parameter has a gradient: its squares are divided by the weight of all updates."""
    torch.manual_seed(0)
    first, late = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
    opt = SGDOLFree([*first.parameters(), *late.parameters()], metric=metric)
    for t in range(30):
        net = nn.Sequential(first, late) if t >= 25 else first
        opt.step(closure_of(opt, lambda t=t, net=net: parts_of(net, batch(t))))
    weights = [opt.state[p]["metric.weight"].item() for p in (*first.parameters(), *late.parameters())]
    assert weights == [weights[0]] * 4
    assert weights[0] > 20


class Dropped(nn.Module):
    """A residual layer that takes part in every second batch, by chance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        return x if torch.rand(()) < 0.5 else x + self.body(x)


def test_layers_that_take_part_in_some_batches_only_do_not_throw_the_start_away():
    """The batch loss rises 1.05 times in the first 50 steps; it was 1.5 when clips began with the 20th."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(4096, 10, generator=generator)
    hidden, out = (torch.randn(shape, generator=generator) for shape in ((10, 16), (16, 4)))
    labels = (torch.tanh(inputs @ hidden) @ out).argmax(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(10, 32), *[Dropped(32) for _ in range(6)], nn.Linear(32, 4))
        opt, losses = SGDOLFree(net.parameters(), metric="kronecker"), []
        batches = torch.Generator().manual_seed(3)
        for _ in range(50):
            chosen = torch.randint(0, len(inputs), (64,), generator=batches)

            def halves(chosen=chosen):
                return (nn.functional.cross_entropy(net(inputs[i]), labels[i]) / 2 for i in chosen.chunk(2))

            losses.append(opt.step(closure_of(opt, halves)).item())
    assert max(losses) < 1.25 * losses[0]
    assert opt.diagnostics()["loss"] < 0.9 * losses[0]


# What somebody else does ----------------------------------------------------------------------------------------------


def test_parameters_that_somebody_else_moved_are_an_error_unless_announced():
    net = network()
    opt = SGDOLFree(net.parameters())
    fit(net, opt, range(3))
    for change in (
        lambda: net[4].bias.data.add_(1.0),
        lambda: nn.init.normal_(net[0].weight),
        lambda: net.load_state_dict(network(seed=3).state_dict()),
    ):
        change()
        with pytest.raises(RuntimeError, match=r"changed by something else.*opt.restart\(\)"):
            fit(net, opt, [3])
        opt.moved()
        opt.zero_grad()
        fit(net, opt, [3])
    opt.restart()
    assert opt.diagnostics()["updates"] == 0
    fit(net, opt, range(3))
    assert opt.diagnostics()["updates"] == 3


def test_the_average_of_a_layer_that_is_frozen_in_mid_run_reaches_its_weights():
    """It stayed where it was, 0.36 away. With weights of about t^8, 200 more steps leave (15/215)^9 of the distance."""
    net = network(dropout=0.0)[::4]
    opt = SGDOLFree(net.parameters())
    fit(net, opt, range(15))
    net[0].requires_grad_(False)
    fit(net, opt, range(15, 215))
    frozen = net[0].weight.detach().clone()
    with opt.averaged():
        torch.testing.assert_close(net[0].weight, frozen)
    assert torch.equal(net[0].weight, frozen)
