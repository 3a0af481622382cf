"""backward(): a batch in parts, in place of one loss.backward()."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

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


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1, dtype=torch.float32)


def loss_of(net, x, y):
    return torch.nn.functional.mse_loss(net(x), y)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_the_gradient_and_the_loss_are_those_of_the_whole_batch(samples, parts):
    x, y = data(samples)
    whole, split = model(), model()
    expected = loss_of(whole, x, y)
    expected.backward()
    found = backward(lambda a, b: loss_of(split, a, b), x, y, parts=parts)
    torch.testing.assert_close(found, expected.detach())
    for p, q in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


FORMS: dict[str, tuple[Any, Any]] = {
    "tensors": (lambda x, y: (x, y), lambda net, x, y: loss_of(net, x, y)),
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
    net, sizes = model(), []

    def loss_fn(*part):
        assert [type(p) for p in part] == [type(p) for p in make(x, y)]
        sizes.append(len(next(t for t in _tensors(part))))
        return loss(net, *part)

    assert torch.isclose(backward(loss_fn, *make(x, y)), loss_of(net, x, y))
    assert sizes == [2, 2]


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Batch):
        yield from _tensors([value.x, value.y])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def test_a_list_of_texts_is_split_with_the_tensors():
    x, y = data(4)
    seen = []

    def loss_fn(x, y, texts):
        seen.append(texts)
        return loss_of(net, x, y)

    net = model()
    backward(loss_fn, x, y, ["a", "b", "c", "d"])
    assert seen == [["a", "b"], ["c", "d"]]


def test_its_passes_are_the_gradients_of_an_update():
    net = model()
    opt = SGDOL(net.parameters(), lr=0.1)
    x, y = data(8)
    backward(lambda a, b: loss_of(net, a, b), x, y, parts=4)
    opt.step()
    assert (opt.diagnostics()["gradients"], opt.pending) == (4, False)


def test_something_else_may_run_the_passes():
    net, losses = model(), []
    x, y = data(4)
    backward(lambda a, b: loss_of(net, a, b), x, y, run=lambda loss: losses.append((1024 * loss).backward()))
    assert len(losses) == 2
    expected = torch.autograd.grad(1024 * loss_of(net, x, y), net.weight)[0]
    torch.testing.assert_close(net.weight.grad, expected)


@pytest.mark.parametrize(
    ("batch", "parts", "error", "message"),
    [
        ((torch.ones(4, 3), torch.ones(5, 1)), 2, ValueError, r"batch\[0\] has 4 samples, batch\[1\] 5"),
        ((torch.ones(0, 3), torch.ones(0, 1)), 2, ValueError, "batch must have at least one sample"),
        ((torch.tensor(1.0), 2), 2, ValueError, "batch has no tensor with a first axis"),
        ((), 2, ValueError, r"batch has no tensor .*: write backward\(lambda x, y: "),
        ((torch.ones(4, 3), torch.ones(4, 1)), 0, ValueError, "parts must be a whole number of passes"),
        ((torch.ones(4, 3), torch.ones(4, 1)), 1.5, ValueError, "parts must be a whole number of passes"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(batch, parts, error, message):
    net = model()
    with pytest.raises(error, match=message):
        backward(lambda a, b: loss_of(net, a, b), *batch, parts=parts)


def test_a_loss_that_is_not_one_number_is_refused():
    net = model()
    with pytest.raises(TypeError, match=r"loss_fn must return the loss .* a tensor of shape \(2, 1\)"):
        backward(lambda a: net(a), torch.ones(4, 3))


@pytest.mark.parametrize("call", [1, 2])
def test_an_error_says_whether_gradients_of_earlier_parts_are_left(call):
    """SGDOL would count them as one more gradient of the batch that is run again."""
    net, calls = torch.nn.Linear(3, 1), iter(range(1, 3))

    def loss_fn(x):
        if next(calls) == call:
            raise MemoryError("not enough memory")
        return net(x).square().mean()

    with pytest.raises(MemoryError) as raised:
        backward(loss_fn, torch.ones(4, 3))
    assert (net.weight.grad is not None) == (call == 2)
    assert len(getattr(raised.value, "__notes__", [])) == call - 1
