"""The parameters that take part, as one vector: what the optimizer without M computes with.

Every operation on a vector is one kernel, however many tensors a model has: on small models the time of a step is the
number of calls. A vector is a list of flat tensors, one for each device and wide type among the parameters, which is to
say one as a rule. Values are in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sgdol.metrics import RMS, Means
from sgdol.torch._tensors import real_gradient, real_view, wide_dtype

__all__ = ["Space", "Vector", "dot", "largest", "norm", "numbers", "total"]

Vector = list[Tensor]

FEW = 64
"""How many coordinates of a gradient are compared to notice that it was rescaled."""

TINY, HUGE = 1e-140, 1e140
"""Norms whose squares are safe in float64."""


def dot(a: Vector, b: Vector) -> Tensor:
    """<a, b>, still on the device; :func:`numbers` reads several at once."""
    return _sum([torch.dot(x, y) for x, y in zip(a, b, strict=True)])


def total(a: Vector) -> Tensor:
    """The sum of the coordinates, still on the device."""
    return _sum([x.sum() for x in a])


def numbers(*scalars: Tensor) -> list[float]:
    """These scalars on the host, in one wait."""
    if all(s.device.type == "cpu" for s in scalars):
        return [s.item() for s in scalars]
    return torch.stack([s.detach().to(device=scalars[0].device, dtype=torch.float64) for s in scalars]).tolist()


def largest(a: Vector) -> float:
    """The largest absolute value."""
    return max(x.abs().max().item() if x.numel() else 0.0 for x in a)


def norm(a: Vector) -> float:
    """||a||, whatever its scale: taken in float64, and again of a multiple if the squares leave that range."""
    value = _norm(a)
    if TINY < value < HUGE or value == 0:
        top = largest(a) if value == 0 else 1.0
        if value or top == 0:
            return value
    top = largest(a)
    return _norm([x.double() / top for x in a]) * top if 0 < top < float("inf") else value


def _norm(a: Vector) -> float:
    return float(_sum([torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in a]).sqrt())


def _sum(scalars: list[Tensor]) -> Tensor:
    first, *rest = scalars
    for other in rest:
        first = first.double() + other.to(device=first.device, dtype=torch.float64)
    return first


class _Kind:
    """Parameters on one device whose values are summed in one type."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.dtype = wide_dtype(params[0].dtype)
        self.shapes = [real_view(p).shape for p in params]
        self.sizes = [shape.numel() for shape in self.shapes]
        self._pointers: list[int] = []
        self._flat: list[Tensor] = []

    def flat(self) -> list[Tensor]:
        """The parameters' own memory, flat; of one that is not contiguous, in its shape."""
        pointers = [p.data_ptr() for p in self.params]
        if pointers != self._pointers:
            views = [real_view(p.detach()) for p in self.params]
            self._flat = [v.view(-1) if v.is_contiguous() else v for v in views]
            self._pointers = pointers
        return self._flat

    def gather(self, pieces: Sequence[Tensor]) -> Tensor:
        """These tensors, one for each parameter, as one flat tensor of the wide type."""
        return torch.cat([piece.reshape(-1) for piece in pieces]).to(self.dtype)

    def gradients(self) -> Tensor:
        pieces = []
        for p, size in zip(self.params, self.sizes, strict=True):
            grad = p.grad
            if grad is None:
                pieces.append(torch.zeros(size, dtype=self.dtype, device=p.device))
            else:
                pieces.append(real_gradient(grad))
        return self.gather(pieces)

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split_with_sizes(flat, self.sizes)

    def sums(self, flat: Tensor) -> list[float]:
        """The sum over each parameter, of coordinates that are not negative."""
        return torch.stack(torch._foreach_norm(self.split(flat), 1)).tolist()

    def scatter(self, flat: Tensor) -> None:
        targets = self.flat()
        pieces = self.split(flat)
        if any(t.dim() != 1 for t in targets):
            pieces = [piece.view(t.shape) for piece, t in zip(pieces, targets, strict=True)]
        torch._foreach_copy_(targets, pieces)


