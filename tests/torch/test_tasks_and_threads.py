"""One backward in several graph tasks is one contribution; several backwards at the same time are refused."""

import threading

import pytest
import torch
from loops import both, closure_of, flat
from pairs import pairwise
from processes import in_threads
from torch.utils.checkpoint import checkpoint

from sgdol import SGDOL, SGDOLFree

SMALL, LARGE = 6, 130
"""Widths: the weights of the large layer have more than 2^14 numbers, and of such only a length is kept."""


class Segments(torch.nn.Module):
    """A layer that is used several times, each time in a segment of its own, and a head in or outside of the last."""

    def __init__(self, width, reentrant, head_inside, uses=2):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        self.reentrant, self.head_inside, self.uses = reentrant, head_inside, uses
        self.double()

    def block(self, x):
        return torch.tanh(self.layer(x))

    def last(self, x):
        return self.head(self.block(x)) if self.head_inside else self.block(x)

    def forward(self, x):
        x = x.clone().requires_grad_()
        for part in [self.block] * (self.uses - 1) + [self.last]:
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return x if self.head_inside else self.head(x)


def draws(count, width):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 5, width, generator=generator, dtype=torch.float64)


def trained(make, net, width, parts, clip=None, **options):
    """After four steps, whose warnings are errors: how many gradients there were, and the parameters."""
    opt = make(net.parameters(), **options)
    for batch in draws(4 * parts, width).split(parts):
        after = (lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), clip)) if clip else lambda: None
        opt.step(closure_of(opt, lambda batch=batch: (net(x).square().mean() / parts for x in batch), after))
    return opt.diagnostics()["gradients"], flat(net.parameters())


@both
@pairwise(parts=[2, 3], head_inside=[False, True], clip=[None, 0.01], granularity=["global", "coordinate"])
def test_a_module_in_two_reentrant_segments_is_one_contribution_per_backward(
    make, parts, head_inside, clip, granularity
):
    options = {} if make is SGDOLFree else {"granularity": granularity}
    found = [trained(make, Segments(SMALL, r, head_inside), SMALL, parts, clip, **options) for r in (None, True)]
    assert [count for count, _ in found] == [parts] * 2
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-8, atol=1e-10)


def test_a_large_module_in_two_reentrant_segments_is_said():
    net = Segments(LARGE, True, False)
    opt = SGDOL(net.parameters(), lr=0.1)
    x = draws(1, LARGE)[0]
    net(x).square().mean().backward()  # the first contribution is .grad itself
    with pytest.warns(UserWarning, match="use_reentrant=False"):
        net(2 * x).square().mean().backward()
    opt.step()


@both
def test_a_large_module_in_one_reentrant_segment_is_measured(make):
    found = [trained(make, Segments(LARGE, reentrant, True, uses=1), LARGE, 3) for reentrant in (None, True)]
    assert [count for count, _ in found] == [3, 3]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-8, atol=1e-10)


class Meeting(torch.autograd.Function):
    """Backwards wait for each other here."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.barrier.wait(60)
        return gradient, None


@both
@pairwise(before=[0, 1], width=[SMALL, LARGE])
def test_passes_in_two_threads_at_the_same_time_are_refused_and_leave_nothing_behind(make, before, width):
    """After so many passes as usual there are two more in threads of their own, neither of which ends first."""
    net = Segments(width, None, False)
    opt = make(net.parameters())
    batch = draws(before + 2, width)

    def at_the_same_time():
        barrier = threading.Barrier(2)
        for x in batch[:before]:
            net(x).square().mean().backward()
        losses = [net.head(Meeting.apply(net.block(x), barrier)).square().mean() for x in batch[before:]]
        in_threads(*(loss.backward for loss in losses))
        return sum(losses)

    with pytest.raises(RuntimeError, match=r"several threads at the same time.*one after the other"):
        opt.step(at_the_same_time)
    opt.zero_grad()
    opt.step(closure_of(opt, lambda: (net(x).square().mean() for x in batch[:2])))
    assert (opt.diagnostics()["updates"], opt.diagnostics()["gradients"]) == (1, 2)
