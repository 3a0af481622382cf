"""Gradients that are changed between backward and step: by a factor, which is followed, or otherwise, which is said."""

import pytest
import torch
from loops import batch, both, flat, net_closure, plain, said
from torch import nn

from sgdol import SGDOL, SGDOLFree
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


def test_a_hook_on_the_gradient_itself_is_seen_by_the_optimizer():
    params = parameters()
    opt, gradients = optimizer(params), draws(params, 2)
    for p in params:
        p.register_hook(lambda g: g.clamp(-0.5, 0.5))
    accumulate(params, gradients)
    opt.step()
    clamped = [[(g / 2).clamp(-0.5, 0.5) * 2 for g in draw] for draw in gradients]
    assert learned(opt) == expected(clamped, [1.0] * 5)


@pytest.mark.filterwarnings("ignore:SGDOL got one backward")
def test_with_one_backward_per_step_every_edit_is_part_of_the_gradient():
    params = parameters()
    opt, gradients, held = optimizer(params), draws(params, 2), []
    for draw in gradients:
        accumulate(params, [draw])
        nn.utils.clip_grad_value_(params, 0.2)
        held.append([p.grad.clone() for p in params])
        opt.step()
        opt.zero_grad()
    assert learned(opt) == expected(held, [1.0] * 5)


# What is said ---------------------------------------------------------------------------------------------------------


def wide(dtype=torch.float64):
    """With a large tensor and small ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4000), nn.Tanh(), nn.Linear(4000, 1)).to(dtype)


def heard(make, edit=lambda params: None, hook=None, parts=2, dtype=torch.float64) -> list[bool]:
    """Of what is said in three steps, whether it is about gradients that were changed."""
    net = wide(dtype)
    params = list(net.parameters())
    opt = make(params)
    for p in params if hook else ():
        p.register_post_accumulate_grad_hook(hook)
    with said() as sentences:
        for t in range(3):
            opt.step(net_closure(opt, net, batch(t, dtype=dtype), parts, lambda: edit(params)))
    return [CHANGED in sentence for sentence in sentences]


def look(p):
    assert p.grad is not None


def clip_norm(params):
    nn.utils.clip_grad_norm_(params, 0.01234)


@both
@pytest.mark.parametrize(
    ("edit", "hook", "dtype"),
    [
        (clip_norm, None, torch.float64),
        (clip_norm, look, torch.float32),
        (clip_norm, None, torch.bfloat16),  # rounding of a factor
        (lambda params: None, look, torch.float64),
    ],
)
def test_clipping_the_norm_and_hooks_that_only_look_are_not_worth_a_word(make, edit, hook, dtype):
    for parts in (2, 3):
        assert heard(make, edit, hook, parts, dtype) == []


def add_noise(params):
    for p in params:
        p.grad += torch.randn_like(p)


def add_noise_to_one(params):
    params[1].grad += torch.randn_like(params[1])


def add_noise_silently(params):
    for p in params:
        p.grad.data += torch.randn_like(p)


def replace(params):
    for p in params:
        p.grad = p.grad + torch.randn_like(p)


def clamp(params):
    nn.utils.clip_grad_value_(params, 1e-3)


@both
@pytest.mark.parametrize("edit", [add_noise, add_noise_to_one, add_noise_silently, replace, clamp])
def test_what_is_not_a_factor_is_said_once(make, edit):
    assert heard(make, edit) == [True]


def clip(p):
    p.grad.clamp_(-1e-3, 1e-3)


def clip_silently(p):
    p.grad.data.mul_(min(1.0, 1e-3 / float(p.grad.norm())))


@both
@pytest.mark.parametrize("hook", [clip, clip_silently])
def test_a_hook_that_clips_after_every_accumulation_is_said_once(make, hook):
    for parts in (2, 3):
        assert heard(make, hook=hook, parts=parts) == [True]


def test_noise_that_is_added_between_the_passes_is_said():
    params = parameters()
    opt, gradients = optimizer(params), draws(params, 3)
    accumulate(params, gradients[:2])
    add_noise(params)
    accumulate(params, gradients[2:])
    with pytest.warns(UserWarning, match=CHANGED):
        opt.step()


@pytest.mark.parametrize("edit", ["in place", "replaced"])
@pytest.mark.parametrize("parts", [2, 3])
def test_without_a_rate_gradients_that_the_closure_rescales_are_measured_as_they_are(parts, edit):
    """Dividing all gradients by four is dividing the objective by four: the same points."""
    runs = []
    for rescales in (False, True):
        net = plain()
        opt = SGDOLFree(net.parameters())

        def rescale(net=net, rescales=rescales):
            for p in net.parameters() if rescales else ():
                if edit == "in place":
                    p.grad.mul_(0.25)
                else:
                    p.grad = p.grad * 0.25

        for t in range(15):
            opt.step(net_closure(opt, net, batch(t), parts, rescale))
        runs.append((flat(net.parameters()), opt.diagnostics()["noise_scale"]))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-10, atol=0)
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-10)
