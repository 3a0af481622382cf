r"""The Kronecker metric: Shampoo's norm, in eigenbases that are iterated as SOAP does (:mod:`sgdol.metrics`)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import array_api_compat

from sgdol._diagonal import RMS, Diagonal, Means, Squares
from sgdol._numbers import namespace, ratio, sqrt, where

__all__ = ["Factors", "Kronecker", "Rotated"]

Array = Any

LONGEST = 512
"""A side of a matrix with more entries is not rotated: its factor would cost more than the gradient."""
BLOCK = 256
"""A side with more entries is rotated in equal blocks, of which each costs as much as a side of its own..."""
SMALLEST = 64
"""...unless they would have to be smaller than this."""
TALLEST = 8
"""Rows are not rotated where there are more than this many times as many rows as columns, as in embeddings."""
RIDGE = 1e-4
"""What is added to a factor of trace 1, divided by its size, before a basis is made of it."""
LAST = 20
"""Counts of updates go from here back to 11: nothing depends on more than count modulo 10 from there on, and a float
that counts on would stand still one day."""


class Factors(NamedTuple):
    """What the Kronecker metric remembers of one tensor; () for what a tensor does not have."""

    left: Array
    """L, the weighted sum of G G^T, of a matrix whose rows are rotated: its diagonal blocks, one below the other..."""
    right: Array
    """...and R, that of G^T G, of one whose columns are."""
    left_basis: Array
    """Q_L, whose columns are nearly the eigenvectors of L, in the same blocks..."""
    right_basis: Array
    """...and Q_R."""
    rows: Array
    """a, the sums over the rows of the weighted sum of squares of Q_L^T G Q_R..."""
    columns: Array
    """...and b, those over its columns."""
    square: Array
    """v, the weighted sum of the squares, of a tensor that is not rotated at all."""
    weight: Array
    """w, the sum of the weights; 0 while no gradient has been seen."""
    count: Array
    """How many gradients have been seen; from 20 it goes back to 11."""


@dataclass(frozen=True)
class Rotated:
    """D is diagonal in a basis: D(X) = Q_L (values * (Q_L^T X Q_R)) Q_R^T.

    Args:
        left: Q_L, or () if it is the identity.
        right: Q_R, or ().
        values: the diagonal in the basis, positive, as a matrix; leading dimensions are those of a batch.
    """

    left: Array
    right: Array
    values: Array

    def sharp(self, gradient: Array) -> Array:
        """D^-1 g."""
        turned = rotate(gradient.reshape(self.values.shape), self.left, self.right)
        return rotate_back(turned / self.values, self.left, self.right).reshape(gradient.shape)

    def half(self, gradient: Array) -> Array:
        """D^(-1/2) g, in the basis."""
        return (rotate(gradient.reshape(self.values.shape), self.left, self.right) / sqrt(self.values)).reshape(
            gradient.shape
        )

    def flat(self, vector: Array) -> Array:
        """D v."""
        turned = rotate(vector.reshape(self.values.shape), self.left, self.right)
        return rotate_back(turned * self.values, self.left, self.right).reshape(vector.shape)


def rotate(matrix: Array, left: Array, right: Array) -> Array:
    """Q_L^T X Q_R, where the diagonal blocks of Q_L and Q_R lie one below the other; () for an identity."""
    return between(matrix, *into(left, right))


def rotate_back(matrix: Array, left: Array, right: Array) -> Array:
    """Q_L X Q_R^T."""
    return between(matrix, *back(left, right))


def into(left: Array, right: Array) -> tuple[Array, Array]:
    """(Q_L^T, Q_R), for :func:`between`."""
    return () if _absent(left) else in_blocks(left).mT, () if _absent(right) else in_blocks(right)


def back(left: Array, right: Array) -> tuple[Array, Array]:
    """(Q_L, Q_R^T), for :func:`between`."""
    return () if _absent(left) else in_blocks(left), () if _absent(right) else in_blocks(right).mT


def between(matrix: Array, left: Array, right: Array) -> Array:
    """The matrix with factors on both sides, each given by its blocks (:func:`in_blocks`); () for an identity."""
    if not _absent(left):
        matrix = left @ matrix if left.ndim == matrix.ndim else (left @ cut_rows(matrix, left)).reshape(matrix.shape)
    if _absent(right):
        return matrix
    return matrix @ right if right.ndim == matrix.ndim else _joined(cut_columns(matrix, right) @ right, matrix)


def in_blocks(side: Array) -> Array:
    """The blocks of a factor, of a basis or of its change, as a stack; a single block as it is."""
    n, size = side.shape[-2:]
    return side if n == size else side.reshape((*side.shape[:-2], n // size, size, size))


def cut_rows(matrix: Array, blocks: Array) -> Array:
    """The rows of each block of a side, as a stack; of a side with a single block the matrix itself."""
    if blocks.ndim == matrix.ndim:
        return matrix
    return matrix.reshape((*matrix.shape[:-2], *blocks.shape[-3:-1], matrix.shape[-1]))


def cut_columns(matrix: Array, blocks: Array) -> Array:
    """The columns of each block of a side, as a stack; of a side with a single block the matrix itself."""
    if blocks.ndim == matrix.ndim:
        return matrix
    return matrix.reshape((*matrix.shape[:-1], *blocks.shape[-3:-1])).swapaxes(-3, -2)


def _joined(stack: Array, like: Array) -> Array:
    """The matrix whose columns :func:`cut_columns` cut."""
    return stack if stack.ndim == like.ndim else stack.swapaxes(-3, -2).reshape(like.shape)


@dataclass(frozen=True)
class Kronecker(RMS):
    r"""Matrices in the eigenbases of their rows and columns, everything else as in :class:`RMS`.

    For the gradient G of a matrix (of a convolution: out x rest) of n x m, after every update,

    .. math:: L \leftarrow b L + G G^\top, \quad R \leftarrow b R + G^\top G, \quad w \leftarrow b w + 1, \quad
        a, c = \text{row and column sums of } v \leftarrow b v + (Q_L^\top G Q_R)^2.

    D is diagonal in the basis :math:`Q_L, Q_R`. Its squares are those of :class:`RMS` with :math:`a_i c_j / \sum a` in
    the place of v: D is nearly :math:`L^{1/2} \otimes R^{1/2}`, Shampoo's metric with the exponent 1/2. The bases
    follow after updates 1, 2, 4, 8 and every tenth: eigenvectors of L at first, then one step of orthogonal iteration,

    .. math:: Q_L \leftarrow \mathrm{qr}\Big(\big(L/\mathrm{tr} L + \tfrac{10^{-4}}{n} E\big) Q_L\Big), \qquad
        a \leftarrow (P \circ P)^\top a, \quad P = Q_{L,\text{old}}^\top Q_{L,\text{new}},

    with the columns in the order of :math:`q^\top L q`, and the same for R. E is diagonal with entries from 1 to 2, so
    that eigenvectors are determined, up to their signs, also where L is 0. Of a side longer than 256, which can be cut
    into equal parts of 64 to 256, L is only the blocks on the diagonal, each with n, trace and E of its own, one below
    the other in the state, and so is the basis. A side longer than 512 is not rotated, and neither are the rows of a
    matrix with more than 8 times as many rows as columns. The first update has D constant in each tensor. Memory: at
    most :math:`2 (n^2 + m^2)` for a matrix. Leading dimensions of the state's arrays are a batch.

    Args:
        decay: b in (0, 1], as in :class:`RMS`.
        tensor: k_0, positive: the pseudo-count of the tensor's mean.
        overall: k_1, at least 0: the pseudo-count of the mean over all coordinates.

    >>> import numpy as np
    >>> metric, g = Kronecker(), np.outer([3.0, 4.0], [1.0, 1.0]) + np.eye(2)
    >>> state = metric.observe(metric.initial(np.zeros((2, 2))), g)
    >>> mean = metric.mean_square(state, g)
    >>> metric.operator(state, Means(mean, mean)).sharp(g).round(1)
    array([[3.9, 2.9],
           [3.9, 4.9]])
    """

    diagonal: ClassVar[bool] = False
    scale_free: ClassVar[bool] = True

    def initial(self, zero: Array) -> Factors:  # type: ignore[override]
        """No gradient yet."""
        turns_rows, turns_columns = sides(zero.shape)
        if not (turns_rows or turns_columns):
            return Factors((), (), (), (), (), (), zero, 0.0, 0.0)
        matrix = zero.reshape(zero.shape[0], math.prod(zero.shape[1:]))
        rows, columns = matrix[:, 0], matrix[0, :]
        left = rows[:, None] * rows[None, :turns_rows] if turns_rows else ()
        right = columns[:, None] * columns[None, :turns_columns] if turns_columns else ()
        return Factors(left, right, _first_basis(left), _first_basis(right), rows, columns, (), 0.0, 0.0)

    def mean_square(self, state: Factors, gradient: Array) -> Array:  # type: ignore[override]
        """The mean over the tensor of the weighted mean of squares, or of the present ones if there is no past."""
        if not _absent(state.square):
            return super().mean_square(Squares(state.square, state.weight), gradient)
        xp = namespace(state.rows)
        g = _as_matrix(state, gradient)
        size = g.shape[-1] * g.shape[-2]
        past = xp.sum(state.rows, axis=-1) / size
        return where(state.weight > 0, ratio(past, state.weight, 1.0), xp.sum(g * g, axis=(-2, -1)) / size)

    def operator(self, state: Factors, means: Means) -> Diagonal | Rotated:  # type: ignore[override]
        """D of the coming step."""
        if not _absent(state.square):
            return super().operator(Squares(state.square, state.weight), means)
        a, b, c = self.coefficients(state.weight, means.overall)
        return Rotated(
            state.left_basis, state.right_basis, sqrt(_spread(a) * _outer(state) + _spread(b * means.tensor + c))
        )

    def past_square(self, state: Factors, operator: Any) -> Array:  # type: ignore[override]
        """The mean of the past <g, D^-1 g>, had D always been what it is now; 0 if there is no past."""
        if not _absent(state.square):
            return super().past_square(Squares(state.square, state.weight), operator)
        return ratio(namespace(state.rows).sum(_outer(state) / operator.values, axis=(-2, -1)), state.weight, 0.0)

    def observe(self, state: Factors, gradient: Array) -> Factors:  # type: ignore[override]
        """Add the products and squares of the gradient, and renew the bases if it is time."""
        count = following(state.count)
        if not _absent(state.square):
            square, weight = super().observe(Squares(state.square, state.weight), gradient)
            return state._replace(square=square, weight=weight, count=count)
        g = _as_matrix(state, gradient)
        xp = namespace(g)
        h = rotate(g, state.left_basis, state.right_basis)
        new = state._replace(
            left=_added(state.left, self.decay, g),
            right=_added(state.right, self.decay, g.mT),
            rows=self.decay * state.rows + xp.sum(h * h, axis=-1),
            columns=self.decay * state.columns + xp.sum(h * h, axis=-2),
            weight=self.decay * state.weight + 1,
            count=count,
        )
        return _choose(is_due(count), lambda: renewed(new)[0], lambda: new)


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """The size of the blocks of rows and of columns of a tensor of this shape; 0 for a side that is not rotated."""
    n, m = shape[0] if len(shape) >= 2 else 1, math.prod(shape[1:])
    if min(n, m) < 2:
        return 0, 0
    return _block(n) if n <= TALLEST * m else 0, _block(m)


def _block(length: int) -> int:
    """The size of the equal blocks of a side of this length.

    >>> [_block(n) for n in (2, 256, 257, 384, 511, 512, 513)]
    [2, 256, 257, 192, 73, 256, 0]
    """
    if length > LONGEST:
        return 0
    return next((size for size in range(min(length, BLOCK), SMALLEST - 1, -1) if length % size == 0), length)


def following(count: Any) -> Any:
    """The count of updates after one more."""
    return where(count >= LAST, float(LAST // 2), count) + 1


def is_due(count: Any) -> Any:
    """Whether the bases are renewed after the update of this number."""
    return (count == 1) | (count == 2) | (count == 4) | (count == 8) | (count == 10) | (count == LAST)


def renewed(state: Factors) -> tuple[Factors, Array, Array]:
    """The state after a refresh, and the changes P = Q_old^T Q_new of both bases; () for a side that is not rotated."""
    left_basis, left = _turn(state.left, state.left_basis, state.count == 1)
    right_basis, right = _turn(state.right, state.right_basis, state.count == 1)
    rows, columns = _turned_sums(state.rows, left), _turned_sums(state.columns, right)
    return state._replace(left_basis=left_basis, right_basis=right_basis, rows=rows, columns=columns), left, right


def _turn(factor: Array, basis: Array, first: Any) -> tuple[Array, Array]:
    """The basis of one side after a refresh, and its change."""
    if _absent(factor):
        return (), ()
    shape, factor, basis = factor.shape, in_blocks(factor), in_blocks(basis)
    xp, n = namespace(factor), factor.shape[-1]
    trace = xp.linalg.trace(factor)[..., None, None]
    scale = where(trace > 0, trace, 1.0)
    # Different entries on the ridge: where the factor is 0, any basis would do, and libraries choose different ones.
    ridge = xp.arange(n + 1, 2 * n + 1, dtype=factor.dtype, **_device(factor)) * (RIDGE / n**2)

    def decomposed() -> Array:
        return xp.linalg.eigh(factor / scale + _identity(factor) * ridge)[1]

    def iterated() -> Array:
        image = factor @ basis / scale + ridge[:, None] * basis
        order = xp.argsort(xp.sum(basis * image, axis=-2), axis=-1, descending=True)
        # Columns of all matrices as rows of one: whole rows are taken much faster than single numbers along an axis.
        first_of_each = n * xp.arange(math.prod(order.shape[:-1]), **_device(factor))[:, None]
        columns = xp.take(image.mT.reshape(-1, n), (order.reshape(-1, n) + first_of_each).reshape(-1), axis=0)
        return xp.linalg.qr(columns.reshape(image.shape).mT)[0]

    new = _choose(first, decomposed, iterated)
    return new.reshape(shape), (basis.mT @ new).reshape(shape)


def _first_basis(factor: Array) -> Array:
    """That of a factor of 0, before any update: an identity in each block."""
    return () if _absent(factor) else (in_blocks(factor) + _identity(factor)).reshape(factor.shape)


def _added(factor: Array, decay: float, rows: Array) -> Array:
    """A factor after a gradient, whose rows are those of its side."""
    if _absent(factor):
        return ()
    g = cut_rows(rows, in_blocks(factor))
    return decay * factor + (g @ g.mT).reshape(factor.shape)


def _turned_sums(sums: Array, change: Array) -> Array:
    """The sums of one side's squares in the new basis."""
    if _absent(change):
        return sums
    change = in_blocks(change)
    return (sums.reshape((*change.shape[:-2], 1, change.shape[-1])) @ (change * change)).reshape(sums.shape)


