"""The parameters that take part, as one vector: what the optimizer without M computes with.

Every operation on a vector is one kernel, however many tensors a model has: on small models the time of a step is the
number of calls. A vector is a list of flat tensors, one for each device and wide type among the parameters, which is to
say one as a rule. Values are in float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgdol.metrics import RMS, Means
from sgdol.torch._tensors import real_gradient, real_view, wide_dtype

__all__ = ["APART", "Space", "Vector", "dot", "largest", "multiply", "norm", "numbers", "same", "total"]

Vector = list[Tensor]

KEPT = 1 << 20
"""Vectors of at most so many coordinates keep their memory from step to step."""

LONG = 1 << 12
"""Tensors that are longer than this on average are summed one by one: what sums all at once takes longer a number."""

FEW = 64
"""How many coordinates of a gradient are compared to notice that it was rescaled."""

APART = 2**-6
"""Rounding of bfloat16 is less of a gradient's length than this, and anything else that is matters little."""


def multiply(a: Vector, b: Vector, out: Vector) -> Vector:
    """The products of the coordinates, in this memory."""
    return [torch.mul(x, y, out=z) for x, y, z in zip(a, b, out, strict=True)]


def dot(a: Vector, b: Vector) -> Tensor:
    """<a, b>, still on the device; :func:`numbers` reads several at once."""
    if len(a) == 1:
        return torch.dot(a[0], b[0])
    return _sum([torch.dot(x, y) for x, y in zip(a, b, strict=True)])


def total(a: Vector) -> Tensor:
    """The sum of the coordinates, still on the device."""
    return _sum([x.sum() for x in a])


def numbers(*scalars: Tensor) -> list[float]:
    """These scalars on the host, in one wait."""
    if scalars[0].device.type == "cpu":
        return [s.item() for s in scalars]
    return torch.stack([s.detach().to(device=scalars[0].device, dtype=torch.float64) for s in scalars]).tolist()


def largest(a: Vector) -> float:
    """The largest absolute value."""
    return max(x.abs().max().item() if x.numel() else 0.0 for x in a)


def norm(a: Vector) -> float:
    """||a||, whatever its scale: taken again of a multiple if the squares come near the end of the range."""
    value = math.sqrt(numbers(dot(a, a))[0])
    safe = min(torch.finfo(x.dtype).max for x in a) ** 0.25
    if 1 / safe < value < safe:
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


def same(a: Vector, b: Vector) -> bool:
    """Whether these are the same numbers."""
    return all(map(torch.equal, a, b))


class _Memory:
    """A flat tensor, and each parameter's part of it in its shape.

    On the host it is also seen through numpy, whose calls take a fraction of the time where a tensor is small.
    """

    def __init__(self, kind: _Kind, flat: Tensor) -> None:
        self.flat = flat
        parts = flat.split(kind.sizes)
        self.pieces = [v.view(s) for v, s in zip(parts, kind.shapes, strict=True)]
        self.sample = parts[kind.longest][:FEW]
        self.array = flat.numpy() if flat.device.type == "cpu" else None

    @cached_property
    def arrays(self) -> list[Any]:
        """The parts, through numpy."""
        return [piece.numpy() for piece in self.pieces]


