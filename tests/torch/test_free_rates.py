"""lr of SGDOLFree multiplies the step that is learned: by groups, by schedulers, and what looks like another's."""

import numpy as np
import pytest
import torch
from free_problems import PROBLEMS, SIZES, START, parameters, problem_closure, reference, train
from loops import fit, flat, said
from pairs import pairwise
from torch import nn
from torch.optim import lr_scheduler

from sgdol import SGDOLFree

RATES = {
    "half": lambda t: [0.5, 0.5, 0.5],
    "ratios": lambda t: [1.0, 0.1, 0.5],
    "one frozen": lambda t: [1.0, 0.0, 1.0],
    "frozen and thawed": lambda t: [1.0, 1.0 if t < 20 or t > 30 else 0.0, 1.0],
    "warm-up from 0 and decay": lambda t: [min(t / 10, 1.0) * (1 - t / 200)] * 3,
    "all at once": lambda t: [1 - t / 200, 0.5, 2.0 * t / 200],
}


@pairwise(problem=list(PROBLEMS), rates=list(RATES), options=[{}, {"metric": "euclidean"}, {"weight_decay": 0.1}])
def test_agrees_with_the_reference(problem, rates, options):
    each = RATES[rates]
    expected = reference(problem, rates=lambda t: np.repeat(each(t), SIZES), **options)
    found = train(problem, rates=each, **options)  # warnings are errors
    found.agrees_with(expected)
    made = expected.step_sizes > 0
    multiplied = expected.step_sizes[:, None] * np.array([each(t) for t in range(len(made))])
    np.testing.assert_allclose(found.step_sizes[made], multiplied[made], rtol=1e-11)


def test_ratios_alone_are_a_metric_so_that_their_common_factor_is_what_multiplies():
    """On a quadratic without noise the first step with lr = (2, 1) is twice that with (1, 1/2)."""
    firsts = []
    for scale in (1.0, 2.0):
        params = parameters()
        opt = SGDOLFree([{"params": params[:1], "lr": scale}, {"params": params[1:], "lr": scale / 2}])
        before = flat(params)
        opt.step(problem_closure(opt, params, PROBLEMS["quadratic"](), 0))
        firsts.append(flat(params) - before)
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
    params = parameters()
    opt = SGDOLFree(params)
    scheduler, seen = schedule(opt), []
    for t in range(4):
        other = parameters(flat(params).numpy())
        twin = SGDOLFree(other)
        twin.load_state_dict(opt.state_dict())
        twin.param_groups[0]["lr"] = 1.0
        before = flat(params)
        twin.step(problem_closure(twin, other, PROBLEMS["quadratic"](), t))
        opt.step(problem_closure(opt, params, PROBLEMS["quadratic"](), t))
        moved, would = flat(params) - before, flat(other) - before
        seen.append(float((moved @ would) / (would @ would)))
        scheduler.step()
    np.testing.assert_allclose(seen, expected, rtol=1e-2, atol=1e-12)


def test_a_tensor_as_lr_is_read_at_every_step():
    params = parameters()
    opt = SGDOLFree(params, lr=torch.tensor(1.0))
    opt.param_groups[0]["lr"].fill_(0.0)
    opt.step(problem_closure(opt, params, PROBLEMS["quadratic"](), 0))
    np.testing.assert_array_equal(flat(params).numpy(), START)


def linear() -> tuple[nn.Linear, SGDOLFree]:
    torch.manual_seed(0)
    net = nn.Linear(5, 1)
    return net, SGDOLFree(net.parameters())


ABSOLUTE = "looks like another optimizer's learning rate"


def steps_that_warn(rates, net=None, opt=None):
    """The steps in which an lr that is written into the groups before each of them is warned of."""
    net, opt = (net, opt) if opt is not None else linear()
    found = []
    for t, rate in enumerate(rates):
        for group in opt.param_groups:
            group["lr"] = rate
        with said() as sentences:
            fit(net, opt, [t])
        found += [t for sentence in sentences if ABSOLUTE in sentence]
    return found


