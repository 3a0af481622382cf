"""The memory of a metric for one entry of a layout, and D of that entry.

Each class has ``sums`` (of the squares that D is computed from), ``operator``, ``past_square`` and ``observe``. In the
layout in which updates are made (``owned``) the memory is the optimizer's state, and is written to in place. In any
other layout, such as that of the backward passes, it is a copy.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from sgdol._kronecker import (
    back,
    cut_rows,
    following,
    in_blocks,
    into,
    is_due,
    renewed,
    rotate,
    rotate_back,
    sides,
)
from sgdol._numbers import maximum
from sgdol.metrics import RMS, AdaGrad, Factors, Kronecker, Means, Metric
from sgdol.torch._operators import Block, Diagonal, Opaque, Rotated
from sgdol.torch._update import Gate
from sgdol.torch._vectors import Layout, as_number, product, scalar_dtype, wide_dtype
from sgdol.torch._world import fitted, is_sharded, like_parameter, local, real_view

__all__ = ["Matrices", "Squares", "Whole", "blank", "carried_over", "is_diagonal_on"]


class Squares:
    """The memory of :class:`sgdol.metrics.RMS`: v, a decayed sum of g^2 per coordinate, and w, that of 1 per tensor.

    Args:
        metric: an RMS.
        layout: the layout.
        e: the index of the entry in it, merged or not.
        state: the optimizer's state.
        owned: True to write to the state, False for copies.
    """

    def __init__(self, metric: RMS, layout: Layout, e: int, state: dict[Any, Any], owned: bool) -> None:
        self._metric, self._layout, self._e, self._entry = metric, layout, e, layout.entries[e]
        states = [state[p] if owned else dict(state.get(p, {})) for p in layout.params[layout.rows(e)]]
        zero = torch.zeros((), dtype=scalar_dtype(self._entry.device), device=self._entry.device)
        self._weights = torch.stack([one.get("metric.weight", zero) for one in states])
        # Before the first update there is nothing to remember, and nothing is allocated.
        self._is_blank = not (owned or any("metric.weight" in one for one in states))
        if not self._is_blank:
            self._read(states, owned)
        if owned:
            for one, weight in zip(states, self._weights.unbind(), strict=True):
                one["metric.weight"] = weight  # a view: updating all weights of the entry updates the state
        self._read_weight()

    def _read(self, states: list[dict[str, Any]], owned: bool) -> None:
        self._copy = None if owned else self._layout.entry([one.get("metric.square") for one in states], self._e)
        self._squares()  # makes them

    def _squares(self) -> Tensor:
        return self._layout.vector("metric.square", self._e) if self._copy is None else self._copy

    def _read_weight(self) -> None:
        # One Python number if all tensors have the same w, as they usually have: arithmetic with it needs no kernel.
        self._weight: Any = self._weights
        if self._weights.device.type == "cpu":
            weights = self._weights.tolist()
            if weights.count(weights[0]) == len(weights):
                self._weight = weights[0]

    def sums(self) -> Tensor:
        """The sum of v/w over this rank's piece of each tensor."""
        return self._sums().div_(maximum(self._weight, 1.0))  # w is 0 or at least 1

    def past_square(self, operator: Diagonal | Rotated) -> float:
        """The mean of <g, D^-1 g> over earlier gradients: sum of v/(D w)."""
        if isinstance(self._weight, float):
            return float(self._pooled(operator.inverse)) / max(self._weight, 1.0)
        return (self._sums(operator.inverse) / maximum(self._weight, 1.0)).sum().item()

    def _sums(self, inverse: Tensor | None = None) -> Tensor:
        # The sum of v, or of v/D, over each tensor.
        if inverse is None:
            return self._layout.sums(self._e, self._squares())
        return self._layout.number(self._e, self._squares(), inverse)

    def _pooled(self, inverse: Tensor) -> Any:
        # The sum of v/D over all tensors.
        return product(self._squares(), inverse)

    def operator(self, means: list[Any], overall: Any) -> Diagonal | Rotated:
        """D of the coming step: 1/D = (a v + b mean + c)^(-1/2).

        Args:
            means: the mean square of each tensor.
            overall: the mean square over all tensors of the metric.
        """
        a, b, c = self._metric.coefficients(self._weight, overall)
        if isinstance(a, float):
            constants = torch.tensor([b * x + c for x in means], dtype=self._entry.dtype, device=self._entry.device)
        else:
            mean = torch.stack(means) if isinstance(means[0], Tensor) else self._weights.new_tensor(means)
            constants = (b * mean.to(self._weights) + c).to(self._entry.dtype)
        if self._is_blank:
            return Diagonal(self._layout.spread(self._e, constants).rsqrt_())
        return self._operator(a if isinstance(a, float) else a.to(constants), constants)

    def _operator(self, a: Any, constants: Tensor) -> Diagonal | Rotated:
        # D^2 = a v + constant, where a is a Python number or, like the constant, one number for each tensor.
        constant = self._layout.spread(self._e, constants)
        if isinstance(a, float):
            return Diagonal(torch.add(constant, self._squares(), alpha=a).rsqrt_())
        return Diagonal(torch.addcmul(constant, self._squares(), self._layout.spread(self._e, a)).rsqrt_())

    def observe(self, g: Tensor, gate: Gate, scale: float, h: Tensor, momentum: Tensor | None) -> None:
        """Update the memory: v <- decay v + (scale g)^2, w <- decay w + 1.

        Args:
            g: the mean gradient.
            gate: whether the update counts; if not, nothing changes.
            scale: a factor of g and h.
            h: g in the coordinates of D.
            momentum: a vector in the coordinates of D, which is rotated in place when these change; None if there is
                none.
        """
        decay = gate.weight(self._metric.decay, 1.0)
        if gate.host and isinstance(self._weight, float):
            self._weight = decay * self._weight + 1
            self._weights.fill_(self._weight)
        else:
            self._weights.mul_(decay).add_(gate.weight(1.0))
            self._read_weight()
        if scale != 1:  # before squaring: scale^2 g^2 is in range where g^2 is not
            g, h = (g * scale,) * 2 if h is g else (g * scale, h * scale)
        self._add(g, h, decay, momentum)

    def _add(self, g: Tensor, h: Tensor, decay: Any, momentum: Tensor | None) -> None:
        v = self._squares().mul_(decay).addcmul_(g, g)
        self._layout.store("metric.square", self._e, v)


