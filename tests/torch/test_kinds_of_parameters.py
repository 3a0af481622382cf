"""Parameters that are not ordinary tensors from the start: lazy, narrow, complex, frozen, of another shape."""

import pytest
import torch
from loops import GRANULARITIES, SOURCES, batch, both, closure_of, fit, flat, net_closure, network, one_step, plain
from pairs import pairwise
from torch import nn

from sgdol import SGDOL, SGDOLFree

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # pairs are among what is tested

options = pytest.mark.parametrize("options", [{}, {"granularity": "coordinate"}, {"averaging": 8}])


@both
def test_lazy_parameters_are_taken_and_counted_from_their_first_pass_on(make):
    torch.manual_seed(0)
    net = nn.Sequential(nn.LazyLinear(4, dtype=torch.float64), nn.Linear(4, 1).double())
    opt = make(net.parameters())
    for t in range(4):
        opt.step(net_closure(opt, net, batch(t)))
        assert opt.diagnostics()["gradients"] == 2
    assert opt.diagnostics()["updates"] == 4


class Marked(torch.Tensor):
    """A subclass that only has another name."""


@both
def test_a_subclass_of_tensor_is_trained_as_the_tensor_is(make):
    found = []
    for kind in (torch.Tensor, Marked):
        torch.manual_seed(0)
        x = nn.Parameter(torch.randn(5, 1, dtype=torch.float64).as_subclass(kind))
        opt = make([x])
        for t in range(4):
            opt.step(net_closure(opt, lambda part, x=x: part @ x, batch(t)))
        assert isinstance(x, kind)
        found.append(x.detach().as_subclass(torch.Tensor))
    assert torch.equal(*found)


@both
def test_frozen_parameters_and_those_without_a_gradient_stay(make):
    net = network()
    net[0].bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(2))
    before = net[0].bias.detach().clone()
    opt = make([*net.parameters(), unused], weight_decay=0.1)
    fit(net, opt, range(8))
    assert torch.equal(net[0].bias, before)
    assert torch.equal(unused, torch.ones(2))
    assert unused not in opt.state