@pytest.mark.parametrize(
    ("rates", "steps"),
    [
        ([3e-4] * 5, [1]),
        ([2.5e-4 * (1 - t / 5) for t in range(5)], [1]),
        ([1.0, 1.0, 3e-4, 3e-4, 3e-4], [3]),
        ([6e-4 * (t + 1) / 4 for t in range(4)] + [6e-4, 5e-4], [4]),
        ([6e-4 * (t + 1) / 2000 for t in range(103)], [100]),
        ([1000.0] * 3, [0]),
        ([1.0, 0.0, 1000.0, 1000.0], [2]),
    ],
    ids=["constant", "as cleanrl", "from the third step", "as nanoGPT", "slow warm-up", "large", "large later"],
)
def test_a_rate_that_is_written_at_every_step_and_looks_absolute_is_warned_of_once(rates, steps):
    assert steps_that_warn(rates) == steps


@pytest.mark.parametrize(
    "rates",
    [
        [min(1.0, 1e-3 * (t + 1)) for t in range(30)],
        [(1 + np.cos(np.pi * t / 40)) / 2 for t in range(41)],
        [10.0**-t for t in range(6)],
        [1.0, 0.0, 0.0, 1.0, 0.03, 0.01, 0.0, 0.01, 1e-5],
        [50.0, 0.02, 50.0],
    ],
    ids=["warm-up", "cosine", "tenths", "frozen", "at the edges"],
)
def test_a_schedule_by_hand_that_passes_through_small_values_is_not_warned_of(rates):
    assert steps_that_warn(rates) == []


def test_a_run_that_is_resumed_in_the_tail_of_a_schedule_is_not_warned_of():
    net, opt = linear()
    assert steps_that_warn([1.0, 0.1, 0.01, 1e-3], net, opt) == []
    other, resumed = linear()
    other.load_state_dict(net.state_dict())
    resumed.load_state_dict(opt.state_dict())
    assert steps_that_warn([1e-3, 9e-4, 8e-4], other, resumed) == []


@pytest.mark.parametrize("rates", [[3e-4], [1000.0], [1e-3, 3e-4], [1.0, 51.0]], ids=str)
def test_a_rate_that_looks_absolute_is_warned_of_where_it_is_given_and_not_again(rates):
    net = nn.Linear(5, 1)
    groups = [{"params": [p], "lr": rate} for p, rate in zip(net.parameters(), rates, strict=False)]
    with pytest.warns(UserWarning, match=f"lr={max(rates):g} {ABSOLUTE}") as caught:
        opt = SGDOLFree(groups)
    assert [w.filename for w in caught] == [__file__]
    fit(net, opt, range(3))


def test_a_group_that_is_added_with_a_large_rate_is_warned_of_and_one_with_a_small_rate_is_a_ratio():
    net, other = nn.Linear(5, 1), nn.Linear(5, 1)
    opt = SGDOLFree(net.parameters())
    opt.add_param_group({"params": [other.weight], "lr": 1e-4})
    with pytest.warns(UserWarning, match=f"lr=300 {ABSOLUTE}"):
        opt.add_param_group({"params": [other.bias], "lr": 300})


@pytest.mark.parametrize(
    "schedule",
    [
        lambda opt: lr_scheduler.LambdaLR(opt, lambda t: 1e-3 if t in (0, 1, 4) else 1.0),
        lambda opt: lr_scheduler.LinearLR(opt, 1e-3, total_iters=1000),
        lambda opt: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=100, div_factor=1e4),
        lambda opt: lr_scheduler.CyclicLR(opt, 1e-3, 1.0, cycle_momentum=False),
        lambda opt: lr_scheduler.ExponentialLR(opt, 1e-3),
    ],
    ids=["lambda", "linear", "one cycle", "cyclic", "exponential"],
)
def test_a_scheduler_that_begins_or_ends_low_is_not_warned_of(schedule):
    net, opt = linear()
    scheduler = schedule(opt)
    for t in range(5):
        fit(net, opt, [t])
        scheduler.step()


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_a_rate_that_somebody_sets_later_is_checked_when_it_is_used(value):
    net, opt = linear()
    fit(net, opt, [0])
    opt.param_groups[0]["lr"] = value
    with pytest.raises(ValueError, match="lr of parameter group 0 must be at least 0 and finite"):
        fit(net, opt, [1])


def test_a_group_that_joins_after_loading_has_the_options_that_were_loaded():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    saved = SGDOLFree([nn.Parameter(torch.ones(3))], metric="rms", momentum=0.5, averaging=2.0).state_dict()
    opt = SGDOLFree([first])
    opt.load_state_dict(saved)
    opt.add_param_group({"params": [second]})
    assert [(g["metric"], g["momentum"], g["averaging"]) for g in opt.param_groups] == [("rms", 0.5, 2.0)] * 2
