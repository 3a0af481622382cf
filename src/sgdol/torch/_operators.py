"""D of a step on the entries of a layout: the identity, a diagonal, a diagonal in a basis, or what a metric says it is.

Most callers need ``sharp`` (D^-1 g), ``flat`` (D v), ``inner`` (<a, D^-1 b>) and ``advance`` (a step of the momentum
and its products). Callers that need several products of one vector rotate it once into the coordinates in which D is
diagonal (``turned``) and work there (``divided``, ``multiplied``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol._kronecker import between
from sgdol.torch._vectors import CHUNK, PIECE, Vector, dot, product

__all__ = ["IDENTITY", "Block", "Diagonal", "Opaque", "Operators", "Rated", "Rotated"]


class Operator:
    """D of one entry of a layout.

    D has orthonormal coordinates of its own, in which <a, b> is the same: ``turned`` takes a vector there, ``back``
    takes it to the coordinates of the parameters again. Results may share memory with the argument.
    """

    turns = False  # whether the coordinates are not those of the parameters
    is_identity = False  # whether D = 1, so that nothing has to be asked of it

    def turned(self, v: Tensor) -> Tensor:
        """The vector v in the coordinates of D."""
        return v

    def cache_turned(self, v: Tensor, h: Tensor | None) -> None:
        """Remember that h = turned(v), until v is written to; h=None empties the cache."""

    def back(self, h: Tensor) -> Tensor:
        """The vector h, given in the coordinates of D, in those of the parameters."""
        return h

    def divided(self, h: Tensor) -> Tensor:
        """D^-1 h, in the coordinates of D."""
        raise NotImplementedError

    def multiplied(self, h: Tensor) -> Tensor:
        """D h, in the coordinates of D."""
        raise NotImplementedError

    def sharp(self, h: Tensor) -> Tensor:
        """D^-1 h, for h in the coordinates of the parameters."""
        return self.back(self.divided(self.turned(h)))

    def flat(self, h: Tensor) -> Tensor:
        """D h, for h in the coordinates of the parameters."""
        return self.back(self.multiplied(self.turned(h)))

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """<a, D^-1 b>."""
        return dot(*self.paired(a, b))

    def paired(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) with <x, y> = <a, D^-1 b> on every tensor of the entry."""
        h = self.turned(a)
        return h, self.divided(h if b is a else self.turned(b))

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Momentum step m <- m + weight (g - m), in place. Returns <m_old, D^-1 g>, D^-1 m and <m, D^-1 m>."""
        cross = self.inner(m, g)
        h = self.turned(m.lerp_(g, weight))
        x = self.divided(h)
        return cross, self.back(x), dot(h, x)


class Identity(Operator):
    """D = 1."""

    is_identity = True

    def divided(self, h: Tensor) -> Tensor:
        return h

    multiplied = sharp = flat = divided

    def paired(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, b

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return dot(a, b)

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        if m.numel() <= PIECE or not (m.is_cpu and m.is_contiguous() and g.is_contiguous()):
            cross = dot(m, g)
            return cross, m.lerp_(g, weight), dot(m, m)
        rows = []
        for a, b in zip(m.view(-1).split(PIECE), g.view(-1).split(PIECE), strict=True):
            # One pass over memory: both products and the update while the piece is in the processor's cache.
            rows.append([product(a, b), product(a.lerp_(b, weight), a)])
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
        return h * self.inverse

    def multiplied(self, h: Tensor) -> Tensor:
        return h / self.inverse

    sharp, flat = divided, multiplied

    def paired(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, b * self.inverse

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.inverse.dim():
            return dot(a, b) * self.inverse
        if a.numel() <= CHUNK:
            return dot(a, b * self.inverse)
        # Chunk by chunk, because b * inverse would be a temporary as large as the model.
        pieces = zip(*(x.reshape(-1).split(CHUNK) for x in (a, b, self.inverse)), strict=True)
        scratch = torch.empty(CHUNK, dtype=a.dtype, device=a.device)
        return torch.stack([dot(x, torch.mul(y, i, out=scratch[: len(y)])) for x, y, i in pieces]).sum()

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        d = torch.empty_like(m, memory_format=torch.contiguous_format)
        inverse = self.inverse.expand(m.shape)  # it may be a single number
        contiguous = m.is_contiguous() and g.is_contiguous() and inverse.is_contiguous()
        if m.numel() <= PIECE or not (m.is_cpu and contiguous):
            cross = dot(m, g * inverse)
            m.lerp_(g, weight)
            return cross, torch.mul(m, inverse, out=d), dot(m, d)
        rows = []
        for a, b, i, out in zip(*(x.view(-1).split(PIECE) for x in (m, g, inverse, d)), strict=True):
            # As in Identity.advance; out holds D^-1 g first, and then D^-1 m, which is what stays.
            row = [product(a, torch.mul(b, i, out=out))]
            a.lerp_(b, weight)
            rows.append([*row, product(a, torch.mul(a, i, out=out))])
        cross, square = torch.tensor(rows, dtype=torch.float64).sum(0)
        return cross, d, square


class Opaque(Operator):
    """D as an object with ``sharp`` and ``flat``, which a metric's ``operator`` returned."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator

    def divided(self, h: Tensor) -> Tensor:
        return self.operator.sharp(h)

    def multiplied(self, h: Tensor) -> Tensor:
        return self.operator.flat(h)


