"""The average in place of the iterate: what to evaluate and to save, while training goes on from the iterate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sgdol.torch._log import inner

__all__ = ["Average", "put_back"]


class Average:
    """Swaps the averaged weights in and out, for trainers that say when by calling one function and then another.

    ``opt.averaged()`` is the context manager for a program of one's own. Here nothing is undone by itself: what is in
    the parameters when a trainer is forgotten stays there.

    >>> from sgdol import SGDOL
    >>> x = torch.nn.Parameter(torch.zeros(1))
    >>> opt, average = SGDOL([x], lr=0.5, momentum=0, averaging=0), Average()
    >>> for _ in range(2):
    ...     for noise in (-0.25, 0.25):
    ...         ((0.5 * (x - 1).square() + noise * x).sum() / 2).backward()
    ...     opt.step(); opt.zero_grad()
    >>> with average.inside(opt):
    ...     x.item()  # the mean of 0.5 and 0.75
    0.625
    >>> x.item()
    0.75
    """

    def __init__(self) -> None:
        self._optimizer: Any = None
        self._iterate: dict[Tensor, Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether the average is in the parameters."""
        return self._optimizer is not None

    def enter(self, optimizer: Any) -> None:
        """Put the average in, unless it is in or there is none."""
        found = inner(optimizer)
        if self.active or found is None or found.defaults.get("averaging") is None:
            return
        params = [p for group in found.param_groups for p in group["params"]]
        iterate = {p: p.detach().clone() for p in params}
        with found.averaged():
            averages = [p.detach().clone() for p in params]
        _copy(params, averages)
        self._optimizer, self._iterate = found, iterate

    def leave(self) -> None:
        """Put the iterate back, unless it is there."""
        if not self.active:
            return
        _copy(list(self._iterate), list(self._iterate.values()))
        if hasattr(self._optimizer, "moved"):  # SGDOLFree notices; these are the weights that it left
            self._optimizer.moved()
        self._optimizer, self._iterate = None, {}

    @contextmanager
    def inside(self, optimizer: Any) -> Iterator[None]:
        """The average is in; afterwards it is as it was before."""
        if self.active:
            yield
            return
        self.enter(optimizer)
        try:
            yield
        finally:
            self.leave()

    def iterate(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """A copy of the weights that training goes on from, whatever is in the parameters."""
        return {
            name: self._iterate.get(p, p).detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }


def put_back(model: torch.nn.Module, iterate: Mapping[str, Tensor]) -> None:
    """Write the weights of :meth:`Average.iterate` into the model."""
    params = dict(model.named_parameters())
    missing = sorted(iterate.keys() - params.keys())
    if missing:
        raise ValueError(f"the checkpoint's iterate does not fit: the model has no parameter {missing[0]!r}")
    _copy([params[name] for name in iterate], list(iterate.values()))


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
