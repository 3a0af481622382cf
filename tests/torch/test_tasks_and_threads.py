"""One backward in several graph tasks is one contribution; several backwards at the same time are refused."""

import functools
import threading
import warnings

import pytest
import torch
from closures import closure_of
from processes import in_threads
from torch.utils.checkpoint import checkpoint

from sgdol import SGDOL, SGDOLFree

SMALL, LARGE = 6, 130
"""Widths: the weights of the large layer have more than 2^14 numbers, and of such only a length is kept."""


class Twice(torch.nn.Module):
    """A layer that is used twice, each time in a segment of its own, and a head inside or outside of the last."""

    def __init__(self, width, reentrant, head_inside):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        self.reentrant, self.head_inside = reentrant, head_inside
        self.double()

    def block(self, x):
        return torch.tanh(self.layer(x))

    def last(self, x):
        return self.head(self.block(x)) if self.head_inside else self.block(x)

    def forward(self, x):
        for part in (self.block, self.last):
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return x if self.head_inside else self.head(x)


def loss_of(net, x):
    return net(x.clone().requires_grad_()).square().mean()


def train(net, options, width, between=lambda net: None):
    opt = SGDOL(net.parameters(), lr=0.1, momentum=0.0, **options)
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for _ in range(3):
                x = torch.randn(5, width, generator=generator, dtype=torch.float64).requires_grad_()
                (net(x).square().mean() / 3).backward()
            between(net)
            opt.step()
            opt.zero_grad()
    return opt.diagnostics()["gradients"], torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def clipped(net):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)


@pytest.mark.parametrize("between", [lambda net: None, clipped], ids=["as it is", "clipped"])
@pytest.mark.parametrize("head_inside", [False, True])
@pytest.mark.parametrize("options", [{}, {"granularity": "coordinate"}])
def test_a_module_in_two_reentrant_segments_is_one_contribution_per_backward(options, head_inside, between):
    _, expected = train(Twice(SMALL, None, head_inside), options, SMALL, between)
    count, found = train(Twice(SMALL, True, head_inside), options, SMALL, between)
    assert count == 3
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("head_inside", [False, True])
def test_without_a_rate_a_module_in_two_reentrant_segments_is_one_contribution_per_backward(head_inside, parts):
    found = []
    for reentrant in (None, True):
        net = Twice(SMALL, reentrant, head_inside)
        opt = SGDOLFree(net.parameters())
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            batch = torch.randn(parts, 5, SMALL, generator=generator, dtype=torch.float64)

            opt.step(closure_of(opt, lambda: (loss_of(net, x) / parts for x in batch)))  # noqa: B023
        found.append(opt.diagnostics())
    assert found[1]["gradients"] == parts
    assert found[1]["signal_to_noise"] == pytest.approx(found[0]["signal_to_noise"], rel=1e-9)
    assert found[1]["step_size"] == pytest.approx(found[0]["step_size"], rel=1e-9)


def test_a_large_module_in_two_reentrant_segments_is_said():
    net = Twice(LARGE, True, False)
    opt = SGDOL(net.parameters(), lr=0.1)
    x = torch.randn(5, LARGE, dtype=torch.float64)
    loss_of(net, x).backward()  # the first contribution is .grad itself
    with pytest.warns(UserWarning, match="use_reentrant=False"):
        loss_of(net, 2 * x).backward()
    opt.step()


def test_a_large_module_in_one_reentrant_segment_is_measured():
    class Once(Twice):
        def forward(self, x):
            return checkpoint(self.last, x, use_reentrant=True) if self.reentrant else self.last(x)

    found = [train(Once(LARGE, reentrant, True), {}, LARGE) for reentrant in (None, True)]
    assert [count for count, _ in found] == [3, 3]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-10, atol=1e-12)


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


def at_the_same_time(net, batch, *, before):
    """So many passes as usual, and then two more in threads of their own, neither of which ends first."""
    barrier = threading.Barrier(2)
    for x in batch[:before]:
        net(x).square().mean().backward()
    losses = [net.head(Meeting.apply(net.block(x), barrier)).square().mean() for x in batch[before:]]
    in_threads(*(loss.backward for loss in losses))
    return sum(losses)


refused = functools.partial(pytest.raises, RuntimeError, match=r"several threads at the same time.*one after the other")


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_passes_in_two_threads_at_the_same_time_are_refused_and_leave_nothing_behind(width, before):
    net = Twice(width, None, False)
    opt = SGDOL(net.parameters(), lr=0.1)
    at_the_same_time(net, torch.randn(before + 2, 5, width, dtype=torch.float64), before=before)
    with refused():
        opt.step()
    opt.zero_grad()
    for x in torch.randn(2, 5, width, dtype=torch.float64):
        net(x).square().mean().backward()
    opt.step()
    assert (opt.diagnostics()["updates"], opt.diagnostics()["gradients"]) == (1, 2)


@pytest.mark.parametrize("before", [0, 1])
def test_without_a_rate_passes_in_two_threads_at_the_same_time_are_refused(before):
    net = Twice(SMALL, None, False)
    opt = SGDOLFree(net.parameters())
    batch = torch.randn(before + 2, 5, SMALL, dtype=torch.float64)
    with refused():
        opt.step(lambda: at_the_same_time(net, batch, before=before))