class Matrices(Squares):
    """The memory of :class:`sgdol.metrics.Kronecker`, for one matrix or for small tensors, matrices last.

    The first tensors have v per coordinate, like RMS. For a matrix v is the decayed sum of squares in the basis, and
    v_ij = a_i c_j / sum a, with the sums a over its rows and c over its columns. Arguments as in :class:`Squares`.
    """

    def _read(self, states: list[dict[str, Any]], owned: bool) -> None:
        params = self._layout.params[self._layout.rows(self._e)]
        for p, one in zip(params, states, strict=True):
            for name, value in blank(self._metric, p).items():
                one.setdefault(name, value)
        vectors = [real_view(local(one["metric.square"])) for one in states if "metric.square" in one]
        first, sizes = len(vectors), self._entry.sizes
        self._start = start = sum(sizes[:first])  # of the matrices
        if first:
            self._v = torch.cat([v.reshape(-1) for v in vectors])
            self._tensor_of = torch.repeat_interleave(torch.arange(first), torch.tensor(sizes[:first])).to(
                self._v.device
            )
            if owned:
                for p, one, v, part in zip(params, states, vectors, self._v.split(sizes[:first]), strict=False):
                    one["metric.square"] = like_parameter(part.view(v.shape), p)

        def alike(one: dict[str, Any]) -> tuple[int, int, float]:
            return len(one["metric.rows"]), len(one["metric.columns"]), one["metric.count"].item()

        self._batches: list[_Batch] = []
        for _, batch_states in groupby(states[first:], alike):
            batch = _Batch(start, first, list(batch_states))
            self._batches.append(batch)
            start, first = batch.block.stop, batch.tensors.stop

    def _pooled(self, inverse: Tensor) -> Any:
        rest = product(self._v, inverse[: self._start]) if self._start else 0.0
        return rest + sum(batch.sums(inverse).sum().item() for batch in self._batches)

    def _sums(self, inverse: Tensor | None = None) -> Tensor:
        sums = [batch.sums(inverse) for batch in self._batches]
        if self._start:
            v = self._v if inverse is None else self._v * inverse[: self._start]
            of_vectors = torch.zeros(self._batches[0].tensors.start, dtype=v.dtype, device=v.device)
            sums = [of_vectors.index_add_(0, self._tensor_of, v), *sums]
        return torch.cat(sums).to(self._weights.dtype)

    def _operator(self, a: Any, constants: Tensor) -> Rotated:
        def inverse() -> Tensor:
            parts = [batch.squares(a, constants).view(-1) for batch in self._batches]
            if self._start:
                v = self._v * (a[self._tensor_of] if isinstance(a, Tensor) else a)
                parts.insert(0, v.add_(constants[self._tensor_of]))
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).rsqrt_().view(self._entry.shape)

        return Rotated(inverse, [batch.block for batch in self._batches], keep=self._entry.merged)

    def _add(self, g: Tensor, h: Tensor, decay: Any, momentum: Tensor | None) -> None:
        squares = h * h  # of the first numbers, which are not rotated, those of g
        if self._start:
            self._v.mul_(decay).add_(squares[: self._start])
        for batch in self._batches:
            batch.add_squares(squares, decay)
        del squares  # a refresh needs much memory
        for batch in self._batches:
            batch.add(g, decay, momentum)


