"""Small models with their batches, steps of a loop and closures, and what is said while they run."""

import functools
import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sgdol import SGDOL, SGDOLFree
from sgdol.torch import backward

OPTIMIZERS = {"SGDOL": functools.partial(SGDOL, lr=0.1), "SGDOLFree": SGDOLFree}
both = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
"""For what the two optimizers have in common: ``make(params, **options)``."""

GRANULARITIES = ["global", "group", "tensor", "coordinate"]
SOURCES = [("symmetric", 1), ("symmetric", 2), ("paper", 1)]
"""Estimators, with one backward per step, which both know, and with two."""


def network(dtype: torch.dtype = torch.float64, seed: int = 0, dropout: float = 0.2) -> nn.Sequential:
    """With all that a second run of a batch may change; ``network()[::4]`` is the two linear layers alone."""
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)]
    return nn.Sequential(*layers).to(dtype)


def plain(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Two linear layers and a tanh."""
    return network(dtype, seed)[::2]


def batch(t: int, rows: int = 12, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(t), dtype=torch.float64).to(dtype)


def objective(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (net(x) - x.sum(1, keepdim=True).sin()).square().mean()


def parts_of(net: Callable[[Tensor], Tensor], x: Tensor, parts: int = 2) -> Iterator[Tensor]:
    """The losses of the parts of a batch, each evaluated when it is asked for."""
    return (objective(net, part) / parts for part in x.chunk(parts))


def scalar(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.float64))


def flat(params: Iterable[Tensor]) -> Tensor:
    """A copy of all numbers."""
    return torch.cat([p.detach().reshape(-1) for p in params])


def one_step(opt: torch.optim.Optimizer, losses: Iterable[Tensor]) -> None:
    """One backward pass for each loss, a step, and no gradients any more."""
    for loss in losses:
        loss.backward()
    opt.step()
    opt.zero_grad()


def closure_of(
    opt: torch.optim.Optimizer, losses: Callable[[], Iterable[Tensor]], after: Callable[[], Any] = lambda: None
) -> Callable[[], Tensor]:
    """A closure with one backward pass for each loss.

    Args:
        opt: whose gradients are zeroed first.
        losses: called, and so the model run, whenever the closure is.
        after: called after the passes: counts calls, or does something to the gradients.
    """

    def closure() -> Tensor:
        opt.zero_grad()
        total = torch.zeros(())
        for loss in losses():
            loss.backward()
            total = total + loss.detach()
        after()
        return total

    return closure


def net_closure(opt, net, x: Tensor, parts: int = 2, after: Callable[[], Any] = lambda: None) -> Callable[[], Tensor]:
    return closure_of(opt, lambda: parts_of(net, x, parts), after)


def fit(net, opt, numbers: Iterable[int], parts: int = 2) -> list[float]:
    """The loop that both optimizers have, on batches of these numbers; the losses. Each has its own random numbers."""
    dtype, losses = next(iter(net.parameters())).dtype, []
    for t in numbers:
        torch.manual_seed(t)
        losses.append(float(backward(lambda x: objective(net, x), batch(t, dtype=dtype), parts=parts)))
        opt.step()
        opt.zero_grad()
    return losses


def pairs(net, opt, numbers: Iterable[int]) -> None:
    """One backward per step, of which every second updates."""
    dtype = next(iter(net.parameters())).dtype
    for t in numbers:
        one_step(opt, [objective(net, batch(t, dtype=dtype))])


def feed(opt: torch.optim.Optimizer, p: nn.Parameter, *gradients: Any) -> None:
    """A step for each of these gradients, written by hand."""
    for g in gradients:
        p.grad = torch.as_tensor(g, dtype=p.dtype).reshape(p.shape)
        opt.step()


def through_a_file(state: Any) -> Any:
    """As torch.save and torch.load give it back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def as_on_a_device(opt: SGDOL) -> SGDOL:
    """Nothing is decided by the host, but by torch.where, as on an accelerator."""
    opt._host = False
    return opt


@contextmanager
def said() -> Iterator[list[str]]:
    """The sentences that are said inside."""
    sentences: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield sentences
    sentences += [str(w.message) for w in caught]
