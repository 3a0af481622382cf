"""How gradients are recognised: whatever happens around the backward passes, each of them is one contribution.

The truth is computed without the optimizer: gradients from ``torch.autograd.grad``, statistics from the core, FTRL's
closed form; or numbers that were worked out by hand.
"""

import copy
import functools

import pytest
import torch
from loops import SOURCES, flat, objective, one_step, plain, scalar
from pairs import pairwise
from test_histories import Fail
from torch.utils.checkpoint import checkpoint

from sgdol import SGDOL
from sgdol.learners import FTRL
from sgdol.surrogate import statistics

pytestmark = pytest.mark.filterwarnings(
    "ignore:SGDOL was given the same gradient twice", "ignore:SGDOL got one backward"
)

GRANULARITIES = ["tensor", "coordinate"]
"""What is recorded of a pass: a number for each tensor, which other blocks are sums of, or one for each coordinate."""
LR, ALPHA = 0.1, 0.5

granularities = pytest.mark.parametrize("granularity", GRANULARITIES)
PLAIN = {"momentum": 0.0, "learner": FTRL()}
"""The paper's learner, as in the truth below: its step sizes see every pass."""


# The truth ------------------------------------------------------------------------------------------------------------


def network() -> torch.nn.Sequential:
    """Three layers, to cut into segments."""
    return torch.nn.Sequential(*plain(), torch.nn.Tanh(), torch.nn.Linear(1, 1).double())


def inputs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, 5, 5, generator=generator, dtype=torch.float64))


def truth(net, objective, batches, granularity, estimator="symmetric", k=2) -> torch.Tensor:
    """The parameters after training on these microbatches, k at a time."""
    net = copy.deepcopy(net)
    params = list(net.parameters())
    sizes = [p.numel() for p in params]
    block = {
        "global": torch.zeros(sum(sizes), dtype=torch.long),
        "group": torch.repeat_interleave(torch.arange(2), torch.tensor([sum(sizes[:1]), sum(sizes[1:])])),
        "tensor": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        "coordinate": torch.arange(sum(sizes)),
    }[granularity]
    u_sum = n_sum = torch.zeros(int(block.max()) + 1, dtype=torch.float64)
    for start in range(0, len(batches), k):
        passes = [
            torch.autograd.grad(objective(net, x), params, allow_unused=True, materialize_grads=True)
            for x in batches[start : start + k]
        ]
        gradients = torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in passes])
        found = statistics(gradients, estimator=estimator, blocks="coordinate")
        s = ((ALPHA + u_sum) / (ALPHA + n_sum)).clamp(0, 2)
        u_sum = u_sum.index_add(0, block, found.u)
        n_sum = n_sum.index_add(0, block, found.n)
        with torch.no_grad():
            moves = (LR * s[block] * found.direction).split(sizes)
            for p, move in zip(params, moves, strict=True):
                p.sub_(move.view_as(p))
    return flat(net.parameters())


@functools.cache
def undisturbed(granularity) -> torch.Tensor:
    """The truth that most disturbances must not change."""
    return truth(network(), objective, inputs(6), granularity)


def optimizer(net, granularity, **options) -> SGDOL:
    first, *others = net.parameters()
    groups = [{"params": [first]}, {"params": others}]
    return SGDOL(groups, lr=LR, alpha=ALPHA, granularity=granularity, **{**PLAIN, **options})


def trained(net, objective, batches, granularity, k=2) -> torch.Tensor:
    """The same by the optimizer."""
    opt = optimizer(net, granularity)
    for start in range(0, len(batches), k):
        one_step(opt, (objective(net, x) / k for x in batches[start : start + k]))
        assert opt.diagnostics()["gradients"] == k
    assert opt.diagnostics()["updates"] == len(batches) // k
    return flat(net.parameters())


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def assert_first_update(opt, *, u: float, n: float, k: int = 2) -> None:
    """The first step size is lr, so two of the diagnostics determine the statistics of the first update."""
    found = opt.diagnostics()
    assert found["updates"] == 1
    assert found["gradients"] == k
    assert found["cumulative_surrogate"] == pytest.approx(LR * (n / 2 - u), rel=1e-12, abs=1e-14)
    # Reported from 0 on, and up to 2^52 where there is no noise.
    ratio = max(u, 0) / (n - u) if n > u else 2.0**52
    assert found["signal_to_noise"] == pytest.approx(ratio, rel=1e-12, abs=1e-14)


def test_the_papers_estimator_refuses_several_backward_passes_per_step():
    net = network()
    opt = optimizer(net, "global", estimator="paper")
    for x in inputs(3):
        objective(net, x).backward()
    with pytest.raises(ValueError, match=r'estimator="paper" takes one backward\(\) per step\(\), got 3'):
        opt.step()
    assert_equal(flat(net.parameters()), flat(network().parameters()))