class _Batch:
    """Matrices of one shape that lie end to end in an entry, and whose bases are renewed in the same updates.

    Args:
        start: the index of their first number in the entry.
        first: the index of the first of them among the tensors of the entry.
        states: the optimizer's state of each; its tensors are replaced by views of stacked ones.
    """

    def __init__(self, start: int, first: int, states: list[dict[str, Any]]) -> None:
        def stack(name: str) -> Any:
            name = f"metric.{name}"
            if name not in states[0] or len(states) == 1:
                return states[0].get(name, ())
            stacked = torch.stack([one[name] for one in states])
            for one, part in zip(states, stacked.unbind(), strict=True):
                one[name] = part
            return stacked

        self._parts = parts = Factors(*map(stack, Factors._fields))
        self._count = parts.count.flatten()[0].item()
        self.tensors = slice(first, first + len(states))
        shape = (*parts.rows.shape, parts.columns.shape[-1])
        bases = parts.left_basis, parts.right_basis
        self.block = Block(start, start + math.prod(shape), shape, into(*bases), back(*bases))
        self._add_up()

    def _add_up(self) -> None:
        self._total = self._parts.rows.sum(-1, keepdim=True)
        # Of each row in the total, which is 0 before any gradient but 0. A product of two sums may leave the range.
        self._share = self._parts.rows / self._total.clamp(min=torch.finfo(self._total.dtype).tiny)

    def sums(self, inverse: Tensor | None) -> Tensor:
        if inverse is None:
            return self._total.reshape(-1)
        over_columns = self.block.of(inverse) @ self._parts.columns.unsqueeze(-1)
        return (self._share.unsqueeze(-2) @ over_columns).reshape(-1)

    def squares(self, a: Any, constants: Tensor) -> Tensor:
        # a v + constant; the constant, and a if it is no Python number, have one number for each tensor of the entry.
        rows = self._share * (a[self.tensors].view(self._total.shape) if isinstance(a, Tensor) else a)
        constant = constants[self.tensors].view((*self._total.shape, 1))
        return torch.mul(rows.unsqueeze(-1), self._parts.columns.unsqueeze(-2)).add_(constant)  # faster than addcmul

    def add_squares(self, squares: Tensor, decay: Any) -> None:
        squares = self.block.of(squares)
        self._parts.rows.mul_(decay).add_(squares.sum(-1))
        self._parts.columns.mul_(decay).add_(squares.sum(-2))

    def add(self, g: Tensor, decay: Any, momentum: Tensor | None) -> None:
        parts, g = self._parts, self.block.of(g)
        # Only the device knows whether the update counts, and it is not waited for: the count rises in any case.
        self._count = following(self._count)
        parts.count.fill_(self._count)
        for factor, rows in ((parts.left, g), (parts.right, g.mT)):
            if isinstance(factor, Tensor):  # g g^T and g^T g
                if isinstance(decay, Tensor):
                    factor.mul_(decay)
                blocks = in_blocks(factor)
                a = cut_rows(rows, blocks)
                if blocks.dim() > 2:
                    blocks, a = blocks.view(-1, *blocks.shape[-2:]), a.reshape(-1, *a.shape[-2:])
                product_added = blocks.addmm_ if blocks.dim() == 2 else blocks.baddbmm_
                product_added(a, a.mT, beta=1.0 if isinstance(decay, Tensor) else decay)
        if is_due(self._count):
            after, *changes = renewed(parts._replace(count=self._count))
            if momentum is not None:
                momentum = self.block.of(momentum)
                momentum.copy_(rotate(momentum, *changes))
            for old, new in zip(parts, after, strict=True):
                if isinstance(old, Tensor) and new is not old and isinstance(new, Tensor):
                    old.copy_(new)  # in place: the saved state refers to this tensor
        self._add_up()


