"""Every option may stand in a parameter group: the same for all, or another one for each."""

import copy
from types import SimpleNamespace

import pytest
import torch
from loops import one_step

from sgdol import PAPER, SGDOL
from sgdol.learners import FTRL, OnlineGradientDescent
from sgdol.metrics import RMS

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # pairs are among what is tested

ANOTHER = {
    "alpha": 3.0,
    "kappa": 10.0,
    "estimator": "paper",
    "granularity": "tensor",
    "momentum": 0.5,
    "bias_correction": True,
    "statistics": "gradient",
    "epoch": 3,
    "weight_decay": 0.1,
    "averaging": 8.0,
    "learner": OnlineGradientDescent(),
    "metric": RMS(decay=0.9),
    "maximize": True,
    "foreach": True,
}


def with_passes(table):
    """Every option with one backward per step and with two, save the paper's estimator, which takes one."""
    return [
        (option, k) for option in table for k in (1, 2) if k == 1 or option not in ("estimator", "all of the paper's")
    ]


def test_the_table_has_every_option():
    assert {"lr", *ANOTHER} == SGDOL(parameters(), lr=0.1).defaults.keys()


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in ((3, 2), (4,), (2,))]


def train(params, opt, steps: int = 5, k: int = 2, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for _ in range(k):
            losses = [(p * (p + torch.randn(p.shape, generator=generator, dtype=p.dtype))).sum() for p in params]
            (sum(losses) / k).backward()
        opt.step()
        opt.zero_grad()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize(("option", "k"), with_passes(ANOTHER))
def test_an_option_in_all_groups_is_as_in_the_constructor(option, k):
    value = {option: ANOTHER[option]}
    more = {"momentum": 0.5} if option == "statistics" else {}
    a, b = parameters(), parameters()
    one = SGDOL([{"params": a[:1]}, {"params": a[1:]}], lr=0.05, **value, **more)
    other = SGDOL([{"params": b[:1], **value}, {"params": b[1:], **value}], lr=0.05, **more)
    for p, q in zip(train(a, one, 6, k), train(b, other, 6, k), strict=True):
        assert torch.equal(p, q)


OF_A_GROUP = {
    **{option: {option: value} for option, value in ANOTHER.items() if option not in ("alpha", "kappa", "maximize")},
    "smoothness": {"smoothness": 50.0},
    "tensor lr": {"lr": torch.tensor(1e-2)},
    "coordinate": {"granularity": "coordinate"},
    "most of them": {
        option: value
        for option, value in ANOTHER.items()
        if option not in ("alpha", "kappa", "estimator", "maximize", "foreach")
    },
    "all of the paper's": {**PAPER, "statistics": "gradient", "granularity": "coordinate"},
}


@pytest.mark.parametrize(("name", "k"), with_passes(OF_A_GROUP))
def test_groups_that_differ_and_share_nothing_are_two_optimizers(name, k):
    """With a step size for each group, a fixed alpha, and gradients that do not depend on each other."""
    value, rate, common = OF_A_GROUP[name], {"lr": 0.05}, {"alpha": 2.0, "granularity": "group"}
    if name == "statistics":
        common["momentum"] = 0.5
    a, b = parameters(), parameters()
    both = SGDOL([{"params": a[:1]}, {"params": a[1:], **value}], **rate, **common)
    first = SGDOL(b[:1], **rate, **common)
    second = SGDOL(b[1:], **{**({} if name == "smoothness" else rate), **common, **value})

    together = SimpleNamespace(
        step=lambda: (first.step(), second.step()), zero_grad=lambda: (first.zero_grad(), second.zero_grad())
    )
    for p, q in zip(train(a, both, 6, k), train(b, together, 6, k), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("options", "rate"), [({"lr": 0.05}, 0.05), ({"smoothness": 2.0}, 0.05)])
def test_an_lr_of_none_in_a_group_is_that_of_the_constructor(options, rate):
    opt = SGDOL([{"params": parameters(), "lr": None}], **options)
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(rate)


def test_groups_that_say_global_share_a_block_beside_others():
    params = parameters()
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "granularity": "tensor"},
        {"params": params[2:], "lr": 0.1},
    ]
    opt = SGDOL(groups, lr=0.05, learner=FTRL())
    train(params, opt)
    first, second, third = (float(group["step_size"]) for group in opt.param_groups)
    assert third == pytest.approx(2 * first)
    assert second != pytest.approx(first)


@pytest.mark.parametrize("option", ["estimator", "granularity", "averaging", "learner", "metric"])
def test_a_state_with_groups_that_differ_continues(option):
    def groups(params):
        return [{"params": params[:1]}, {"params": params[1:], option: ANOTHER[option]}]

    params = parameters()
    opt = SGDOL(groups(params), lr=0.05)
    train(params, opt, 3, k=1)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = SGDOL(groups(twins), lr=0.05)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p, q in zip(train(params, opt, 3, 1, seed=2), train(twins, other, 3, 1, seed=2), strict=True):
        assert torch.equal(p, q)


# Groups of which one takes no part ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:SGDOL was given the same gradient twice")
def test_alpha_of_a_group_that_takes_no_part_is_learned_from_the_first_update():
    """Whatever the groups that do take part say of their own: a number, or None."""
    learned = []
    for alpha in (3.0, None):
        x, late = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
        groups = [{"params": [x], "alpha": alpha}, {"params": [late], "granularity": "group"}]
        opt = SGDOL(groups, lr=0.1, learner=FTRL())
        for y in (x, late):
            one_step(
                opt, (y @ torch.tensor([3.0, 4.0], dtype=torch.float64) / 2 * (1 if y is x else 100) for _ in range(2))
            )
        learned.append(opt.param_groups[1]["alpha_learned"].item())
    assert learned == [25 / 4] * 2  # ||g||^2 of the first update, for each of the four numbers


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("granularity", ["global", "coordinate"])
def test_momentum_that_a_scheduler_begins_with_knows_what_the_step_before_it_was_worth(granularity, bias_correction):
    """The curvature that is measured along the last step does not depend on the direction of the next."""
    found = []
    for later in (0.0, 0.9):
        params = parameters()
        opt = SGDOL(params, lr=0.1, momentum=0.0, granularity=granularity, bias_correction=bias_correction)
        train(params, opt)
        opt.param_groups[0]["momentum"] = later
        train(params, opt, steps=1, seed=2)
        owner = opt.param_groups[0] if granularity == "global" else opt.state[params[0]]
        found.append(owner["learner.h_sum"])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
