"""A metric whose D is a full matrix, for tests of whatever takes a metric: nobody may treat its D as a vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from array_api_compat import array_namespace


class Products(NamedTuple):
    """The state of one tensor of n numbers."""

    outer: Any
    """C, the decayed sum of g g^T, n x n."""


@dataclass(frozen=True)
class Full:
    """D as a matrix."""

    matrix: Any

    def sharp(self, gradient):
        solved = array_namespace(gradient).linalg.solve(self.matrix, gradient.reshape(-1, 1))
        return solved.reshape(gradient.shape)

    def flat(self, vector):
        return (self.matrix @ vector.reshape(-1, 1)).reshape(vector.shape)


@dataclass(frozen=True)
class Dense:
    """D = I + C / (mean over all coordinates of the diagonals of C), on arrays of any library."""

    decay: float = 0.9
    scale_free: ClassVar[bool] = True

    def initial(self, zero):
        flat = zero.reshape(-1)
        return Products(flat[:, None] * flat[None, :])

    def mean_square(self, state, gradient):
        xp = array_namespace(state.outer)
        return xp.sum(xp.linalg.diagonal(state.outer)) / max(state.outer.shape[0], 1)

    def operator(self, state, means):
        xp = array_namespace(state.outer)
        identity = xp.eye(state.outer.shape[0], dtype=state.outer.dtype)
        return Full(identity + state.outer / xp.where(means.overall > 0, means.overall, 1.0))

    def observe(self, state, gradient):
        flat = gradient.reshape(-1)
        return Products(self.decay * state.outer + flat[:, None] * flat[None, :])


def dense(past, present, tensors, decay=0.9):
    """The same D for the references: of all tensors, from the gradients of all updates before."""
    number = np.asarray(tensors)
    same = number[:, None] == number[None, :]
    C = sum((decay ** (len(past) - 1 - j) * np.outer(g, g) for j, g in enumerate(past)), np.zeros((len(number),) * 2))
    mean = np.trace(C) / len(number)
    return np.eye(len(number)) + same * C / (mean if mean > 0 else 1.0)