class Whole:
    """The memory of any other metric, for an entry that is a single tensor. Arguments as in :class:`Squares`."""

    def __init__(self, metric: Metric, layout: Layout, e: int, state: dict[Any, Any], owned: bool) -> None:
        entry = layout.entries[e]
        p = layout.params[entry.start]
        self._metric, self._zero = metric, torch.zeros(entry.shape, dtype=entry.dtype, device=entry.device)
        fresh = metric.initial(self._zero)
        names = [f"metric.{name}" for name in getattr(type(fresh), "_fields", ())]
        saved = state.get(p, {})
        if owned:
            saved = state[p]
            for name, value in blank(metric, p).items():
                saved.setdefault(name, value)
        # A field that is () is one that the metric does not need for this tensor; it is not saved.
        parts = [local(saved[name]) if name in saved else value for name, value in zip(names, fresh, strict=True)]
        self._state = type(fresh)(*parts) if names else fresh

    def sums(self) -> Tensor:
        like = torch.zeros((), dtype=scalar_dtype(self._zero.device), device=self._zero.device)
        mean = as_number(self._metric.mean_square(self._state, self._zero), like)
        return (mean.nan_to_num() * self._zero.numel()).reshape(1)

    def operator(self, means: list[Any], overall: Any) -> Opaque:
        like = self._zero.new_zeros(())
        return Opaque(self._metric.operator(self._state, Means(as_number(means[0], like), as_number(overall, like))))

    def past_square(self, operator: Opaque) -> Any:
        return float(self._metric.past_square(self._state, operator.operator))  # type: ignore[attr-defined]

    def observe(self, g: Tensor, gate: Gate, scale: float, h: Tensor, momentum: Tensor | None) -> None:
        g = g if scale == 1 else g * scale
        for before, after in zip(self._state, self._metric.observe(self._state, g), strict=True):
            if isinstance(before, Tensor):
                after = torch.as_tensor(after, dtype=before.dtype, device=before.device)
                # In place: the saved state refers to this tensor.
                before.copy_(gate.choose(after, before))


