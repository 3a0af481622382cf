"""D of a step on the entries of a layout: the identity, a diagonal, a diagonal in a basis, or what a metric says it is.

``sharp`` (D^-1 g), ``flat`` (D v), ``inner`` (<a, D^-1 b>) and ``advance``, which moves a momentum on and takes its
products while it is in the cache, are all that most need. Whoever needs several products of a vector takes it to the
coordinates of D once (``turned``), and works there (``divided``, ``multiplied``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol._kronecker import rotate, rotate_back
from sgdol.torch._vectors import CHUNK, Vector, dot, product

__all__ = ["IDENTITY", "Block", "Diagonal", "Opaque", "Operators", "Rated", "Rotated"]

PIECE = 1 << 16
"""Momenta are moved on in pieces of so many numbers, which stay in the cache for all that is done with them."""


class Operator:
    """D of one entry: diagonal or not in coordinates of its own, to which ``turned`` goes, and from which ``back``.

    The coordinates are orthogonal: products of two vectors are the same in them. Results may be the argument itself.
    """

    turns = False
    """Whether the coordinates are not those of the parameters."""
    is_identity = False
    """Whether D = 1, so that nothing has to be asked of it."""

    def turned(self, v: Tensor) -> Tensor:
        """A vector in the coordinates of D."""
        return v

    def hold(self, v: Tensor, h: Tensor | None) -> None:
        """Know that v turned is h; None: forget what was known."""

    def back(self, h: Tensor) -> Tensor:
        """A vector that is in the coordinates of D."""
        return h

    def divided(self, h: Tensor) -> Tensor:
        """D^-1 h, in the coordinates of D."""
        raise NotImplementedError

    def multiplied(self, h: Tensor) -> Tensor:
        """D h, in the coordinates of D."""
        raise NotImplementedError

    def sharp(self, h: Tensor) -> Tensor:
        """D^-1 h, of a vector in the coordinates of the parameters."""
        return self.back(self.divided(self.turned(h)))

    def flat(self, h: Tensor) -> Tensor:
        """D h, of a vector in the coordinates of the parameters."""
        return self.back(self.multiplied(self.turned(h)))

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """<a, D^-1 b>."""
        return dot(*self.paired(a, b))

    def paired(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Two vectors whose product, tensor by tensor, is <a, D^-1 b>."""
        h = self.turned(a)
        return h, self.divided(h if b is a else self.turned(b))

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Move a momentum on: m <- m + weight (g - m). Returns <m_old, D^-1 g>, D^-1 m and <m, D^-1 m>."""
        cross = self.inner(m, g)
        h = self.turned(m.lerp_(g, weight))
        x = self.divided(h)
        return cross, self.back(x), dot(h, x)


class Identity(Operator):
    """D = 1."""

    is_identity = True

    def divided(self, h: Tensor) -> Tensor:
        """D^-1 h."""
        return h

    multiplied = sharp = flat = divided

    def paired(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Two vectors whose product, tensor by tensor, is <a, D^-1 b>."""
        return a, b

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """<a, D^-1 b>."""
        return dot(a, b)

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Move a momentum on: m <- m + weight (g - m). Returns <m_old, D^-1 g>, D^-1 m and <m, D^-1 m>."""
        if m.numel() <= PIECE or not (m.is_cpu and m.is_contiguous() and g.is_contiguous()):
            cross = dot(m, g)
            return cross, m.lerp_(g, weight), dot(m, m)
        rows = []
        for a, b in zip(m.view(-1).split(PIECE), g.view(-1).split(PIECE), strict=True):
            rows.append([product(a, b), product(a.lerp_(b, weight), a)])  # while they are in the cache
        cross, square = torch.tensor(rows, dtype=torch.float64).sum(0)
        return cross, m, square


class Diagonal(Operator):
    """D is diagonal.

    Args:
        inverse: 1/D, of the shape of the entry, or a number.
    """

    def __init__(self, inverse: Tensor) -> None:
        self.inverse = inverse

    def divided(self, h: Tensor) -> Tensor:
        """D^-1 h, in new memory."""
        return h * self.inverse

    def multiplied(self, h: Tensor) -> Tensor:
        """D h, in new memory."""
        return h / self.inverse

    sharp, flat = divided, multiplied

    def paired(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Two vectors whose product, tensor by tensor, is <a, D^-1 b>."""
        return a, b * self.inverse

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """<a, D^-1 b>, piece by piece: no temporary of the size of the model."""
        if a.numel() <= CHUNK:
            return dot(a, b * self.inverse)
        pieces = zip(*(x.reshape(-1).split(CHUNK) for x in (a, b, self.inverse)), strict=True)
        scratch = torch.empty(CHUNK, dtype=a.dtype, device=a.device)
        return torch.stack([dot(x, torch.mul(y, i, out=scratch[: len(y)])) for x, y, i in pieces]).sum()

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Identity.advance`; D^-1 m is in new memory."""
        d = torch.empty_like(m, memory_format=torch.contiguous_format)
        inverse = self.inverse.expand(m.shape)
        contiguous = m.is_contiguous() and g.is_contiguous() and inverse.is_contiguous()
        if m.numel() <= PIECE or not (m.is_cpu and contiguous):
            cross = dot(m, g * inverse)
            m.lerp_(g, weight)
            return cross, torch.mul(m, inverse, out=d), dot(m, d)
        rows = []
        for a, b, i, out in zip(*(x.view(-1).split(PIECE) for x in (m, g, inverse, d)), strict=True):
            row = [product(a, torch.mul(b, i, out=out))]  # while they are in the cache
            a.lerp_(b, weight)
            rows.append([*row, product(a, torch.mul(a, i, out=out))])
        cross, square = torch.tensor(rows, dtype=torch.float64).sum(0)
        return cross, d, square


class Opaque(Operator):
    """D is what a metric says it is.

    Args:
        operator: the metric's.
    """

    def __init__(self, operator: Any) -> None:
        self.made = operator

    def divided(self, h: Tensor) -> Tensor:
        """D^-1 h."""
        return self.made.sharp(h)

    def multiplied(self, h: Tensor) -> Tensor:
        """D h."""
        return self.made.flat(h)


class Block(NamedTuple):
    """Matrices of one shape in an entry, and the bases in which D is diagonal."""

    start: int
    stop: int
    shape: tuple[int, ...]
    """(rows, columns), after the number of matrices if there are several."""
    left: Any
    """Q_L of each, or () for the identity..."""
    right: Any
    """...and Q_R."""

    def of(self, x: Tensor) -> Tensor:
        """The matrices in a vector of the entry."""
        if x.numel() == math.prod(self.shape):
            return x.reshape(self.shape)
        return x[self.start : self.stop].view(self.shape)


class Rotated(Operator):
    """D is diagonal in a basis: of a matrix X, the numbers are those of Q_L^T X Q_R.

    Args:
        inverse: 1/D in the basis, of the shape of the entry.
        blocks: the matrices that the entry ends with; what is before them is not turned.
    """

    turns = True

    def __init__(self, inverse: Tensor, blocks: list[Block]) -> None:
        self.inverse, self._blocks = inverse, blocks
        self._held: tuple[Tensor, int, Tensor] | None = None

    def turned(self, v: Tensor) -> Tensor:
        """Q_L^T v Q_R."""
        if self._held is not None and self._held[0] is v and self._held[1] == v._version:
            return self._held[2]
        return self._each(rotate, v)

    def hold(self, v: Tensor, h: Tensor | None) -> None:
        """Know that v turned is h; None: forget what was known."""
        self._held = None if h is None else (v, v._version, h)

    def back(self, h: Tensor) -> Tensor:
        """Q_L h Q_R^T."""
        return self._each(rotate_back, h)

    def _each(self, turn: Callable[[Tensor, Any, Any], Tensor], x: Tensor) -> Tensor:
        blocks = self._blocks
        turned = [turn(block.of(x), block.left, block.right) for block in blocks]
        if len(blocks) == 1 and not blocks[0].start:
            return turned[0].reshape(x.shape)
        return torch.cat([x[: blocks[0].start], *(part.view(-1) for part in turned)])

    def divided(self, h: Tensor) -> Tensor:
        """D^-1 h, in the basis."""
        return h * self.inverse

    def multiplied(self, h: Tensor) -> Tensor:
        """D h, in the basis."""
        return h / self.inverse

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Operator.advance`, with one rotation of each vector."""
        h, turned = self.turned(m), self.turned(g)
        cross = dot(h, self.divided(turned))
        m.lerp_(g, weight)
        h = torch.lerp(h, turned, weight)
        x = self.divided(h)
        return cross, self.back(x), dot(h, x)


class Rated(Operator):
    """D/rho: steps are rho times as long as in D, and lengths of gradients count rho times as much.

    Args:
        operator: D.
        rate: rho, at least 0; where it is 0 nothing moves, and neither gradients nor steps have a length.
    """

    def __init__(self, operator: Any, rate: float) -> None:
        self.operator, self.rate, self.turns = operator, rate, operator.turns
        self.is_identity = False

    def turned(self, v: Tensor) -> Tensor:
        """A vector in the coordinates of D."""
        return self.operator.turned(v)

    def hold(self, v: Tensor, h: Tensor | None) -> None:
        """As the operator does."""
        self.operator.hold(v, h)

    def back(self, h: Tensor) -> Tensor:
        """A vector that is in the coordinates of D."""
        return self.operator.back(h)

    def divided(self, h: Tensor) -> Tensor:
        """Rho D^-1 h, in the coordinates of D."""
        return self.operator.divided(h) * self.rate

    def multiplied(self, h: Tensor) -> Tensor:
        """D h / rho, in the coordinates of D."""
        return self.operator.multiplied(h) * (1 / self.rate if self.rate else 0.0)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Rho <a, D^-1 b>."""
        return self.operator.inner(a, b) * self.rate


IDENTITY = Identity()


class Operators(list[Any]):
    """D of each entry of a layout in one step."""

    def turned(self, v: Vector) -> Vector:
        """A vector in the coordinates of D; entries may be those of v."""
        return [operator.turned(x) if operator.turns else x for operator, x in zip(self, v, strict=True)]

    def sharp(self, g: Vector) -> Vector:
        """D^-1 g; entries where D = 1 are those of g."""
        return [operator.sharp(x) for operator, x in zip(self, g, strict=True)]
