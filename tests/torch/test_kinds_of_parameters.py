"""Parameters that are not ordinary tensors from the start: lazy ones, subclasses, others of another shape."""

import pytest
import torch

from sgdol import SGDOL

CASES = [{}, {"granularity": "coordinate"}, {"estimator": "paper", "averaging": 8}]
options = pytest.mark.parametrize("options", CASES)


class Marked(torch.Tensor):
    """A subclass that only has another name."""


def train(net, opt, steps=4):
    """Two passes a step, on the same data for all; the numbers of gradients."""
    generator = torch.Generator().manual_seed(0)
    counts = []
    for _ in range(steps):
        for _ in range(2):
            net(torch.randn(6, 5, generator=generator)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        counts.append(opt.diagnostics()["gradients"])
    assert not opt.pending
    return counts


@options
def test_lazy_parameters_are_taken_and_counted_from_their_first_pass_on(options):
    net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 1))
    opt = SGDOL(net.parameters(), lr=0.1, **options)
    torch.manual_seed(1)
    assert train(net, opt) == [2] * 4
    assert opt.diagnostics()["updates"] == 4


@options
def test_a_subclass_of_tensor_is_trained_as_the_tensor_is(options):
    found = []
    for kind in (torch.Tensor, Marked):
        torch.manual_seed(0)
        x = torch.nn.Parameter(torch.randn(5).as_subclass(kind))
        assert train(lambda batch, x=x: batch @ x, SGDOL([x], lr=0.1, **options)) == [2] * 4
        assert isinstance(x, kind)
        found.append(x.detach().as_subclass(torch.Tensor))
    assert torch.equal(*found)


@options
def test_data_of_another_shape_are_trained_from_zero_grad_on(options):
    x = torch.nn.Parameter(torch.ones(3))
    opt = SGDOL([x], lr=0.1, **options)
    for size in (3, 5):
        x.data = torch.ones(size)
        opt.zero_grad()
        for _ in range(3):
            for _ in range(2):
                (x * torch.randn(size)).sum().backward()
            opt.step()
            opt.zero_grad()
    assert x.shape == (5,)
    assert opt.diagnostics()["updates"] == 6
