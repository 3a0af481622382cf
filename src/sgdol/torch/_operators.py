"""D of a step on the entries of a layout: the identity, a diagonal, or whatever a metric says it is.

Nobody outside uses more than ``sharp`` (D^-1 g), ``flat`` (D v), ``inner`` (<a, D^-1 b>) and ``advance``, which moves a
momentum on and takes its products while it is in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgdol.torch._vectors import CHUNK, Vector, dot

__all__ = ["EUCLID", "IDENTITY", "Diagonal", "Opaque", "Operators"]

PIECE = 1 << 16
"""Momenta are moved on in pieces of so many numbers, which stay in the cache for all that is done with them."""


class Identity:
    """D = 1."""

    def sharp(self, g: Tensor) -> Tensor:
        """D^-1 g."""
        return g

    flat = sharp

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """<a, D^-1 b>."""
        return dot(a, b)

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Move a momentum on: m <- m + weight (g - m). Returns <m_old, D^-1 g>, D^-1 m and <m, D^-1 m>."""
        if m.numel() <= PIECE or not (m.is_contiguous() and g.is_contiguous()):
            cross = dot(m, g)
            return cross, m.lerp_(g, weight), dot(m, m)
        pieces = zip(m.view(-1).split(PIECE), g.view(-1).split(PIECE), strict=True)
        rows = [torch.stack([dot(a, b), dot(a.lerp_(b, weight), a)]) for a, b in pieces]  # while they are in the cache
        cross, square = torch.stack(rows).sum(0)
        return cross, m, square


class Diagonal:
    """D is diagonal.

    Args:
        inverse: 1/D, of the shape of the entry, or a number.
    """

    def __init__(self, inverse: Tensor) -> None:
        self.inverse = inverse

    def sharp(self, g: Tensor) -> Tensor:
        """D^-1 g, in new memory."""
        return g * self.inverse

    def flat(self, v: Tensor) -> Tensor:
        """D v, in new memory."""
        return v / self.inverse

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
        if m.numel() <= PIECE or not (m.is_contiguous() and g.is_contiguous() and inverse.is_contiguous()):
            cross = dot(m, g * inverse)
            m.lerp_(g, weight)
            return cross, torch.mul(m, inverse, out=d), dot(m, d)
        rows = []
        for a, b, i, out in zip(*(x.view(-1).split(PIECE) for x in (m, g, inverse, d)), strict=True):
            cross = dot(a, torch.mul(b, i, out=out))  # while they are in the cache
            a.lerp_(b, weight)
            rows.append(torch.stack([cross, dot(a, torch.mul(a, i, out=out))]))
        cross, square = torch.stack(rows).sum(0)
        return cross, d, square


class Opaque:
    """D is what a metric says it is.

    Args:
        operator: the metric's.
    """

    def __init__(self, operator: Any) -> None:
        self.made = operator

    def sharp(self, g: Tensor) -> Tensor:
        """D^-1 g."""
        return self.made.sharp(g)

    def flat(self, v: Tensor) -> Tensor:
        """D v."""
        return self.made.flat(v)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """<a, D^-1 b>."""
        return dot(a, self.sharp(b))

    def advance(self, m: Tensor, g: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Identity.advance`."""
        cross = self.inner(m, g)
        d = self.sharp(m.lerp_(g, weight))
        return cross, d, dot(m, d)


IDENTITY = Identity()


class _Euclid:
    """D = 1 for every entry there may be."""

    def __getitem__(self, e: int) -> Identity:
        return IDENTITY


EUCLID: Any = _Euclid()


class Operators(list[Any]):
    """D of each entry of a layout in one step."""

    @property
    def euclidean(self) -> bool:
        """Whether D = 1 everywhere."""
        return all(operator is IDENTITY for operator in self)

    def sharp(self, g: Vector) -> Vector:
        """D^-1 g; entries where D = 1 are those of g."""
        return [operator.sharp(x) for operator, x in zip(self, g, strict=True)]

    def flat(self, v: Vector) -> Vector:
        """D v."""
        return [operator.flat(x) for operator, x in zip(self, v, strict=True)]