class _Kind:
    """Parameters on one device whose values are summed in one type."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.dtype = wide_dtype(params[0].dtype)
        self.device = params[0].device
        self.shapes = [real_view(p).shape for p in params]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.size = sum(self.sizes)
        self.longest = self.sizes.index(max(self.sizes))
        self.complex = any(p.is_complex() for p in params)
        self._starts = [0, *accumulate(self.sizes[:-1])] if all(self.sizes) else []
        self._kept: dict[int, _Memory] = {}
        self._pointers: list[int] = []
        self._own: list[Tensor] = []

    def own(self) -> list[Tensor]:
        """The parameters' own memory, as real tensors."""
        pointers = [p.data_ptr() for p in self.params]
        if pointers != self._pointers:
            self._own = [real_view(p.detach()) for p in self.params]
            for view, shape in zip(self._own, self.shapes, strict=True):
                if view.shape != shape:
                    raise RuntimeError(
                        f"a parameter has shape {tuple(view.shape)} now and had {tuple(shape)} before, which what was "
                        "learned belongs to: call opt.restart()"
                    )
            self._pointers = pointers
        return self._own

    def keep(self, flat: Tensor) -> Tensor:
        """Remember the parts of memory that is kept anyway."""
        self._kept[id(flat)] = _Memory(self, flat)
        return flat

    def memory(self, flat: Tensor) -> _Memory:
        """The same memory, in parts."""
        kept = self._kept.get(id(flat))
        return kept if kept is not None and kept.flat is flat else _Memory(self, flat)

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part, in its shape."""
        return self.memory(flat).pieces

    def sums(self, flat: Tensor) -> list[float]:
        """The sum over each parameter, of coordinates that are not negative."""
        memory = self.memory(flat)
        if memory.array is not None and self._starts and self.size <= LONG * len(self.sizes):
            return np.add.reduceat(memory.array, self._starts).tolist()
        if memory.array is None and self.size <= LONG * len(self.sizes):
            return torch.stack(torch._foreach_norm(memory.pieces, 1)).tolist()
        return numbers(*(piece.sum() for piece in memory.pieces))

    def affine(self, flat: Tensor, factor: float, terms: list[float], out: Tensor) -> Tensor:
        """The factor times the numbers, plus a number for each parameter, in this memory."""
        given, memory = self.memory(flat).array, self.memory(out)
        if given is None or memory.array is None:
            torch.mul(flat, factor, out=out)
            torch._foreach_add_(memory.pieces, terms)
            return out
        np.multiply(given, factor, out=memory.array)
        for part, term in zip(memory.arrays, terms, strict=True):
            np.add(part, term, out=part)
        return out

    def collect(self, flat: Tensor, found: list[Tensor | None]) -> Tensor:
        """These tensors, one for each parameter, 0 where there is none."""
        pieces = self.memory(flat).pieces
        given = [t for t in found if t is not None]
        if len(given) < len(found):
            flat.zero_()
            pieces = [piece for piece, t in zip(pieces, found, strict=True) if t is not None]
        torch._foreach_copy_(pieces, [real_gradient(t) for t in given] if self.complex else given)
        return flat


class Space:
    """The vectors over some parameters."""

    def __init__(self, params: list[Tensor]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in params:
            kinds.setdefault((p.device, wide_dtype(p.dtype)), []).append(p)
        self._kinds = [_Kind(some) for some in kinds.values()]
        self._kept: dict[str, Vector] = {}
        self.given = params
        """As they were given."""
        self.params = [p for kind in self._kinds for p in kind.params]
        """All of them, in the order in which they lie in a vector."""
        self.size = sum(kind.size for kind in self._kinds)
        """How many real coordinates there are."""
        self.keeps = self.size <= KEPT
        """Whether memory is kept by its name."""
        self.narrow = any(real_view(p).dtype != wide_dtype(p.dtype) for p in params)
        """Whether a parameter cannot hold what a vector can."""

    # Parameters and vectors -------------------------------------------------------------------------------------------

    def empty(self, name: str) -> Vector:
        """Memory for a vector. Small ones are kept by their name: asking for memory would cost more than using it.

        Whoever asks for a name again writes over what he got before.
        """
        found = self._kept.get(name)
        if found is None:
            found = [torch.empty(kind.size, dtype=kind.dtype, device=kind.device) for kind in self._kinds]
            if self.keeps:
                self._kept[name] = self._watch(found)
        return found

    def zeros(self) -> Vector:
        """A vector that will be kept."""
        return self._watch([torch.zeros(kind.size, dtype=kind.dtype, device=kind.device) for kind in self._kinds])

    def _watch(self, v: Vector) -> Vector:
        return [kind.keep(flat) for kind, flat in zip(self._kinds, v, strict=True)]

    def point(self, name: str) -> Vector:
        """Where the parameters are: a copy, in the memory of this name."""
        x = self.empty(name)
        for kind, flat in zip(self._kinds, x, strict=True):
            torch._foreach_copy_(kind.pieces(flat), kind.own())
        return x

    def put(self, x: Vector) -> None:
        """Move the parameters there."""
        for kind, flat in zip(self._kinds, x, strict=True):
            torch._foreach_copy_(kind.own(), kind.pieces(flat))

    def gradients(self, factor: float, name: str) -> Vector:
        """What is in ``.grad``, 0 where nothing is, times a factor: a copy, in the memory of this name."""
        return self.collect(_gradient, factor, name)

    def put_gradients(self, g: Vector, factor: float) -> None:
        """Leave copies of these gradients, divided by the factor, in ``.grad``."""
        for p, piece in self.pieces(g):
            grad = (piece / factor).to(real_view(p).dtype)
            p.grad = torch.view_as_complex(grad) if p.is_complex() else grad

    def has_gradient(self, g: Vector, factor: float) -> bool:
        """Whether the longest parameter's gradient is what this vector says, as far as a few entries tell."""
        kind = self._kinds[0]
        grad = kind.params[kind.longest].grad
        if grad is None:
            return False
        sample, grad = kind.memory(g[0]).sample, real_gradient(grad)
        entries = grad.as_strided(sample.shape, (1,)) if grad.is_contiguous() else grad.reshape(-1)[:FEW]
        return torch.equal(sample if factor == 1.0 else sample / factor, entries.to(sample.dtype))

    def collect(self, tensor_of: Callable[[Tensor], Tensor | None], factor: float, name: str) -> Vector:
        """A tensor for each parameter, 0 where there is none, times a factor: a vector in the memory of this name."""
        found = self.empty(name)
        for kind, flat in zip(self._kinds, found, strict=True):
            kind.collect(flat, [tensor_of(p) for p in kind.params])
        return found if factor == 1.0 else [flat.mul_(factor) for flat in found]

    def taken_from(self, other: Space, v: Vector) -> Vector:
        """A vector of another space over this one's parameters: 0 where that had none."""
        if other is self:
            return v
        known = dict(other.pieces(v))
        result = [torch.zeros(kind.size, dtype=kind.dtype, device=kind.device) for kind in self._kinds]
        for p, piece in self.pieces(result):
            if p in known:
                piece.copy_(known[p])
        return result

    def pieces(self, v: Vector) -> Iterable[tuple[Tensor, Tensor]]:
        """Each parameter with its part of the vector, in its (real) shape; writing to it writes to the vector."""
        for kind, flat in zip(self._kinds, v, strict=True):
            yield from zip(kind.params, kind.pieces(flat), strict=True)

    # Arithmetic -------------------------------------------------------------------------------------------------------

    def scale(self, v: Vector, factors: dict[Tensor, float]) -> None:
        """Multiply each parameter's part by its own factor, or all by one if they agree."""
        if len(set(factors.values())) == 1:
            factor = next(iter(factors.values()))
            for flat in v if factor != 1.0 else ():
                flat.mul_(factor)
            return
        for kind, flat in zip(self._kinds, v, strict=True):
            torch._foreach_mul_(kind.pieces(flat), [factors[p] for p in kind.params])

    def rescale(self, squares: Vector, before: Vector, now: Vector) -> bool:
        """Squares of contributions to gradients that have been rescaled since, or written by hand: those are one.

        Returns whether a tensor was changed by more than a factor.
        """
        bent = False
        for kind, q, old, new in zip(self._kinds, squares, before, now, strict=True):
            olds, gradients = kind.pieces(old), kind.pieces(new)
            norms = zip(torch._foreach_norm(olds), torch._foreach_norm(gradients), strict=True)
            for piece, g, g_old, (a, b) in zip(kind.pieces(q), gradients, olds, norms, strict=True):
                if a == 0:
                    torch.mul(g, g, out=piece)
                    continue
                piece.mul_((b / a) ** 2)
                bent = bent or bool(torch.sub(g, g_old * (b / a)).norm() > APART * b)
        return bent

    def inverse_diagonal(self, metric: RMS, squares: Vector | None, weight: float, g: Vector) -> Vector:
        """1/D, from the weighted sums of the past squares and of the weights; without a past, from this gradient.

        With the coefficients of :meth:`sgdol.metrics.RMS.coefficients`.
        """
        seen = multiply(g, g, self.empty("scratch")) if squares is None else squares
        sums = [kind.sums(v) for kind, v in zip(self._kinds, seen, strict=True)]
        share = self.size / (sum(map(sum, sums)) or 1.0)
        # The coefficients for an overall mean of 1, of tensors whose own mean is 1 too; where that is 0, D is at its
        # floor, and between them D^2 is linear.
        a, c = metric.coefficients(weight, Means(1.0, 1.0))
        least = metric.floor**2
        slope, a = c * c - least, a * a * share * (weight or 1.0)
        result = self.empty("inverse")
        for kind, v, s, inverse in zip(self._kinds, seen, sums, result, strict=True):
            terms = [least + slope * share * x / (size or 1) for x, size in zip(s, kind.sizes, strict=True)]
            kind.affine(v, 0.0 if squares is None else a, terms, inverse).rsqrt_()
        return result


def _gradient(p: Tensor) -> Tensor | None:
    return p.grad