@both
def test_maximising_is_minimising_the_negative(make):
    found = []
    for sign, options in ((1.0, {}), (-1.0, {"maximize": True})):
        torch.manual_seed(0)
        x = nn.Parameter(torch.randn(5, dtype=torch.float64))
        opt = make([x], **options)
        for t in range(20):

            def losses(x=x, sign=sign, t=t):
                return (sign * (half @ x - 1).square().mean() for half in batch(t).chunk(2))

            opt.step(closure_of(opt, losses))
        found.append(x.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_without_a_rate_narrow_parameters_learn_as_wide_ones_do(dtype):
    """The losses of the last steps agree with those in float64, which themselves have fallen by a tenth and more."""
    results = []
    for kind in (torch.float64, dtype):
        net = network(kind, dropout=0.0)
        opt = SGDOLFree(net.parameters())
        losses = fit(net, opt, range(80))
        results.append(sum(losses[-20:]))
        assert results[-1] < 0.9 * sum(losses[:20])
    assert results[1] == pytest.approx(results[0], rel=0.03)
    for p in net.parameters():
        assert opt.state[p]["momentum"].dtype == opt.state[p]["average"].dtype == torch.float32
        assert all(v.dtype == torch.float32 for v in opt.state[p].values() if v.dim())


@pairwise(granularity=GRANULARITIES, dtype=[torch.bfloat16, torch.float16], source=SOURCES)
def test_half_precision_follows_full_precision(granularity, dtype, source):
    """Sums are kept in float32 or wider; what remains is the rounding of parameters and gradients themselves."""
    results, (estimator, k) = [], source
    for kind in (torch.float32, dtype):
        net = plain(kind)
        opt = SGDOL(net.parameters(), lr=0.1, granularity=granularity, estimator=estimator)
        for t in range(20 // (3 - k)):
            one_step(opt, ((net(part) - 1).square().mean() / k for part in batch(t, dtype=kind).chunk(k)))
        results.append(flat(net.parameters()).float())
        for state in [*opt.state.values(), *opt.param_groups]:
            sums = [v for key, v in state.items() if key.startswith("learner.") and isinstance(v, torch.Tensor)]
            assert all(value.dtype in (torch.float32, torch.float64) for value in sums)
    torch.testing.assert_close(results[1], results[0], rtol=0.05, atol=5 * torch.finfo(dtype).eps)


def test_mixed_types_zero_dimensional_and_empty_tensors_in_one_optimizer():
    params = [
        nn.Parameter(torch.ones((), dtype=torch.float64)),
        nn.Parameter(torch.ones(0, 3)),
        nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(2, dtype=torch.complex64)),
    ]
    for granularity in GRANULARITIES:
        opt = SGDOL(params, lr=0.01, granularity=granularity)
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            opt.step()
        assert opt.diagnostics()["updates"] == 2
    assert all(torch.isfinite(torch.view_as_real(p) if p.is_complex() else p).all() for p in params)


def test_without_a_rate_complex_parameters_are_pairs_of_real_ones():
    target = torch.view_as_real(torch.tensor([1 + 2j, -0.5j], dtype=torch.complex128))
    noise = torch.randn(30, 2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    pairs = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    for x, view in ((z, torch.view_as_real), (pairs, lambda v: v)):
        opt = SGDOLFree([x])
        for t in range(30):

            def losses(x=x, view=view, t=t):
                return (((view(x) - target).square().sum() + (view(x) * part).sum()) / 2 for part in noise[t])

            opt.step(closure_of(opt, losses))
    torch.testing.assert_close(torch.view_as_real(z.detach()), pairs.detach(), rtol=1e-12, atol=1e-12)


@options
def test_data_of_another_shape_are_trained_from_zero_grad_on(options):
    x = nn.Parameter(torch.ones(3))
    opt = SGDOL([x], lr=0.1, **options)
    for size in (3, 5):
        x.data = torch.ones(size)
        opt.zero_grad()
        for _ in range(3):
            one_step(opt, ((x * torch.randn(size)).sum() for _ in range(2)))
    assert x.shape == (5,)
    assert opt.diagnostics()["updates"] == 6


@pytest.mark.filterwarnings("ignore:SGDOL was given the same gradient twice")
def test_data_of_another_shape_in_the_middle_of_a_step_raise_and_are_trained_from_the_next_zero_grad_on():
    """After zero_grad autograd keeps the accumulator that the hook is in front of: autograd raises, not we."""
    x, y = (nn.Parameter(torch.ones(3)) for _ in range(2))
    opt = SGDOL([x, y], lr=0.1)
    opt.zero_grad()
    x.data = torch.ones(5)
    with pytest.raises(RuntimeError, match="shape"):
        (x * torch.randn(5)).sum().backward()
    opt.zero_grad()
    (x.sum() * y).sum().backward()
    x.data, x.grad = torch.ones(4), None
    with pytest.raises(RuntimeError, match="between the backward passes of one step"):
        y.sum().backward()
    opt.zero_grad()
    one_step(opt, ((x.sum() * y).sum() for _ in range(2)))
    assert opt.diagnostics()["gradients"] == 2


def test_without_a_rate_data_of_another_shape_are_trained_after_a_restart():
    x = nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = SGDOLFree([x])
    closure = net_closure(opt, lambda part: x.sum() * part[:, :1], batch(0))
    opt.step(closure)
    x.data = torch.ones(5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"parameter 0 is of torch.Size\(\[5\]\) now.*restart"):
        opt.step(closure)
    opt.restart()
    opt.step(closure)
    assert opt.diagnostics()["updates"] == 1


@pytest.mark.parametrize("passes", [1, 2])
def test_a_parameter_without_numbers_changes_nothing_in_a_metric(passes):
    found = []
    for empty in (0, 1):
        net = plain()
        nothing = [nn.Parameter(torch.zeros(0)) for _ in range(empty)]
        opt = SGDOL([*net.parameters(), *nothing], lr=0.1, metric="rms")
        for t in range(6 // passes):
            halves = batch(t).chunk(passes)
            one_step(opt, (sum([net(half).square().mean(), *(p.sum() for p in nothing)]) for half in halves))
        found.append(flat(net.parameters()))
    assert torch.equal(*found)


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2])
def test_compiled_steps_equal_plain_ones_and_never_recompile(k):
    torch._dynamo.reset()
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for compiles in (False, True):
            net = plain()
            opt = SGDOL(net.parameters(), lr=0.1)
            step = torch.compile(opt.step, backend="eager") if compiles else opt.step
            for t in range(6):
                for part in batch(t).chunk(k):
                    (net(part) - 1).square().mean().div(k).backward()
                opt.param_groups[0]["lr"] = 0.1 / (t + 1)
                step()
                opt.zero_grad()
            found.append(flat(net.parameters()))
    assert torch.equal(*found)


@both
def test_a_compiled_model_is_seen_as_the_plain_one_is(make):
    """SGDOLFree in the Kronecker metric, its default."""
    torch._dynamo.reset()
    found = []
    for wrap in (lambda net: net, lambda net: torch.compile(net, backend="aot_eager")):
        net = plain()
        opt = make(net.parameters())
        fit(wrap(net), opt, range(8))
        assert opt.diagnostics()["gradients"] == 2
        found.append(flat(net.parameters()))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@both
def test_compiled_autograd_is_refused_by_name(make):
    torch._dynamo.reset()
    net = nn.Linear(5, 1).double()
    opt = make(net.parameters())
    closure = net_closure(opt, net, batch(0))

    def compiled():
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            return closure()

    with pytest.raises(NotImplementedError, match="compiled autograd"):
        opt.step(compiled)
    opt.step(closure)
    assert opt.diagnostics()["gradients"] == 2
