"""Every option may stand in a parameter group: the same for all, or another one for each."""

import copy

import pytest
import torch

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


def with_passes(table, exclude=()):
    """Every option with one backward per step and with two, save the paper's estimator, which takes one."""
    rows = [(option, k) for option in table for k in (1, 2) if option not in exclude]
    return [(option, k) for option, k in rows if k == 1 or option not in ("estimator", "all of the paper's")]


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


@pytest.mark.parametrize(("option", "k"), with_passes(ANOTHER, exclude=("alpha", "kappa", "maximize")))
def test_groups_that_differ_and_share_nothing_are_two_optimizers(option, k):
    """With a step size for each group, a fixed alpha, and gradients that do not depend on each other."""
    common = {"lr": 0.05, "alpha": 2.0, "granularity": "group"}
    more = {"momentum": 0.5} if option == "statistics" else {}
    value = {option: ANOTHER[option]}
    a, b = parameters(), parameters()
    both = SGDOL([{"params": a[:1]}, {"params": a[1:], **value}], **common, **more)
    first = SGDOL(b[:1], **common, **more)
    second = SGDOL(b[1:], **{**common, **more, **value})

    class Together:
        def step(self):
            first.step(), second.step()

        def zero_grad(self):
            first.zero_grad(), second.zero_grad()

    for p, q in zip(train(a, both, 6, k), train(b, Together(), 6, k), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("option", ANOTHER)
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


@pytest.mark.parametrize("option", ANOTHER)
def test_a_bad_value_in_a_group_is_named(option):
    with pytest.raises((TypeError, ValueError), match=option):
        SGDOL([{"params": parameters(), option: object()}], lr=0.1)


@pytest.mark.parametrize("name", ["betas", "nesterov", "dampening", "eps", "amsgrad"])
def test_options_of_other_optimizers_are_refused_with_what_to_do(name):
    with pytest.raises(TypeError, match=f"SGDOL has no option '{name}': "):
        SGDOL(parameters(), lr=0.1, **{name: 0.9})
    with pytest.raises(TypeError, match=f"SGDOL has no option '{name}': "):
        SGDOL([{"params": parameters(), name: 0.9}], lr=0.1)


def test_what_a_group_brings_that_is_no_option_is_warned_of():
    first, second = parameters(), parameters()
    with pytest.warns(UserWarning, match="group 1 brings 'wd', 'learning_rate': SGDOL has no such option"):
        SGDOL([{"params": first, "name": "head"}, {"params": second, "wd": 0.1, "learning_rate": 1.0}], lr=0.1)


# What torch's own tests of parameter groups demand, with every option in the groups -----------------------------------

OF_A_GROUP = {
    **{option: {option: value} for option, value in ANOTHER.items()},
    "nothing": {},
    "smoothness": {"smoothness": 100.0},
    "tensor lr": {"lr": torch.tensor(1e-2)},
    "coordinate": {"granularity": "coordinate"},
    "all of them": {
        "kappa": 10.0,
        "granularity": "tensor",
        "momentum": 0.5,
        "bias_correction": True,
        "statistics": "gradient",
        "epoch": 3,
        "averaging": 8.0,
        "learner": OnlineGradientDescent(),
        "metric": RMS(decay=0.9),
        "maximize": True,
        "foreach": True,
    },
    "all of the paper's": {**PAPER, "statistics": "gradient", "granularity": "coordinate", "foreach": False},
}


class Regression:
    """||W x + b||^2 from a point and an input that are the same each time, and a parameter that is in no group."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        drawn = [torch.randn(shape, generator=generator) for shape in ((10, 5), (10,), (4,))]
        self.weight, self.bias, self.bystander = map(torch.nn.Parameter, drawn)
        self.start = copy.deepcopy(drawn)
        self.x = torch.randn(5, generator=generator)

    def loss(self) -> torch.Tensor:
        return (self.weight.mv(self.x) + self.bias).square().sum()

    def train(self, opt, k: int, updates: int = 10) -> None:
        for _ in range(updates if k > 1 else 2 * updates):
            opt.zero_grad()
            for _ in range(k):
                (self.loss() / k).backward()
            self.bystander.grad = torch.ones_like(self.bystander)
            opt.step()

    def assert_improved(self, maximize: bool) -> None:
        before = (self.start[0].mv(self.x) + self.start[1]).square().sum().item()
        after = self.loss().item()
        assert after > before if maximize else after < before
        assert torch.equal(self.bystander.detach(), self.start[2]), "what is in no group is nobody's"


of_a_group = pytest.mark.parametrize(("name", "k"), with_passes(OF_A_GROUP))
without_noise = pytest.mark.filterwarnings("ignore:SGDOL was given the same gradient twice")


@of_a_group
@without_noise
def test_a_group_moves_at_its_own_rate_beside_one_that_stands(name, k):
    problem, options = Regression(), OF_A_GROUP[name]
    rate = {} if {"lr", "smoothness"} & options.keys() else {"lr": 1e-2}
    opt = SGDOL([{"params": [problem.weight], **rate, **options}, {"params": [problem.bias]}], lr=1e-28)
    problem.train(opt, k)
    problem.assert_improved(options.get("maximize", False))
    assert torch.equal(problem.bias.detach(), problem.start[1])
    assert opt.diagnostics()["updates"] == 10


@of_a_group
@without_noise
def test_weight_decay_of_a_group_is_that_groups_alone(name, k):
    """Against the same without it: of the first update, the decaying group's share alone is another one."""
    options = OF_A_GROUP[name]
    rate = {} if {"lr", "smoothness"} & options.keys() else {"lr": 1e-2}
    found = []
    for decay in (0.0, 0.1):
        problem, common = Regression(), {**rate, **copy.deepcopy(options)}
        groups = [
            {"params": [problem.weight], **common, "weight_decay": decay},
            {"params": [problem.bias], **common, "weight_decay": 0.0},
        ]
        opt = SGDOL(groups)
        problem.train(opt, k, updates=1)
        found.append((problem.weight.detach().clone(), problem.bias.detach().clone()))
        group = opt.param_groups[0]
        eta = float(group["step_size"]) / (1 - group["momentum"])
        problem.train(opt, k, updates=9)
        problem.assert_improved(options.get("maximize", False))
    (weight, bias), (decayed, other) = found
    torch.testing.assert_close(decayed, weight - eta * 0.1 * problem.start[0])
    assert torch.equal(bias, other)


@without_noise
def test_alpha_of_a_group_that_takes_no_part_is_learned_from_the_first_update():
    """Whatever the groups that do take part say of their own: a number, or None."""
    learned = []
    for alpha in (3.0, None):
        x, late = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
        groups = [{"params": [x], "alpha": alpha}, {"params": [late], "granularity": "group"}]
        opt = SGDOL(groups, lr=0.1, learner=FTRL())
        for y in (x, late):
            for _ in range(2):
                (y @ torch.tensor([3.0, 4.0], dtype=torch.float64) / 2 * (1 if y is x else 100)).backward()
            opt.step()
            opt.zero_grad()
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