# Nested graph tasks ---------------------------------------------------------------------------------------------------


def segment(net, layers: slice, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    x = x if x.requires_grad else x.clone().requires_grad_()
    return checkpoint(net[layers], x, use_reentrant=reentrant)


LAYOUTS = {
    "all layers inside": lambda net, x, r: segment(net, slice(0, 5), x, r),
    "head outside": lambda net, x, r: net[4](segment(net, slice(0, 4), x, r)),
    "stem outside": lambda net, x, r: segment(net, slice(2, 5), net[:2](x), r),
    "stem and head outside": lambda net, x, r: net[4](segment(net, slice(2, 4), net[:2](x), r)),
    "two segments": lambda net, x, r: segment(net, slice(2, 5), segment(net, slice(0, 2), x, r), r),
    "a segment in a segment": lambda net, x, r: checkpoint(
        lambda y: net[4](segment(net, slice(2, 4), net[:2](y), r)), x.clone().requires_grad_(), use_reentrant=r
    ),
}


@pairwise(layout=list(LAYOUTS), granularity=GRANULARITIES, reentrant=[False, True])
def test_checkpointing_is_one_pass_per_microbatch(layout, granularity, reentrant):
    def recomputed(net, x):
        return objective(lambda y: LAYOUTS[layout](net, y, reentrant), x)

    assert_equal(trained(network(), recomputed, inputs(6), granularity), undisturbed(granularity))


class Tied(torch.nn.Module):
    """A layer that is applied twice, and a table that is also the output layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.head.weight = self.layer.weight
        self.double()

    def block(self, x):
        return torch.tanh(self.layer(x))

    def forward(self, x):
        return self.head(self.block(self.block(x)))[:, :1]


@granularities
def test_a_tied_parameter_is_one_contribution_per_pass(granularity):
    expected = truth(Tied(), objective, inputs(6), granularity)
    assert_equal(trained(Tied(), objective, inputs(6), granularity), expected)


# Gradients that nobody watched, or that reach some parameters only ----------------------------------------------------

OF_B, ADD_B, FREEZE, THAW, STEP = "optimizer of b", "add b", "freeze b", "thaw b", "step"
ALL, OF_A = "optimizer", "optimizer of a"

EVENTS = {
    "unwatched passes of an unfrozen parameter": ([FREEZE, ALL, THAW, (0.5, 1.5), (0.5, -0.5)], 1 + 0, 1 + 1),
    "a group added in the middle": ([OF_A, (0.5, 1.5), ADD_B, (0.5, -0.5)], 1 * 1 + 3 * -1, 1 + 1),
    "a group added after the last pass": ([OF_A, (0.5, 1.5), (0.5, -0.5), ADD_B], 1 + 0, 1 + 1),
    "at construction": ([(None, 1.0), (None, -1 / 3), OF_B, (None, 1 / 3)], 2 * (1 - 5 / 9), 1),
    "the first of two passes": ([ALL, (0.5, 2.5), (1.0, None)], 1 * 2 + 0, 1.5**2 + 2.5**2),
    "the second of two passes": ([ALL, (0.5, None), (1.0, 2.5)], 1 * 2 + 0, 1.5**2 + 2.5**2),
    "one of three passes": ([ALL, (1 / 3, None), (2 / 3, 2.0), (-1.0, None)], (2 - 3 - 2 * 3) / 3, 0 + 2**2),
    "at construction, alone": ([(None, 3.0), OF_B, STEP, (None, 1.0)], 3 * 1, 2**2),
    "the first of two steps": ([ALL, (1.0, 5.0), STEP, (2.0, None)], 1 * 2 + 0, 1.5**2 + 2.5**2),
    "the second of two steps": ([ALL, (1.0, None), STEP, (2.0, 5.0)], 1 * 2 + 0, 1.5**2 + 2.5**2),
    "paper, at construction": ([(None, 3.0), OF_B, STEP, (None, 1.0)], 3 * 1, 3**2),
    "paper, the first of two steps": ([ALL, (1.0, 5.0), STEP, (2.0, None)], 1 * 2 + 0, 1 + 5**2),
    "paper, the second of two steps": ([ALL, (1.0, None), STEP, (2.0, 5.0)], 1 * 2 + 0, 1),
}
"""What happens, with the gradients of a and b in each pass; and u and n of the update that follows.

What was not watched is one contribution, which has no second one to agree with: its signal is 0. Where a pass does not
reach a parameter its gradient is zero.
"""


@granularities
@pytest.mark.parametrize("case", EVENTS)
def test_what_was_not_watched_is_one_contribution_and_what_is_absent_is_zero(granularity, case):
    events, u, n = EVENTS[case]
    a, b = scalar(), scalar()
    of = {ALL: [a, b], OF_A: [a], OF_B: [b]}
    estimator = "paper" if case.startswith("paper") else "symmetric"
    options = {"lr": LR, "alpha": ALPHA, "granularity": granularity, "estimator": estimator, **PLAIN}
    passes = []
    for event in [*events, STEP]:
        if event in of:
            opt = SGDOL(of[event], **options)
        elif event == ADD_B:
            opt.add_param_group({"params": [b]})
        elif event in (FREEZE, THAW):
            b.requires_grad_(event == THAW)
        elif event == STEP:
            opt.step()
            assert opt.pending == (STEP in events and len(passes) == 1)
            opt.zero_grad()
        else:
            passes.append([g or 0.0 for g in event])
            sum(g * x for g, x in zip(event, (a, b), strict=True) if g is not None).backward()
    moved = torch.tensor(passes, dtype=torch.float64)
    moved = moved[0] if estimator == "paper" else moved.sum(0) / (2 if STEP in events else 1)
    assert [a.item(), b.item()] == pytest.approx((1 - LR * moved).tolist())
    assert_first_update(opt, u=u, n=n, k=3 if "three" in case else 2)


@granularities
def test_a_parameter_unfrozen_later_is_watched_from_its_first_step_on(granularity):
    a, b = scalar(), scalar()
    b.requires_grad_(False)
    opt = SGDOL([a, b], lr=LR, alpha=ALPHA, granularity=granularity, **PLAIN)
    b.requires_grad_(True)
    for _ in range(2):
        ((a + 3 * b) / 2).backward()
        one_step(opt, [(a - b) / 2])
    s_b = ALPHA / (ALPHA + 1)
    surrogate = (2 / 2 - 1) + (1 / 2 - 1) + (s_b**2 / 2 - s_b * -3)
    assert opt.diagnostics()["cumulative_surrogate"] == pytest.approx(LR * surrogate)


# Closures -------------------------------------------------------------------------------------------------------------


@pairwise(
    granularity=GRANULARITIES, estimator=["symmetric", "paper"], when=["before backward", "half-way through backward"]
)
def test_a_closure_that_raises_loses_no_held_gradient(granularity, estimator, when):
    net = network()
    first, second, third = inputs(3)
    batches = iter([first, second, third])
    opt = optimizer(net, granularity, estimator=estimator)
    expected = truth(net, objective, [first, third], granularity, estimator)

    def closure():
        opt.zero_grad()
        x = next(batches)
        if x is second and when == "before backward":
            raise RuntimeError("half-way")
        if x is second:
            net[2:](Fail.apply(net[:2](x))).square().mean().backward()
        loss = objective(net, x)
        loss.backward()
        return loss

    opt.step(closure)
    with pytest.raises(RuntimeError, match="half-way"):
        opt.step(closure)
    assert opt.pending
    opt.step(closure)  # the first gradient is still held
    assert not opt.pending
    assert_equal(flat(net.parameters()), expected)


# Memory ---------------------------------------------------------------------------------------------------------------


VIEWS = {
    "transposed": lambda base: base.t(),
    "every other row": lambda base: base[::2],
    "some columns": lambda base: base[:, 1:3],
    "channels last": lambda base: base.view(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "complex, lazily conjugated": lambda base: torch.view_as_complex(base.view(6, 2, 2)),
}


@pairwise(granularity=GRANULARITIES, source=SOURCES, kind=list(VIEWS))
def test_parameters_with_gaps_or_another_order_in_memory_are_parameters(granularity, source, kind):
    """And gradients that are conjugated when they are read."""
    estimator, k = source
    generator = torch.Generator().manual_seed(0)
    strange = torch.nn.Parameter(VIEWS[kind](torch.randn(6, 4, generator=generator, dtype=torch.float64)))
    real = torch.view_as_real if strange.is_complex() else lambda tensor: tensor
    plain = torch.nn.Parameter(real(strange.detach()).clone(memory_format=torch.contiguous_format))
    lazy = []
    strange.register_hook(lambda g: lazy.append(g.is_conj()))
    options = {"lr": LR, "alpha": ALPHA, "granularity": granularity, "estimator": estimator, "momentum": 0.9}
    opts = SGDOL([strange], **options), SGDOL([plain], **options)
    for _ in range(6 // k):
        for _ in range(k):
            c = torch.randn(strange.shape, generator=generator, dtype=strange.dtype)
            (strange.conj() * c).real.sum().div(k).backward()
            (plain * real(c)).sum().div(k).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert all(lazy) if strange.is_complex() else not strange.is_contiguous()
    assert_equal(real(strange.detach()), plain.detach())
