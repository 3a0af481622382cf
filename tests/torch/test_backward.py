"""backward(): a batch in parts, in place of one loss.backward()."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pairs import pairwise
from torch import nn
from torch.nn.functional import l1_loss, mse_loss

from sgdol import SGDOL
from sgdol.torch import backward


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "a batch"


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Encoding(dict):
    """A mapping of its own type, as tokenizers return."""


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 1, generator=generator)


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def loss_of(net, x, y):
    return mse_loss(net(x), y)


@pairwise(samples=[1, 2, 5, 8], parts=[1, 2, 3, 7], reduction=["mean", "sum"])
def test_the_gradient_and_the_loss_are_those_of_the_whole_batch(samples, parts, reduction):
    x, y = data(samples)
    whole, split = model(), model()
    expected = mse_loss(whole(x), y, reduction=reduction)
    expected.backward()
    found = backward(lambda a, b: mse_loss(split(a), b, reduction=reduction), x, y, parts=parts, reduction=reduction)
    torch.testing.assert_close(found, expected.detach())
    for p, q in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


FORMS: dict[str, tuple[Any, Any]] = {
    "tensors": (lambda x, y: (x, y), lambda net, x, y: loss_of(net, x, y)),
    "tensors and texts": (lambda x, y: (x, y, list("abcd")), lambda net, x, y, _: loss_of(net, x, y)),
    "dict": (lambda x, y: ({"x": x, "y": y, "id": 3},), lambda net, b: loss_of(net, b["x"], b["y"])),
    "its own mapping": (lambda x, y: (Encoding(x=x, y=y),), lambda net, b: loss_of(net, b["x"], b["y"])),
    "tuple": (lambda x, y: ((x, (y,)),), lambda net, b: loss_of(net, b[0], b[1][0])),
    "list": (lambda x, y: ([x, y],), lambda net, b: loss_of(net, *b)),
    "named tuple": (lambda x, y: (Pair(x, y),), lambda net, b: loss_of(net, b.x, b.y)),
    "dataclass": (lambda x, y: (Batch(x, y),), lambda net, b: loss_of(net, b.x, b.y)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_is_split_along_its_first_axis(form):
    make, loss = FORMS[form]
    x, y = data(4)
    net, parts = model(), []

    def loss_fn(*part):
        parts.append(part)
        return loss(net, *part)

    assert torch.isclose(backward(loss_fn, *make(x, y)), loss_of(net, x, y))
    halves = [make(x[i : i + 2], y[i : i + 2]) for i in (0, 2)]
    if form == "tensors and texts":
        halves = [(*half[:2], list(texts)) for half, texts in zip(halves, ("ab", "cd"), strict=True)]
    assert repr(parts) == repr(halves)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, range], ids=lambda kind: kind.__name__)
def test_indices_stand_for_samples(kind):
    order = [2, 3, 4, 5, 6, 7, 8] if kind is range else [5, 3, 8, 1, 0, 2, 7]
    (x, y), net, seen = data(12), model(), []

    def loss_fn(indices):
        seen.append([int(i) for i in indices])
        return loss_of(net, x[indices], y[indices])

    found = backward(loss_fn, range(2, 9) if kind is range else kind(order))
    torch.testing.assert_close(found, loss_of(net, x[order], y[order]).detach())
    assert seen == [order[:3], order[3:]]


def test_its_passes_are_the_gradients_of_an_update():
    net = model()
    opt = SGDOL(net.parameters(), lr=0.1)
    backward(lambda a, b: loss_of(net, a, b), *data(8), parts=4)
    opt.step()
    assert (opt.diagnostics()["gradients"], opt.pending) == (4, False)


def test_something_else_may_run_the_passes():
    net, losses = model(), []
    x, y = data(4)
    backward(lambda a, b: loss_of(net, a, b), x, y, run=lambda loss: losses.append((1024 * loss).backward()))
    assert len(losses) == 2
    expected = torch.autograd.grad(1024 * loss_of(net, x, y), net.weight)[0]
    torch.testing.assert_close(net.weight.grad, expected)


X, Y = torch.ones(4, 3), torch.ones(4, 1)
CRITERION = r"function of the batch that calls the model, .*backward\(lambda x, y: criterion\(model\(x\), y\)"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (lambda net, f: (f, X, Y[:3]), {}, ValueError, r"batch\[0\] has 4 samples, batch\[1\] 3"),
        (lambda net, f: (f, X[:0], Y[:0]), {}, ValueError, "batch must have at least one sample"),
        (lambda net, f: (f, torch.tensor(1.0), 2), {}, ValueError, "batch has no tensor with a first axis"),
        (lambda net, f: (f,), {}, ValueError, r"batch has no tensor .*: write backward\(lambda x, y: "),
        (lambda net, f: (f, X, Y), {"parts": 0}, ValueError, "parts must be a whole number of passes"),
        (lambda net, f: (f, X, Y), {"parts": 1.5}, ValueError, "parts must be a whole number of passes"),
        (lambda net, f: (f, X, Y), {"reduction": "none"}, ValueError, 'reduction must be "mean" or "sum", .*\'none\''),
        (lambda net, f: (lambda x: net(x), X), {}, TypeError, r"must return the loss .* a tensor of shape \(2, 1\)"),
        (lambda net, f: (nn.MSELoss(), X, Y), {}, TypeError, CRITERION),
        (lambda net, f: (nn.MSELoss(), net(X), Y), {}, TypeError, CRITERION),
        (lambda net, f: (l1_loss, net(X), Y), {}, ValueError, r"batch\[0\] comes out of a model"),
        (lambda net, f: (l1_loss, X, X), {}, ValueError, "depends on no parameter: .* got <function l1"),
        (lambda net, f: (f(X, Y),), {}, TypeError, r"must be a function of the batch, got a tensor of shape"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(arguments, options, error, message):
    net = model()
    with pytest.raises(error, match=message):
        backward(*arguments(net, lambda a, b: loss_of(net, a, b)), **options)


@pytest.mark.parametrize("call", [1, 2])
def test_an_error_says_whether_gradients_of_earlier_parts_are_left(call):
    """SGDOL would count them as one more gradient of the batch that is run again."""
    net, calls = model(), iter(range(1, 3))

    def loss_fn(x):
        if next(calls) == call:
            raise MemoryError("not enough memory")
        return net(x).square().mean()

    with pytest.raises(MemoryError) as raised:
        backward(loss_fn, X)
    assert (net.weight.grad is not None) == (call == 2)
    assert len(getattr(raised.value, "__notes__", [])) == call - 1
