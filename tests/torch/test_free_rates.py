"""lr of SGDOLFree multiplies the step that is learned: by groups, by schedulers, and what looks like another's."""

import warnings

import numpy as np
import pytest
import torch
from pairs import pairwise
from test_free import PROBLEMS, SIZES, START, STEPS, flat, oracle_of, parameters, problem_closure
from torch import nn
from torch.optim import lr_scheduler

from sgdol import SGDOLFree
from sgdol.reference_free import sgdol_free
from sgdol.torch import backward

RATES = {
    "half": lambda t: [0.5, 0.5, 0.5],
    "ratios": lambda t: [1.0, 0.1, 0.5],
    "one frozen": lambda t: [1.0, 0.0, 1.0],
    "frozen and thawed": lambda t: [1.0, 1.0 if t < 20 or t > 30 else 0.0, 1.0],
    "warm-up from 0 and decay": lambda t: [min(t / 10, 1.0) * (1 - t / 200)] * 3,
    "all at once": lambda t: [1 - t / 200, 0.5, 2.0 * t / 200],
}


def train(problem, steps, rates, **options):
    loss, params = PROBLEMS[problem](), parameters(START)
    opt = SGDOLFree([{"params": [p], "lr": rate} for p, rate in zip(params, rates(0), strict=True)], **options)
    iterates, step_sizes = [flat(params).detach().numpy().copy()], []
    for t in range(steps):
        for group, rate in zip(opt.param_groups, rates(t), strict=True):
            group["lr"] = rate
        opt.step(problem_closure(opt, params, loss, t))
        iterates.append(flat(params).detach().numpy().copy())
        step_sizes.append([group["step_size"] for group in opt.param_groups])
    with opt.averaged():
        return np.array(iterates), flat(params).detach().numpy().copy(), np.array(step_sizes), opt.diagnostics()


@pairwise(problem=list(PROBLEMS), rates=list(RATES), options=[{}, {"metric": "euclidean"}, {"weight_decay": 0.1}])
def test_agrees_with_the_reference(problem, rates, options):
    steps = STEPS.get(problem, 60)
    each = RATES[rates]
    oracle = oracle_of(PROBLEMS[problem](), 2)
    expected = sgdol_free(oracle, START, steps, tensors=SIZES, rates=lambda t: np.repeat(each(t), SIZES), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterates, average, step_sizes, report = train(problem, steps, each, **options)
    np.testing.assert_allclose(iterates, expected.iterates, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(average, expected.averages[-1], rtol=1e-12, atol=1e-12)
    made = expected.step_sizes > 0
    multiplied = expected.step_sizes[:, None] * np.array([each(t) for t in range(steps)])
    np.testing.assert_allclose(step_sizes[made], multiplied[made], rtol=1e-11)
    assert report["smoothness"] == pytest.approx(expected.smoothness[-1], rel=1e-11)
    for name in ("evaluations", "rejections", "rollbacks", "skipped"):
        assert report[name] == getattr(expected, name), name


def test_ratios_alone_are_a_metric_so_that_their_common_factor_is_what_multiplies():
    """On a quadratic without noise the first step with lr = (2, 1) is twice that with (1, 1/2)."""
    firsts = []
    for scale in (1.0, 2.0):
        params = parameters(START)
        opt = SGDOLFree([{"params": params[:1], "lr": scale}, {"params": params[1:], "lr": scale / 2}])
        before = flat(params).detach().clone()
        opt.step(problem_closure(opt, params, PROBLEMS["quadratic"](), 0))
        firsts.append(flat(params).detach() - before)
    torch.testing.assert_close(firsts[1], 2 * firsts[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (lambda opt: lr_scheduler.StepLR(opt, 2, gamma=0.5), [1, 1, 0.5, 0.5]),
        (lambda opt: lr_scheduler.LambdaLR(opt, lambda t: t / 4), [0, 0.25, 0.5, 0.75]),
        (lambda opt: lr_scheduler.CosineAnnealingLR(opt, 2), [1, 0.5, 0, 0.5]),
        (lambda opt: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=5, pct_start=0.4), [0.04, 1.0, 0.75, 0.25]),
    ],
    ids=["step", "lambda", "cosine", "one cycle"],
)
def test_a_scheduler_multiplies_the_steps(schedule, expected):
    """The multiplier changes nothing that is learned from one point: each step is that of an unscheduled optimizer."""
    params = parameters(START)
    opt = SGDOLFree(params)
    scheduler, seen = schedule(opt), []
    for t in range(4):
        other = parameters(flat(params).detach().numpy())
        twin = SGDOLFree(other)
        twin.load_state_dict(opt.state_dict())
        twin.param_groups[0]["lr"] = 1.0
        before = flat(params).detach().clone()
        twin.step(problem_closure(twin, other, PROBLEMS["quadratic"](), t))
        opt.step(problem_closure(opt, params, PROBLEMS["quadratic"](), t))
        moved, would = flat(params).detach() - before, flat(other).detach() - before
        seen.append(float((moved @ would) / (would @ would)))
        scheduler.step()
    np.testing.assert_allclose(seen, expected, rtol=1e-2, atol=1e-12)


def test_a_tensor_as_lr_is_read_at_every_step():
    params = parameters(START)
    opt = SGDOLFree(params, lr=torch.tensor(1.0))
    opt.param_groups[0]["lr"].fill_(0.0)
    opt.step(problem_closure(opt, params, PROBLEMS["quadratic"](), 0))
    np.testing.assert_array_equal(flat(params).detach().numpy(), START)


def linear() -> tuple[nn.Linear, SGDOLFree]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    return net, SGDOLFree(net.parameters())


def step(net, opt, t):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(t))
    backward(lambda x: (net(x) - x.sum(1, keepdim=True)).square().mean(), x)
    opt.step()
    opt.zero_grad()


def test_a_rate_that_looks_absolute_is_warned_of_once():
    """As nanoGPT and cleanrl write it: at every step, whatever the optimizer."""
    net, opt = linear()
    for t in range(3):
        for group in opt.param_groups:
            group["lr"] = 3e-4
        if t == 0:
            with pytest.warns(UserWarning, match=r"lr=0\.0003 looks like another optimizer's learning rate"):
                step(net, opt, t)
        else:
            step(net, opt, t)


def test_a_schedule_that_begins_and_ends_low_is_not_warned_of():
    net, opt = linear()
    scheduler = lr_scheduler.LambdaLR(opt, lambda t: 1e-3 if t in (0, 4) else 1.0)
    for t in range(5):
        step(net, opt, t)
        scheduler.step()


def test_what_another_optimizers_groups_bring_is_refused():
    with pytest.raises(TypeError, match="SGDOLFree has no option 'betas': "):
        SGDOLFree([{"params": [nn.Parameter(torch.ones(2))], "betas": (0.9, 0.95)}])


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_a_rate_that_somebody_sets_later_is_checked_when_it_is_used(value):
    net, opt = linear()
    step(net, opt, 0)
    opt.param_groups[0]["lr"] = value
    with pytest.raises(ValueError, match="lr of parameter group 0 must be at least 0 and finite"):
        step(net, opt, 1)
