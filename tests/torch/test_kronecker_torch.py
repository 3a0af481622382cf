"""Both optimizers in the Kronecker metric: against the references, and what a run with it must survive."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from loops import closure_of, fit, flat, one_step, plain
from torch import nn

from sgdol import SGDOL, SGDOLFree
from sgdol.metrics import Kronecker
from sgdol.reference_free import sgdol_free
from sgdol.reference_kronecker import kronecker
from sgdol.torch import backward

SHAPES = [(4,), (2, 2, 2), (3, 4), (17, 2)]
SIZES = [4, 8, 12, 34]
D = sum(SIZES)


def parameters(start=None, dtype=torch.float64):
    pieces = np.split(np.zeros(D) if start is None else start, np.cumsum(SIZES)[:-1])
    return [nn.Parameter(torch.tensor(x.reshape(shape), dtype=dtype)) for x, shape in zip(pieces, SHAPES, strict=True)]


RNG = np.random.default_rng(1)
MIXING = RNG.normal(size=(D, D)) / D**0.5 * np.logspace(0, 1, D)
SHIFTS, START = 0.3 * RNG.normal(size=(40, 2, D)), RNG.normal(size=D)


def closure_at(opt, params, t, scale=1.0):
    def losses():
        x = torch.cat([p.reshape(-1) for p in params])
        for shift in SHIFTS[t]:
            mixing, moved = (torch.tensor(v, dtype=x.dtype) for v in (MIXING, shift))
            yield scale * ((x @ mixing).square().sum() / 2 + moved @ x) / 2

    return closure_of(opt, losses)


@pytest.mark.parametrize("first", [1.0, 100.0], ids=["", "the first batch is an outlier"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"momentum": 0.0}], ids=str)
def test_sgdol_free_equals_the_reference(options, first):
    def oracle(t, x):
        y, scale = x @ MIXING, 1.0 if t else first
        values = [scale * (np.sum(y**2) / 2 + shift @ x) for shift in SHIFTS[t]]
        return float(np.mean(values)), np.array([scale * (MIXING @ y + shift) for shift in SHIFTS[t]])

    def metric(past, present, tensors):
        return kronecker(past, present, SHAPES)

    truth = sgdol_free(oracle, START, len(SHIFTS), tensors=SIZES, metric=metric, **options)
    params = parameters(START)
    opt = SGDOLFree(params, metric="kronecker", **options)
    for t in range(len(SHIFTS)):
        opt.step(closure_at(opt, params, t, 1.0 if t else first))
        np.testing.assert_allclose(flat(params).numpy(), truth.iterates[t + 1], rtol=1e-9, atol=1e-9)
    assert opt.diagnostics()["evaluations"] == truth.evaluations
    averages = flat(opt.state[p]["average"] for p in params).numpy()
    np.testing.assert_allclose(averages, truth.averages[-1], rtol=1e-9, atol=1e-9)


MANY = [(5,), (3, 4), (2, 2, 2), (3, 4), (258, 130), (6,), (17, 2), (4, 2), (3, 4), (2, 258), (2, 258)]


@dataclass(frozen=True)
class Same(Kronecker):
    """To torch a metric that it knows nothing of: every tensor is by itself, and D is what the core makes."""


@pytest.mark.parametrize("rates", [(1.0, 1.0), (1.0, 0.25)], ids=str)
@pytest.mark.parametrize("make", [SGDOLFree, SGDOL])
def test_matrices_together_and_alone_are_measured_as_the_core_says(make, rates):
    """Small tensors lie in one entry, those of one shape next to each other; a large one lies alone, in blocks."""
    found = []
    for metric in ("kronecker", Same()):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in MANY]
        unit = 1.0 if make is SGDOLFree else 1e-4  # of the rates: the loss has a smoothness of about 2,000
        halves = zip((params[:6], params[6:]), rates, strict=True)
        opt = make([{"params": some, "lr": unit * rate} for some, rate in halves], lr=unit, metric=metric)
        targets = [torch.randn(2, *shape, dtype=torch.float64) for shape in MANY]
        for t in range(22):

            def losses(t=t, params=params, targets=targets):
                for part in range(2):
                    # One tensor has no gradient in some updates, and one has none in the second pass.
                    used = [i for i in range(len(MANY)) if not (i == 3 and t % 4 == 1) and not (i == 7 and part)]
                    pulls = ((params[i] - targets[i][part]) * (1 + t % 3) for i in used)
                    yield sum((x.sum(-1) ** 2).sum() + (x**2).sum() for x in pulls) / 2

            opt.step(closure_of(opt, losses))
        found.append(flat(params))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_factors_of_half_precision_parameters_are_in_float32():
    net = plain(torch.bfloat16)
    opt = SGDOLFree(net.parameters(), metric="kronecker")
    fit(net, opt, range(5))
    held = opt.state[net[0].weight]
    names = ("left", "right", "left_basis", "right_basis", "rows", "columns")
    assert {held[f"metric.{name}"].dtype for name in names} == {torch.float32}
    assert net[0].weight.isfinite().all()


def fitted(net, inputs, targets, steps=40, **options):
    """The losses of a fit of random targets, and the parameters after it."""
    opt, losses = SGDOLFree(net.parameters(), **options), []
    for _ in range(steps):
        losses.append(backward(lambda x, y: (net(x) - y).abs().square().mean(), inputs, targets).item())
        one_step(opt, [])
    return losses, opt


def rows(*shape, kind=torch.float32):
    return torch.randn(16, *shape, generator=torch.Generator().manual_seed(2)).to(kind)


class Weights(nn.Module):
    """Parameters of some shapes, with some noise."""

    def __init__(self, *shapes):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self, noise):
        return torch.cat([w.reshape(-1) for w in self.weights]) + noise


@pytest.mark.parametrize(
    "shapes", [[(5,), (7,)], [(), (1,)], [(1, 1)], [(1, 6), (6, 1)], [(520, 513)], [(0,), (0, 3), (4,)]], ids=str
)
def test_the_default_is_rms_where_there_is_no_side_to_turn(shapes):
    found = []
    for options in ({}, {"metric": "rms"}):
        net = Weights(*shapes)
        losses, _ = fitted(net, 0.1 * rows(1), torch.zeros(16, 1), steps=12, **options)
        found.append(flat(net.weights))
        assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(*found)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


KINDS = {
    "convolution, 1-d": (lambda: nn.Conv1d(3, 4, 3), rows(3, 6)),
    "convolution, 2-d": (lambda: nn.Conv2d(3, 4, 3), rows(3, 6, 6)),
    "convolution, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), rows(4, 6, 6)),
    "convolution, 3-d": (lambda: nn.Conv3d(2, 3, 2), rows(2, 4, 4, 4)),
    "recurrent": (Recurrent, rows(5, 3)),
    "embedding of 2,000 words": (lambda: nn.Embedding(2000, 4), torch.arange(16)),
    "embedding of 9 words": (lambda: nn.Embedding(9, 16), torch.arange(16) % 9),
    "one side above 512": (lambda: nn.Linear(520, 6), rows(520)),
    "bfloat16": (lambda: nn.Linear(6, 5, dtype=torch.bfloat16), rows(6, kind=torch.bfloat16)),
    "float64": (lambda: nn.Linear(6, 5, dtype=torch.float64), rows(6, kind=torch.float64)),
    "complex": (lambda: nn.Linear(6, 5, dtype=torch.complex64), rows(6, kind=torch.complex64)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_trains_every_kind_of_layer(kind):
    """The best loss of 40 steps, of targets that the layer can nearly fit, is at most a third of the first."""
    make, inputs = KINDS[kind]
    torch.manual_seed(0)
    teacher, net = make(), make()
    with torch.no_grad():
        targets = teacher(inputs)
    losses, opt = fitted(net, inputs, targets)
    assert min(losses) < losses[0] / 3
    assert max(losses) < 1.5 * losses[0]
    assert all(v.isfinite().all() for held in opt.state.values() for v in held.values())
