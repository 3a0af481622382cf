"""Every option may stand in a parameter group: the same for all, or another one for each."""

import copy

import pytest
import torch

from sgdol import SGDOL
from sgdol.learners import FTRL, OnlineGradientDescent
from sgdol.metrics import RMS

ANOTHER = {
    "alpha": 3.0,
    "kappa": 10.0,
    "estimator": "paper",
    "granularity": "tensor",
    "momentum": 0.5,
    "statistics": "gradient",
    "weight_decay": 0.1,
    "averaging": 8.0,
    "learner": OnlineGradientDescent(),
    "metric": RMS(decay=0.9),
    "maximize": True,
    "foreach": True,
}


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


@pytest.mark.parametrize("option", ANOTHER)
@pytest.mark.parametrize("k", [1, 2])
def test_an_option_in_all_groups_is_as_in_the_constructor(option, k):
    value = {option: ANOTHER[option]}
    more = {"momentum": 0.5} if option == "statistics" else {}
    a, b = parameters(), parameters()
    one = SGDOL([{"params": a[:1]}, {"params": a[1:]}], lr=0.05, **value, **more)
    other = SGDOL([{"params": b[:1], **value}, {"params": b[1:], **value}], lr=0.05, **more)
    for p, q in zip(train(a, one, 6, k), train(b, other, 6, k), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("option", [o for o in ANOTHER if o not in ("alpha", "kappa", "maximize")])
@pytest.mark.parametrize("k", [1, 2])
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
