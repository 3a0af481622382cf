"""Parameters that are not ordinary tensors from the start: lazy ones, subclasses, others of another shape."""

import pytest
import torch
from closures import closure_of, one_step
from torch._subclasses.fake_tensor import FakeTensorMode

from sgdol import SGDOL, SGDOLFree

options = pytest.mark.parametrize("options", [{}, {"granularity": "coordinate"}, {"averaging": 8}])


class Marked(torch.Tensor):
    """A subclass that only has another name."""


def train(net, opt, steps=4):
    """Two passes a step, on the same data for all; the numbers of gradients."""
    generator = torch.Generator().manual_seed(0)
    counts = []
    for _ in range(steps):
        one_step(opt, (net(torch.randn(6, 5, generator=generator)).square().mean() for _ in range(2)))
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
            one_step(opt, ((x * torch.randn(size)).sum() for _ in range(2)))
    assert x.shape == (5,)
    assert opt.diagnostics()["updates"] == 6


def test_data_of_another_shape_after_zero_grad_raise_and_are_trained_from_the_next_zero_grad_on():
    """Autograd keeps the accumulator that the hook is in front of, and knows its shape: it raises, not we."""
    x = torch.nn.Parameter(torch.ones(3))
    opt = SGDOL([x], lr=0.1)
    opt.zero_grad()
    x.data = torch.ones(5)
    with pytest.raises(RuntimeError, match="shape"):
        (x * torch.randn(5)).sum().backward()
    opt.zero_grad()
    for _ in range(2):
        (x * torch.randn(5)).sum().backward()
    opt.step()
    assert opt.diagnostics()["gradients"] == 2


@pytest.mark.filterwarnings("ignore:SGDOL was given the same gradient twice")
def test_another_shape_between_the_passes_of_a_step_is_refused():
    x, y = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    opt = SGDOL([x, y], lr=0.1)
    (x * y).sum().backward()
    x.data, x.grad = torch.ones(5), None
    with pytest.raises(RuntimeError, match="between the backward passes of one step"):
        y.sum().backward()
    opt.zero_grad()
    for _ in range(2):
        (x.sum() * y).sum().backward()
    opt.step()
    assert opt.diagnostics()["gradients"] == 2


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.filterwarnings("ignore:SGDOL got one backward")
def test_a_parameter_without_numbers_changes_nothing_in_a_metric(passes):
    found = []
    for empty in (0, 1):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        nothing = [torch.nn.Parameter(torch.zeros(0)) for _ in range(empty)]
        opt = SGDOL([*net.parameters(), *nothing], lr=0.1, metric="rms")
        for _ in range(6 // passes):
            one_step(
                opt, (sum([net(torch.randn(4, 3)).square().mean(), *(p.sum() for p in nothing)]) for _ in range(passes))
            )
        found.append(net.weight.detach())
    assert torch.equal(*found)


def test_fake_tensors_are_refused_by_name():
    with FakeTensorMode(), pytest.raises(TypeError, match=r"SGDOL cannot train .* FakeTensor"):
        SGDOL(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    with FakeTensorMode(), pytest.raises(TypeError, match=r"SGDOLFree cannot train .* FakeTensor"):
        SGDOLFree(torch.nn.Linear(2, 1).parameters())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_autograd_is_refused_by_name():
    torch._dynamo.reset()
    net = torch.nn.Linear(4, 1)
    opt = SGDOL(net.parameters(), lr=0.1)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for x in torch.randn(2, 3, 4):
            net(x).square().mean().backward()
    with pytest.raises(NotImplementedError, match="compiled autograd"):
        opt.step()
    opt.zero_grad()
    for _ in range(2):
        net(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    assert opt.diagnostics()["gradients"] == 2


def halves(opt, loss_of, batch):
    """A closure of two passes."""
    return closure_of(opt, lambda: [loss_of(part) / 2 for part in batch.chunk(2)])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_autograd_is_refused_by_name_without_a_rate():
    torch._dynamo.reset()
    net = torch.nn.Linear(4, 1)
    opt = SGDOLFree(net.parameters())
    closure = halves(opt, lambda x: net(x).square().mean(), torch.randn(6, 4))

    def compiled():
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            return closure()

    with pytest.raises(NotImplementedError, match="SGDOLFree does not run under compiled autograd"):
        opt.step(compiled)
    opt.step(closure)
    assert opt.diagnostics()["gradients"] == 2


def test_lazy_parameters_are_taken_without_a_rate():
    net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 1))
    opt = SGDOLFree(net.parameters())
    for _ in range(4):
        opt.step(halves(opt, lambda x: net(x).square().mean(), torch.randn(6, 3)))
    assert (opt.diagnostics()["gradients"], opt.diagnostics()["updates"]) == (2, 4)


def test_without_a_rate_data_of_another_shape_are_trained_after_a_restart():
    x = torch.nn.Parameter(torch.ones(3))
    opt = SGDOLFree([x])
    closure = halves(opt, lambda part: (x.sum() * part).square().mean(), torch.randn(6))
    opt.step(closure)
    x.data = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"parameter 0 is of torch.Size\(\[5\]\) now.*restart"):
        opt.step(closure)
    opt.restart()
    opt.step(closure)
    assert opt.diagnostics()["updates"] == 1