class Block(NamedTuple):
    """Matrices of one shape that lie end to end in an entry, and the bases in which D is diagonal."""

    start: int
    stop: int
    shape: tuple[int, ...]  # (rows, columns), after the number of matrices if there are several
    into: tuple[Any, Any]  # (Q_L^T, Q_R), as :func:`sgdol._kronecker.between` takes them
    back: tuple[Any, Any]  # (Q_L, Q_R^T)

    def of(self, x: Tensor) -> Tensor:
        if x.numel() == math.prod(self.shape):
            return x.reshape(self.shape)  # the block is the whole entry
        return x[self.start : self.stop].view(self.shape)


class Rotated(Operator):
    """D is diagonal in a basis: the coordinates of a matrix X are the entries of Q_L^T X Q_R.

    Args:
        inverse: makes 1/D in the basis, of the shape of the entry.
        blocks: the matrices at the end of the entry; what lies before them is not rotated.
        keep: whether to make 1/D once. It takes a tenth of the time of a rotation; of all large matrices together it
            would be a vector of the model's size.
    """

    turns = True

    def __init__(self, inverse: Callable[[], Tensor], blocks: list[Block], keep: bool) -> None:
        self._make, self._blocks = inverse, blocks
        self._kept = inverse() if keep else None
        self._cached: tuple[Tensor, int, Tensor] | None = None  # v, its version, turned(v)

    @property
    def inverse(self) -> Tensor:
        return self._make() if self._kept is None else self._kept

    def turned(self, v: Tensor) -> Tensor:
        if self._cached is not None and self._cached[0] is v and self._cached[1] == v._version:
            return self._cached[2]
        return self._apply(v, [block.into for block in self._blocks])

    def cache_turned(self, v: Tensor, h: Tensor | None) -> None:
        # The version counter of v rises with every write in place, which makes the entry invalid.
        self._cached = None if h is None else (v, v._version, h)

    def back(self, h: Tensor) -> Tensor:
        return self._apply(h, [block.back for block in self._blocks])

    def _apply(self, x: Tensor, sides: list[tuple[Any, Any]]) -> Tensor:
        start = self._blocks[0].start
        parts = [x[:start]] if start else []
        parts += [between(block.of(x), *both) for block, both in zip(self._blocks, sides, strict=True)]
        return parts[0].reshape(x.shape) if len(parts) == 1 else torch.cat([part.view(-1) for part in parts])

    def divided(self, h: Tensor) -> Tensor:
        return h * self.inverse

    def multiplied(self, h: Tensor) -> Tensor:
        return h / self.inverse

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        h, turned = self.turned(m), self.turned(g)
        cross = dot(h, self.divided(turned))
        m.lerp_(g, weight)
        h = torch.lerp(h, turned, weight)  # rotation is linear: the new momentum need not be rotated again
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

    def turned(self, v: Tensor) -> Tensor:
        return self.operator.turned(v)

    def cache_turned(self, v: Tensor, h: Tensor | None) -> None:
        self.operator.cache_turned(v, h)

    def back(self, h: Tensor) -> Tensor:
        return self.operator.back(h)

    def divided(self, h: Tensor) -> Tensor:
        return self.operator.divided(h) * self.rate

    def multiplied(self, h: Tensor) -> Tensor:
        return self.operator.multiplied(h) * (1 / self.rate if self.rate else 0.0)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return self.operator.inner(a, b) * self.rate


IDENTITY = Identity()


class Operators(list[Any]):
    """D of all entries of a layout in one step. Where D does not rotate, results have the argument's own entries."""

    def turned(self, v: Vector) -> Vector:
        return [operator.turned(x) if operator.turns else x for operator, x in zip(self, v, strict=True)]

    def sharp(self, g: Vector) -> Vector:
        return [operator.sharp(x) for operator, x in zip(self, g, strict=True)]
