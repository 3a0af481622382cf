"""One backward in several graph tasks, and several backwards at once: what is counted is what was called."""

import threading
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sgdol import SGDOL, SGDOLFree
from sgdol.surrogate import statistics

SMALL, LARGE = 6, 80  # of the large one the weights are measured one by one
WAYS = [{}, {"granularity": "coordinate"}, {"estimator": "paper"}]


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
@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("options", WAYS)
def test_a_module_in_two_reentrant_segments_is_one_contribution_per_backward(options, width, head_inside, between):
    count, expected = train(Twice(width, None, head_inside), options, width, between)
    found_count, found = train(Twice(width, True, head_inside), options, width, between)
    assert found_count == count
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

            def closure(opt=opt, net=net, batch=batch):
                opt.zero_grad()
                losses = [net(x.clone().requires_grad_()).square().mean() / parts for x in batch]
                for loss in losses:
                    loss.backward()
                return sum(losses)

            opt.step(closure)
        found.append(opt.diagnostics())
    assert found[1]["gradients"] == parts
    assert found[1]["signal_to_noise"] == pytest.approx(found[0]["signal_to_noise"], rel=1e-9)
    assert found[1]["step_size"] == pytest.approx(found[0]["step_size"], rel=1e-9)


def test_a_segment_that_is_shared_only_from_a_later_pass_on_is_said():
    net = Twice(LARGE, True, False)
    opt = SGDOL(net.parameters(), lr=0.1, momentum=0.0)
    x = torch.randn(5, LARGE, dtype=torch.float64)
    net.head(net.block(x)).square().mean().backward()
    with pytest.warns(UserWarning, match="use_reentrant=False"):
        net(x.clone().requires_grad_()).square().mean().backward()
    opt.step()


def network(width):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)).double()


def at_once(losses, main=None):
    """Call backward() of all of them in threads of their own, at the same time; of one in this thread."""
    barrier = threading.Barrier(len(losses) + (main is not None))

    def work(loss):
        barrier.wait()
        loss.backward()

    threads = [threading.Thread(target=work, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    if main is not None:
        work(main)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("options", WAYS[:2])
def test_backwards_in_several_threads_at_once_are_one_gradient_each(width, options):
    net = network(width)
    opt = SGDOL(net.parameters(), lr=1e-3, momentum=0.0, **options)
    params = list(net.parameters())
    u = n = 0.0
    for step in range(15):
        batches = torch.randn(4, 16, width, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        each = [torch.autograd.grad(net(x).square().mean(), params) for x in batches]
        truth = statistics(torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in each]))
        u, n = u + truth.u.item(), n + truth.n.item()
        at_once([net(x).square().mean() / 4 for x in batches])
        opt.step()
        opt.zero_grad()
        assert opt.diagnostics()["gradients"] == 4
    totals = opt.param_groups[0]["totals"] / opt.param_groups[0]["lr"]
    assert (totals[3].item(), totals[4].item()) == pytest.approx((u, n), rel=1e-9, abs=1e-9 * n)


class Slow(torch.autograd.Function):
    """Waits in backward until somebody else is done."""

    @staticmethod
    def forward(ctx, x, begun, go_on):
        ctx.events = begun, go_on
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        begun, go_on = ctx.events
        begun.set()
        assert go_on.wait(60)
        return gradient, None, None


def test_another_threads_backward_during_the_loops_own_first_is_said_and_right_from_then_on():
    net = network(LARGE)
    params = list(net.parameters())
    opt = SGDOL(params, lr=1e-3, momentum=0.0)
    begun, go_on = threading.Event(), threading.Event()
    x, y = torch.randn(2, 4, LARGE, dtype=torch.float64)

    def other():
        assert begun.wait(60)
        net(y).square().mean().backward()
        go_on.set()

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.warns(UserWarning, match="several threads at once"):
        net[2:](Slow.apply(net[:2](x), begun, go_on)).square().mean().backward()
    thread.join()
    opt.step()
    opt.zero_grad()
    at_once([net(x).square().mean() / 2], main=net(y).square().mean() / 2)
    before = opt.param_groups[0]["totals"].clone()
    each = [torch.autograd.grad(net(one).square().mean(), params) for one in (x, y)]
    truth = statistics(torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in each]))
    opt.step()
    gained = (opt.param_groups[0]["totals"] - before) / opt.param_groups[0]["lr"]
    assert opt.diagnostics()["gradients"] == 2
    assert (gained[3].item(), gained[4].item()) == pytest.approx((truth.u.item(), truth.n.item()), rel=1e-9)
