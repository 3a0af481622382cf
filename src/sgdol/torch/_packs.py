"""Small tensors laid end to end: one kernel for all of them, where a kernel for each would cost more than its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from sgdol.torch._world import ORDINARY

__all__ = ["LARGEST", "Pack", "pack"]

LARGEST = 1 << 12
"""A tensor of at most so many numbers is small; its gradients, too, are kept until many can be measured at once."""

FEWEST = 12
"""Fewer small tensors than this are quicker one by one."""


class Pack:
    """Where some small tensors are in a vector that holds them all.

    Args:
        rows: which tensors of a list they are.
        sizes: how many numbers each of them has, at least one.
    """

    def __init__(self, rows: list[int], sizes: list[int]) -> None:
        self.rows = rows
        self._sizes = np.asarray(sizes)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def chosen(self, values: Sequence[Any]) -> list[Any]:
        """Those of a list that belong to the tensors."""
        return [values[i] for i in self.rows]

    @staticmethod
    def laid(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Small tensors end to end, in new memory."""
        return _flatten_dense_tensors(tensors).detach().to(dtype)

    def repeated(self, numbers: Sequence[float]) -> Tensor:
        """One number per tensor, for each of its entries, in float64."""
        return torch.from_numpy(np.repeat(np.asarray(numbers, dtype=np.float64), self._sizes))

    def sums(self, a: Tensor, b: Tensor) -> Tensor:
        """<a, b> of each tensor, taken in float64."""
        a, b = (a.to(torch.float64), b.to(torch.float64)) if a is not b else (a.to(torch.float64),) * 2
        return torch.from_numpy(np.add.reduceat((a * b).numpy(), self._starts))

    def merged(self, mine: Tensor, theirs: Tensor, others: list[int]) -> Tensor:
        """One number per tensor of the whole list, from those of these tensors and those of the others."""
        if not others:
            return mine
        together = mine.new_empty(len(self.rows) + len(others))
        together[self.rows] = mine
        together[others] = theirs
        return together

    def write(self, vector: Tensor, tensors: Sequence[Tensor]) -> None:
        """Put what was laid end to end back into tensors."""
        torch._foreach_copy_(list(tensors), _unflatten_dense_tensors(vector, tensors))


def pack(tensors: Sequence[Tensor], like: Tensor) -> tuple[Pack | None, list[int]]:
    """The small tensors of a list, if there are enough of them, and the places of the others.

    Args:
        tensors: real ones, this rank's pieces.
        like: what the numbers that are taken of them are to be like: an accelerator's tensors are left as they are.

    >>> found, others = pack([torch.ones(2)] * 20 + [torch.ones(5000)], torch.zeros((), dtype=torch.float64))
    >>> len(found.rows), others
    (20, [20])
    """
    if len(tensors) < FEWEST or like.dtype != torch.float64 or like.device.type != "cpu":
        return None, list(range(len(tensors)))
    rows: list[int] = []
    sizes: list[int] = []
    others: list[int] = []
    dtype = tensors[0].dtype
    for i, t in enumerate(tensors):
        size = t.numel()
        if 0 < size <= LARGEST and type(t) in ORDINARY and t.dtype == dtype and t.is_cpu:
            rows.append(i)
            sizes.append(size)
        else:
            others.append(i)
    if len(rows) < FEWEST:
        return None, list(range(len(tensors)))
    return Pack(rows, sizes), others
