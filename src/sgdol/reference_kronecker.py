r"""D of :class:`sgdol.metrics.Kronecker` from the whole history: numpy, float64, slow and obvious. This is the truth.

Nothing here is shared with the fast code, on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["kronecker"]

Matrix = NDArray[np.float64]


def kronecker(past: Sequence[ArrayLike], present: ArrayLike, shapes: Sequence[tuple[int, ...]]) -> tuple[Matrix, float]:
    r"""The matrix D, of all tensors, and the mean of the past <g, D^-1 g> that gradients are clipped by.

    Every tensor has an orthogonal matrix Q, the Kronecker product of its two bases, and weighted squares q in that
    basis, the mean over updates; a vector has Q = 1. With w the sum of the weights, tmean the mean over the tensor and
    mean that over all coordinates,

    .. math:: V = \frac{w q + 0.01\,\mathrm{tmean}(q)}{w + 0.01} + 10^{-4}\,\mathrm{mean}(q), \qquad
        D = Q\,\mathrm{diag}\big(\sqrt{V / \mathrm{mean}(V)}\big)\,Q^\top.

    Args:
        past: the mean gradients of the updates before, in order, all tensors one after the other.
        present: that of this update, which counts where there is no past, as a constant in each tensor.
        shapes: of the tensors.

    >>> D, usual = kronecker([], [3.0, 4.0, 0.0, 5.0], [(2, 2)])
    >>> bool(np.allclose(D, np.eye(4))), usual
    (True, 0.0)
    """
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    history = [np.split(np.asarray(g, dtype=np.float64), ends) for g in past]
    w = sum(0.99**j for j in range(len(past)))
    bases, squares, pooled = [], [], []
    for i, shape in enumerate(shapes):
        g = np.split(np.asarray(present, dtype=np.float64), ends)[i]
        Q, v = _weighted_squares([row[i] for row in history], shape, len(g))
        q = v / w if len(past) else g**2
        bases.append(Q)
        squares.append(q if len(past) else np.full_like(q, q.mean()))
        pooled.append((w * q + 0.01 * q.mean()) / (w + 0.01) if len(past) else squares[-1])
    q, V = np.concatenate(squares), np.concatenate(pooled)
    V = V + 1e-4 * q.mean()
    d = np.sqrt(V / V.mean()) if V.mean() > 0 else np.ones_like(V)
    D = np.zeros((len(d), len(d)))
    for Q, part, start in zip(bases, np.split(d, ends), [0, *ends], strict=True):
        D[start : start + len(part), start : start + len(part)] = Q @ np.diag(part) @ Q.T
    return D, float(np.sum(q / d)) if len(past) else 0.0


def _weighted_squares(gradients: list[Matrix], shape: tuple[int, ...], size: int) -> tuple[Matrix, Matrix]:
    """Q and the weighted sum of squares in it, after these gradients of one tensor."""
    n = shape[0] if len(shape) >= 2 else 1
    m = size // n
    left, right = n <= min(512, 8 * m), m <= 512
    if n < 2 or m < 2 or not (left or right):
        return np.eye(size), sum(
            (0.99 ** (len(gradients) - 1 - j) * g**2 for j, g in enumerate(gradients)), np.zeros(size)
        )
    Q, R = np.eye(n), np.eye(m)
    v = np.zeros((n, m))
    for t in range(1, len(gradients) + 1):
        seen = [g.reshape(n, m) for g in gradients[:t]]
        v = 0.99 * v + (Q.T @ seen[-1] @ R) ** 2
        if t in (1, 2, 4, 8) or t % 10 == 0:
            if left:
                L = np.sum([0.99 ** (t - 1 - j) * g @ g.T for j, g in enumerate(seen)], axis=0)
                P = _bases(L, Q, first=t == 1)
                v = ((Q.T @ P) ** 2).T @ v
                Q = P
            if right:
                L = np.sum([0.99 ** (t - 1 - j) * g.T @ g for j, g in enumerate(seen)], axis=0)
                P = _bases(L, R, first=t == 1)
                v = v @ (R.T @ P) ** 2
                R = P
    total = v.sum()
    if total > 0:
        v = np.outer(v.sum(1), v.sum(0)) / total
    return np.asarray(np.kron(Q, R), dtype=np.float64), v.reshape(-1)


def _bases(factor: Matrix, old: Matrix, first: bool) -> Matrix:
    """The basis of one side: of each block on the diagonal by itself, where the side is cut into blocks."""
    n = len(factor)
    size = next((k for k in range(256, 63, -1) if n % k == 0), n) if n > 256 else n
    new = np.zeros((n, n))
    for start in range(0, n, size):
        block = np.ix_(range(start, start + size), range(start, start + size))
        new[block] = _basis(factor[block], old[block], first)
    return new


def _basis(factor: Matrix, old: Matrix, first: bool) -> Matrix:
    """The eigenvectors of a factor, or one step of orthogonal iteration from the old basis towards them."""
    n = len(factor)
    if not np.trace(factor) > 0:
        return old
    # A little is added to the diagonal, differently for each entry, so that eigenvectors are determined.
    A = factor / np.trace(factor) + np.diag([1e-4 / n * (1 + (i + 1) / n) for i in range(n)])
    if first:
        return np.asarray(np.linalg.eigh(A)[1])
    largest_first = np.argsort([-q @ A @ q for q in old.T])
    return np.asarray(np.linalg.qr(A @ old[:, largest_first])[0])
