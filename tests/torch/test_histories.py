"""Random histories of gradients between two steps, beside a plain list of what each parameter has got.

Passes of every kind reach some of the parameters; gradients are thrown away or multiplied in between, and those of
``torch.autograd.grad`` and of a pass that fails half-way leave nothing behind. Small and large tensors, which are
measured in different ways, are in every history.
"""

import random
import warnings

import pytest
import torch
from processes import in_threads

from sgdol import SGDOL

SIZES = (3, 17_000, 7, 20_000, 4096)
EMBEDDING = 3
"""Of this tensor a batch reaches a few numbers only, and none of those, spread evenly over each large tensor, by which
the optimizer sees whether gradients have changed."""


class Ledger:
    """The contributions to every parameter, one by one."""

    def __init__(self, count):
        self.entries = [[] for _ in range(count)]

    def brings(self, i, gradient):
        self.entries[i].append(gradient)

    def throws_away(self, i):
        self.entries[i] = []

    def multiplies(self, i, factor):
        self.entries[i] = [factor * g for g in self.entries[i]]

    def statistics(self):
        """(k, u, n)."""
        k = max(len(entries) for entries in self.entries)
        n = sum(float(sum(e).square().sum()) for e in self.entries if e)
        q = sum(float(g.square().sum()) for e in self.entries for g in e)
        return k, (n - q) * k / (k - 1) if k > 1 else 0.0, n


KINDS = {
    "in another thread": lambda loss, inputs: in_threads(loss.backward),
    "differentiable": lambda loss, inputs: loss.backward(create_graph=True),
    "with its graph retained": lambda loss, inputs: loss.backward(retain_graph=True),
    "of given inputs": lambda loss, inputs: loss.backward(inputs=inputs),
}


def one_pass(params, ledger, draw, generator, count=None):
    chosen = sorted(draw.sample(range(len(params)), count or draw.randint(1, len(params))))
    gradients = {i: torch.randn(params[i].shape, generator=generator, dtype=params[i].dtype) + 0.3 for i in chosen}
    if EMBEDDING in gradients:
        gradients[EMBEDDING][56:] = gradients[EMBEDDING][:8] = 0
    kind = KINDS.get(draw.choice(["plain"] * 4 + list(KINDS)), lambda loss, inputs: loss.backward())
    kind(sum((params[i] * g).sum() for i, g in gradients.items()), [params[i] for i in chosen])
    for i, g in gradients.items():
        ledger.brings(i, g)


def gradients_that_nobody_accumulates(params, draw):
    some = draw.sample(params, draw.randint(1, len(params)))
    torch.autograd.grad(sum((p * p).sum() for p in some), some, create_graph=True)


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("half-way")


def fail_half_way(params, draw):
    """Gradients of some arrive, those of the others never do: what is later in the graph comes first."""
    shuffled = draw.sample(params, len(params))
    cut = draw.randint(1, len(params) - 1)
    never = Fail.apply(sum((p * p).sum() for p in shuffled[:cut]))
    with pytest.raises(RuntimeError, match="half-way"):
        (never + sum((p * p).sum() for p in shuffled[cut:])).backward()
    assert any(p.grad is not None for p in shuffled[cut:])


def throw_away(params, ledger, draw, opt, counts):
    to_none, count = draw.random() < 0.5, draw.choice(counts)
    if count == len(params) and draw.random() < 0.5:
        opt.zero_grad(set_to_none=to_none)
    for i in draw.sample(range(len(params)), count):
        if params[i].grad is not None:  # in ways that the optimizer does not see
            if to_none:
                params[i].grad = None
            else:
                params[i].grad.detach_().zero_()
        ledger.throws_away(i)


def multiply(params, ledger, draw, ways):
    way = draw.choice(ways)
    for i in draw.sample(range(len(params)), draw.choice([1, 2, len(params)])):
        factor = draw.choice([0.5, 0.1, 3.0, -1.0])
        if params[i].grad is not None:
            params[i].grad.detach_()
            if way == "another tensor":
                params[i].grad = params[i].grad * factor
            else:
                (params[i].grad.data if way == "behind autograd" else params[i].grad).mul_(factor)
            ledger.multiplies(i, factor)


@pytest.mark.parametrize("granularity", ["global", "coordinate"])
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_any_history_gives_the_statistics_of_its_contributions(seed, granularity):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator, dtype=torch.float64)) for n in SIZES]
    opt = SGDOL(params, lr=1e-3, momentum=0.0, granularity=granularity)
    expected_u = expected_n = 0.0
    for _ in range(4):
        ledger = Ledger(len(params))
        for passes in range(draw.randint(1, 4)):
            if draw.random() < 0.1:
                fail_half_way(params, draw)
                throw_away(params, ledger, draw, opt, [len(params)])
            elif passes and draw.random() < 0.2:
                throw_away(params, ledger, draw, opt, [1, len(params)])
            if draw.random() < 0.3:
                multiply(params, ledger, draw, ["in place"])
            if draw.random() < 0.1:
                gradients_that_nobody_accumulates(params, draw)
            one_pass(params, ledger, draw, generator)
        while ledger.statistics()[0] < 2 or draw.random() < 0.3:  # one alone would be held
            one_pass(params, ledger, draw, generator, len(params))
        if draw.random() < 0.3:
            multiply(params, ledger, draw, ["behind autograd", "another tensor"])
        k, u, n = ledger.statistics()
        expected_u, expected_n = expected_u + u, expected_n + n
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing here is more than a factor
            opt.step()
        assert opt.diagnostics()["gradients"] == k
        opt.zero_grad()
    found = opt.param_groups[0]["totals"] / opt.param_groups[0]["lr"]
    expected = pytest.approx((expected_u, expected_n), rel=1e-9, abs=1e-9 * expected_n)
    assert (found[3].item(), found[4].item()) == expected