def _outer(state: Factors) -> Array:
    """a_i c_j / sum a: what stands for the weighted sum of squares in the basis."""
    total = namespace(state.rows).sum(state.rows, axis=-1)[..., None]
    share = ratio(state.rows, total, 0.0)  # first, because a product of two sums of squares may leave the range
    return share[..., :, None] * state.columns[..., None, :]


def _as_matrix(state: Factors, gradient: Array) -> Array:
    return gradient.reshape((*state.rows.shape, state.columns.shape[-1]))


def _absent(part: Any) -> bool:
    return isinstance(part, tuple)


def _identity(square: Array) -> Array:
    """The identity of the size and type of a square matrix."""
    return namespace(square).eye(square.shape[-1], dtype=square.dtype, **_device(square))


def _device(like: Array) -> dict[str, Any]:
    """Where an array that goes with this one is to be made, as an argument; jax chooses by itself."""
    return {} if array_api_compat.is_jax_array(like) else {"device": array_api_compat.device(like)}


def _spread(value: Array) -> Array:
    """A number for each matrix of a batch, to be multiplied with the matrices."""
    return value[..., None, None] if getattr(value, "ndim", 0) else value


def _choose(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """What one of the two returns. Only that one runs, also in a traced program: a refresh costs many updates."""
    if array_api_compat.is_jax_array(condition):
        # jax has been imported by whoever made the array; this module knows no framework.
        return sys.modules["jax"].lax.cond(condition, yes, no)
    return yes() if condition else no()


for public in (Factors, Kronecker, Rotated):
    public.__module__ = "sgdol.metrics"  # where users find them