def is_diagonal_on(metric: Any, param: Tensor) -> bool:
    """Whether the metric treats this parameter as :class:`sgdol.metrics.RMS` does, coordinate by coordinate.

    The Kronecker metric does so with vectors, with matrices whose sides are too long, and with sharded ones.
    """
    if type(metric) is Kronecker:
        return is_sharded(param) or not any(sides(tuple(real_view(param.detach()).shape)))
    return type(metric) in (RMS, AdaGrad)  # a subclass of one's own may have overridden any method


def _diagonal(factor: Tensor) -> Tensor:
    # A view; one row for each block if there are several.
    return in_blocks(factor).diagonal(dim1=-2, dim2=-1)


def blank(metric: Metric, param: Tensor) -> dict[str, Tensor]:
    """The entries that a metric adds to the optimizer's state of a parameter, as they are before any update."""
    piece = real_view(local(param.detach()))
    zero = torch.zeros_like(piece, dtype=wide_dtype(param.dtype), memory_format=torch.contiguous_format)
    number = torch.zeros((), dtype=scalar_dtype(piece.device), device=piece.device)
    fresh = RMS().initial(zero) if is_diagonal_on(metric, param) else metric.initial(zero)
    return {
        f"metric.{name}": (like_parameter(value, param) if value.shape == zero.shape else value).clone()
        if isinstance(value, Tensor)
        else number + value
        for name, value in zip(getattr(type(fresh), "_fields", ()), fresh, strict=True)
        if not isinstance(value, tuple)  # () is a field that the metric does not need for this tensor
    }


def carried_over(metric: Metric, param: Tensor, held: dict[str, Any], in_basis: tuple[str, ...]) -> dict[str, Any]:
    """What was saved of a whole matrix as it is kept of a sharded one, or the reverse; anything else as it is.

    The Kronecker metric has v of a sharded matrix, and L and R of a whole one. The sums over the rows of v are the
    diagonal of L, those over its columns the diagonal of R. The rest of v, or of L and R, is lost.

    Args:
        metric: of the parameter.
        param: which loads the state.
        held: what was saved of it.
        in_basis: the names of vectors that are kept in the basis of a whole matrix.
    """
    if type(metric) is not Kronecker:
        return held
    rest = {name: value for name, value in held.items() if not name.startswith("metric.")}
    parts = {name: held[name] for name in held if name not in rest}
    if "metric.square" in parts and not is_diagonal_on(metric, param):
        fresh = blank(metric, param)
        v = fitted(parts["metric.square"], param).reshape(len(fresh["metric.rows"]), len(fresh["metric.columns"]))
        for side, name, sums in (("left", "rows", v.sum(1)), ("right", "columns", v.sum(0))):
            fresh[f"metric.{name}"] = sums
            if f"metric.{side}" in fresh:
                diagonal = _diagonal(fresh[f"metric.{side}"])
                diagonal.copy_(sums.view(diagonal.shape))
        return {**rest, **fresh, "metric.weight": parts["metric.weight"]}
    if "metric.rows" in parts and is_sharded(param):
        found, bases = [], []
        for side, name in (("left", "rows"), ("right", "columns")):
            factor = parts.get(f"metric.{side}")
            found.append(parts[f"metric.{name}"] if factor is None else _diagonal(factor).reshape(-1))
            bases.append(parts.get(f"metric.{side}_basis", ()))
        shape = len(held["metric.rows"]), len(held["metric.columns"])
        total = found[0].sum().clamp(min=torch.finfo(found[0].dtype).tiny)
        for name in rest.keys() & set(in_basis):
            rest[name] = rotate_back(held[name].reshape(shape), *bases).reshape(held[name].shape)
        square = torch.outer(found[0] / total, found[1])
        square = square.reshape((*param.shape, 2) if param.is_complex() else param.shape)
        return {**rest, "metric.square": square, "metric.weight": parts["metric.weight"]}
    return held