class Space:
    """The vectors over some parameters."""

    def __init__(self, params: list[Tensor]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in params:
            kinds.setdefault((p.device, wide_dtype(p.dtype)), []).append(p)
        self.given = params
        """As they were given."""
        self._kinds = [_Kind(some) for some in kinds.values()]
        self.params = [p for kind in self._kinds for p in kind.params]
        """All of them, in the order in which they lie in a vector."""
        self.size = sum(sum(kind.sizes) for kind in self._kinds)
        """How many real coordinates there are."""
        self.narrow = any(real_view(p).dtype != wide_dtype(p.dtype) for p in params)
        """Whether a parameter cannot hold what a vector can."""

    # Parameters and vectors -------------------------------------------------------------------------------------------

    def point(self) -> Vector:
        """Where the parameters are: a copy."""
        return [kind.gather(kind.flat()) for kind in self._kinds]

    def gradients(self, factor: float) -> Vector:
        """What is in ``.grad``, 0 where nothing is, times a factor: a copy."""
        found = [kind.gradients() for kind in self._kinds]
        return found if factor == 1.0 else [g.mul_(factor) for g in found]

    def few_gradients(self, v: Vector) -> tuple[Tensor, Tensor]:
        """A few coordinates of a vector, and what is in ``.grad`` there now: of the largest parameter."""
        kind = self._kinds[0]
        place = kind.sizes.index(max(kind.sizes))
        start = sum(kind.sizes[:place])
        grad = kind.params[place].grad
        assert grad is not None
        piece = real_gradient(grad).reshape(-1)[:FEW].to(kind.dtype)
        return v[0][start : start + piece.numel()], piece

    def put(self, x: Vector) -> None:
        """Move the parameters there."""
        for kind, flat in zip(self._kinds, x, strict=True):
            kind.scatter(flat)

    def put_gradients(self, g: Vector, factor: float) -> None:
        """Leave these gradients, divided by the factor, in ``.grad``."""
        for p, piece in self.pieces(g):
            grad = piece if factor == 1.0 else piece / factor
            grad = grad.to(real_view(p).dtype)
            p.grad = torch.view_as_complex(grad) if p.is_complex() else grad

    def collect(self, piece: Callable[[Tensor], Tensor]) -> Vector:
        """A vector from a tensor for each parameter."""
        return [kind.gather([piece(p) for p in kind.params]) for kind in self._kinds]

    def taken_from(self, other: Space, v: Vector) -> Vector:
        """A vector of another space over this one's parameters: 0 where that had none."""
        if other is self:
            return v
        known = dict(other.pieces(v))
        result = self.zeros()
        for p, piece in self.pieces(result):
            if p in known:
                piece.copy_(known[p])
        return result

    def zeros(self) -> Vector:
        """The origin."""
        return [torch.zeros(sum(k.sizes), dtype=k.dtype, device=k.params[0].device) for k in self._kinds]

    def pieces(self, v: Vector) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with its part of the vector, in its (real) shape; writing to it writes to the vector."""
        return [
            (p, piece.view(shape))
            for kind, flat in zip(self._kinds, v, strict=True)
            for p, piece, shape in zip(kind.params, kind.split(flat), kind.shapes, strict=True)
        ]

    # Arithmetic -------------------------------------------------------------------------------------------------------

    def scale(self, v: Vector, factors: dict[Tensor, float]) -> None:
        """Multiply each parameter's part by its own factor, or all by one if they agree."""
        if len(set(factors.values())) == 1:
            factor = next(iter(factors.values()))
            for flat in v if factor != 1.0 else ():
                flat.mul_(factor)
            return
        for kind, flat in zip(self._kinds, v, strict=True):
            torch._foreach_mul_(kind.split(flat), [factors[p] for p in kind.params])

    def rescale(self, squares: Vector, before: Vector, now: Vector) -> None:
        """Squares of contributions to gradients that have been rescaled since, or written by hand: those are one."""
        for kind, q, old, new in zip(self._kinds, squares, before, now, strict=True):
            norms = zip(torch._foreach_norm(kind.split(old)), torch._foreach_norm(kind.split(new)), strict=True)
            for piece, g, (a, b) in zip(kind.split(q), kind.split(new), norms, strict=True):
                torch.mul(g, g, out=piece) if a == 0 else piece.mul_((b / a) ** 2)

    def inverse_diagonal(self, metric: RMS, squares: Vector | None, weight: float, g: Vector) -> Vector:
        """1/D, from the weighted sums of the past squares and of the weights; without a past, from this gradient.

        With the coefficients of :meth:`sgdol.metrics.RMS.coefficients`.
        """
        seen = [x * x for x in g] if squares is None else squares
        sums = [kind.sums(v) for kind, v in zip(self._kinds, seen, strict=True)]
        share = self.size / (sum(map(sum, sums)) or 1.0)
        # The coefficients for an overall mean of 1, of tensors whose own mean is 1 and 0: between them D^2 is linear.
        a, c = metric.coefficients(weight, Means(1.0, 1.0))
        _, least = metric.coefficients(weight, Means(0.0, 1.0))
        slope, least, a = c * c - least * least, least * least, a * a * share * (weight or 1.0)
        result = []
        for kind, v, s in zip(self._kinds, seen, sums, strict=True):
            inverse = torch.mul(v, 0.0 if squares is None else a)
            floors = [least + slope * share * x / size if size else 1.0 for x, size in zip(s, kind.sizes, strict=True)]
            torch._foreach_add_(kind.split(inverse), floors)
            result.append(inverse.rsqrt_())
        return result
