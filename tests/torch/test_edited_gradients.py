"""Gradients that are changed between backward and step: by a factor, which is followed, or otherwise, which is said."""

import warnings

import pytest
import torch

from sgdol import SGDOL
from sgdol.surrogate import statistics

CHANGED = "in another way than by multiplying whole tensors"


def parameters():
    """Two large tensors and several small ones: also these are looked at."""
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (17_000, 20_000, 30, 20, 5)]


def draws(params, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(p.shape, generator=generator, dtype=p.dtype) + 1 for p in params] for _ in range(count)]


def accumulate(params, gradients):
    for draw in gradients:
        sum((p * g).sum() for p, g in zip(params, draw, strict=True)).div(len(gradients)).backward()


def step_and_hear(opt):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    return [str(w.message) for w in caught]


def learned(opt):
    """(u, n) of the one update that was made."""
    totals = opt.param_groups[0]["totals"] / opt.param_groups[0]["lr"]
    return totals[3].item(), totals[4].item()


def optimizer(params):
    return SGDOL(params, lr=0.1, momentum=0.0)


def expected(gradients, factors):
    stacked = torch.stack([torch.cat([f * g for f, g in zip(factors, draw, strict=True)]) for draw in gradients])
    found = statistics(stacked)
    return pytest.approx((found.u.item(), found.n.item()), rel=1e-9)


def in_place(p):
    p.grad.mul_(0.25)


def silently(p):
    p.grad.data.mul_(0.25)


def out_of_place(p):
    p.grad = p.grad * 0.25


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("quarter", [in_place, silently, out_of_place])
def test_a_factor_on_any_one_tensor_is_followed(which, quarter):
    params = parameters()
    opt, gradients = optimizer(params), draws(params, 3)
    accumulate(params, gradients)
    quarter(params[which])
    assert step_and_hear(opt) == []
    assert learned(opt) == expected(gradients, [0.25 if i == which else 1.0 for i in range(5)])


def test_clipping_the_norm_says_nothing():
    params = parameters()
    opt = optimizer(params)
    accumulate(params, draws(params, 2))
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    assert step_and_hear(opt) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_a_factor_says_nothing(dtype):
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in parameters()]
    opt = optimizer(params)
    accumulate(params, draws(params, 2))
    torch.nn.utils.clip_grad_norm_(params, 0.1234)
    assert step_and_hear(opt) == []


def add_noise(params):
    for p in params:
        p.grad += torch.randn_like(p)


def add_noise_to_one(params):
    params[4].grad += torch.randn_like(params[4])


def add_noise_silently(params):
    for p in params:
        p.grad.data += torch.randn_like(p)


def replace(params):
    for p in params:
        p.grad = p.grad + torch.randn_like(p)


def clamp(params):
    torch.nn.utils.clip_grad_value_(params, 0.2)


@pytest.mark.parametrize("edit", [add_noise, add_noise_to_one, add_noise_silently, replace, clamp])
def test_what_is_not_a_factor_is_said_once(edit):
    params = parameters()
    opt = optimizer(params)
    heard = []
    for seed in range(3):
        accumulate(params, draws(params, 2, seed))
        edit(params)
        heard += step_and_hear(opt)
        opt.zero_grad()
    assert [CHANGED in sentence for sentence in heard] == [True]


def test_noise_that_is_added_between_the_passes_is_said():
    params = parameters()
    opt, gradients = optimizer(params), draws(params, 3)
    accumulate(params, gradients[:2])
    add_noise(params)
    accumulate(params, gradients[2:])
    assert any(CHANGED in sentence for sentence in step_and_hear(opt))


@pytest.mark.parametrize("silently", [False, True])
def test_a_hook_that_clips_after_every_accumulation_is_said(silently):
    params = parameters()
    opt = optimizer(params)

    def clip(p):
        grad = p.grad.data if silently else p.grad
        grad.mul_(min(1.0, 0.1 / float(grad.norm())))

    for p in params:
        p.register_post_accumulate_grad_hook(clip)
    accumulate(params, draws(params, 2))
    assert any(CHANGED in sentence for sentence in step_and_hear(opt))


def test_a_hook_that_only_looks_says_nothing():
    params, seen = parameters(), []
    opt = optimizer(params)
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    accumulate(params, draws(params, 3))
    assert step_and_hear(opt) == []
    assert len(seen) == 15


def test_a_hook_on_the_gradient_itself_is_seen_by_the_optimizer():
    params = parameters()
    opt, gradients = optimizer(params), draws(params, 2)
    for p in params:
        p.register_hook(lambda g: g.clamp(-0.5, 0.5))
    accumulate(params, gradients)
    assert step_and_hear(opt) == []
    clamped = [[(g / 2).clamp(-0.5, 0.5) * 2 for g in draw] for draw in gradients]
    assert learned(opt) == expected(clamped, [1.0] * 5)


def test_with_one_backward_per_step_every_edit_is_part_of_the_gradient():
    params = parameters()
    opt, gradients, held = optimizer(params), draws(params, 2), []
    for draw in gradients:
        accumulate(params, [draw])
        torch.nn.utils.clip_grad_value_(params, 0.2)
        held.append([p.grad.clone() for p in params])
        assert not any(CHANGED in sentence for sentence in step_and_hear(opt))
        opt.zero_grad()
    assert learned(opt) == expected(held, [1.0] * 5)
