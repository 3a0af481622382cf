"""What a metric remembers of the tensors of one entry of a layout, and D of that entry.

Each class has ``sums`` (of the squares that D is made of), ``operator``, ``past_square`` and ``observe``. Of the layout
that makes the updates, the vectors are those in the optimizer's state, and are written to in place; of any other layout
they are copies.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from sgdol._kronecker import following, is_due, renewed, rotate, rotate_back, sides
from sgdol._numbers import maximum
from sgdol.metrics import RMS, Factors, Kronecker, Means, Metric, is_diagonal
from sgdol.torch._operators import Block, Diagonal, Opaque, Rotated
from sgdol.torch._update import Gate
from sgdol.torch._vectors import Layout, as_number, dot, scalar_dtype, wide_dtype
from sgdol.torch._world import fitted, is_sharded, like_parameter, local, real_view

__all__ = ["Matrices", "Squares", "Whole", "blank", "carried_over", "is_diagonal_on"]


class Squares:
    """What :class:`sgdol.metrics.RMS` remembers of an entry, merged or not: v, and w of each tensor.

    Args:
        metric: an RMS.
        layout: that has the entry.
        e: which entry.
        state: the optimizer's.
        owned: whether the vectors are those in the state, or copies.
    """

    def __init__(self, metric: RMS, layout: Layout, e: int, state: dict[Any, Any], owned: bool) -> None:
        self._metric, self._layout, self._e, self._entry = metric, layout, e, layout.entries[e]
        held = [state[p] if owned else dict(state.get(p, {})) for p in layout.params[layout.rows(e)]]
        zero = torch.zeros((), dtype=scalar_dtype(self._entry.device), device=self._entry.device)
        self._weights = torch.stack([one.get("metric.weight", zero) for one in held])
        self._v = self._make_squares(held, owned)
        if owned:
            for one, weight in zip(held, self._weights.unbind(), strict=True):
                one["metric.weight"] = weight
        self._weigh()

    def _make_squares(self, held: list[dict[str, Any]], owned: bool) -> Tensor:
        """The vector v, of what is held of each tensor."""
        if owned:
            return self._layout.vector("metric.square", self._e)
        return self._layout.entry([one.get("metric.square") for one in held], self._e)

    def _weigh(self) -> None:
        """Read w, which may be 0, or at least 1: one number if it is that of all tensors, as it is as a rule."""
        self._weight: Any = self._weights
        if self._weights.device.type == "cpu":
            weights = self._weights.tolist()
            if weights.count(weights[0]) == len(weights):
                self._weight = weights[0]

    def sums(self) -> Tensor:
        """The sum of v/w over this rank's piece of each tensor."""
        return self._layout.sums(self._e, self._v) / maximum(self._weight, 1.0)

    def operator(self, means: list[Any], overall: Any) -> Diagonal:
        """D of the coming step.

        Args:
            means: of the squares of each tensor.
            overall: the mean over all tensors.
        """
        a, b, c = self._metric.coefficients(self._weight, overall)
        if isinstance(a, float) and not self._entry.merged:
            return Diagonal(torch.mul(self._v, a).add_(b * means[0] + c).rsqrt_())
        if isinstance(a, float):
            return Diagonal(self._spread([b * mean + c for mean in means]).add_(self._v, alpha=a).rsqrt_())
        each = torch.stack([as_number(mean, self._weights) for mean in means])
        return Diagonal(torch.mul(self._v, self._spread(a)).add_(self._spread(b * each + c)).rsqrt_())

    def _spread(self, values: Any) -> Tensor:
        """A number for each tensor, at each of its coordinates; in new memory if it is a list."""
        if isinstance(values, list):
            values = torch.tensor(values, dtype=self._entry.dtype)
        return self._layout.spread(self._e, values.to(self._entry.dtype))

    def past_square(self, operator: Diagonal) -> float:
        """The mean of past <g, D^-1 g>, summed over the tensors."""
        if isinstance(self._weight, float):
            return dot(self._v, operator.inverse).item() / max(self._weight, 1.0)
        return (self._layout.sums(self._e, self._v * operator.inverse) / self._weights.clamp(min=1)).sum().item()

    def observe(self, g: Tensor, gate: Gate, scale: float, h: Tensor, kept: Tensor | None) -> None:
        """Remember the mean gradient of an update; see :meth:`Matrices.observe`."""
        decay = gate.weight(self._metric.decay, 1.0)
        _add_square(self._v.mul_(decay), g, scale)
        self._weights.mul_(decay).add_(gate.weight(1.0))
        self._weigh()


class Matrices(Squares):
    """What :class:`sgdol.metrics.Kronecker` remembers of an entry: a matrix, or small tensors, matrices last.

    v is the weighted sum of squares in the basis; of a matrix it is made of the sums over its rows and columns.

    Args:
        metric: a Kronecker.
        layout: that has the entry.
        e: which entry.
        state: the optimizer's.
        owned: whether the parts are to be in the state.
    """

    def _make_squares(self, held: list[dict[str, Any]], owned: bool) -> Tensor:
        layout, e = self._layout, self._e
        params = layout.params[layout.rows(e)]
        for p, one in zip(params, held, strict=True):
            for name, value in blank(self._metric, p).items():
                one.setdefault(name, value)
        v = torch.empty(self._entry.shape, dtype=self._entry.dtype, device=self._entry.device)
        parts = layout.parts(e, v)
        first = next(i for i, one in enumerate(held) if "metric.square" not in one)
        for p, part, one in zip(params[:first], parts, held, strict=False):
            part.copy_(real_view(local(one["metric.square"])))
            if owned:
                one["metric.square"] = like_parameter(part, p)
        self._first = sum(self._entry.sizes[:first])
        self._batches: list[_Batch] = []
        start = self._first
        for _, some in groupby(held[first:], lambda one: (*_shape(one), one["metric.count"].item())):
            batch = _Batch(start, list(some))
            self._batches.append(batch)
            start = batch.block.stop
        for batch in self._batches:
            batch.write_squares(v)
        return v

    def operator(self, means: list[Any], overall: Any) -> Rotated:  # type: ignore[override]
        """D of the coming step; see :meth:`Squares.operator`."""
        return Rotated(super().operator(means, overall).inverse, [batch.block for batch in self._batches])

    def observe(self, g: Tensor, gate: Gate, scale: float, h: Tensor, kept: Tensor | None) -> None:
        """Remember the mean gradient of an update.

        Args:
            g: the gradient...
            gate: whether the update counts.
            scale: ...is multiplied by this first.
            h: the gradient in the basis, to be multiplied as well.
            kept: a vector that is kept in the basis, which may be turned now.
        """
        decay = gate.weight(self._metric.decay, 1.0)
        if self._first:
            _add_square(self._v[: self._first].mul_(decay), g[: self._first], scale)
        for batch in self._batches:
            batch.observe(g, decay, scale, h, kept)
            batch.write_squares(self._v)
        self._weights.mul_(decay).add_(gate.weight(1.0))
        self._weigh()


class _Batch:
    """Matrices of one shape, one after the other in an entry, whose bases are renewed in the same updates.

    Args:
        start: where in the entry they begin.
        held: the optimizer's state of each; it gets views of what is kept together.
    """

    def __init__(self, start: int, held: list[dict[str, Any]]) -> None:
        def together(name: str) -> Any:
            name = f"metric.{name}"
            if name not in held[0] or len(held) == 1:
                return held[0].get(name, ())
            stacked = torch.stack([one[name] for one in held])
            for one, part in zip(held, stacked.unbind(), strict=True):
                one[name] = part
            return stacked

        self._parts = parts = Factors(*map(together, Factors._fields))
        self._count = parts.count.flatten()[0].item()
        shape = (*parts.rows.shape, parts.columns.shape[-1])
        self.block = Block(start, start + math.prod(shape), shape, parts.left_basis, parts.right_basis)

    def write_squares(self, v: Tensor) -> None:
        """Write a_i c_j / sum a to where it belongs in the vector of an entry."""
        rows, columns = self._parts.rows, self._parts.columns
        total = rows.sum(-1, keepdim=True).clamp_(min=torch.finfo(rows.dtype).tiny)
        torch.mul((rows / total).unsqueeze(-1), columns.unsqueeze(-2), out=self.block.of(v))

    def observe(self, g: Tensor, decay: Any, scale: float, h: Tensor, kept: Tensor | None) -> None:
        """See :meth:`Matrices.observe`."""
        parts, block = self._parts, self.block
        g, h = (block.of(x) if scale == 1 else block.of(x) * scale for x in (g, h))
        squares = h.square()
        parts.rows.mul_(decay).add_(squares.sum(-1))
        parts.columns.mul_(decay).add_(squares.sum(-2))
        # Updates that a device finds not to count are counted here: nobody waits for it to tell.
        self._count = following(self._count)
        parts.count.fill_(self._count)
        for factor, a in ((parts.left, g), (parts.right, g.mT)):
            if isinstance(factor, Tensor):
                factor.mul_(decay)
                (factor.addmm_ if factor.dim() == 2 else factor.baddbmm_)(a, a.mT)
        if is_due(self._count):
            self._renew(None if kept is None else block.of(kept))

    def _renew(self, kept: Tensor | None) -> None:
        """Renew the bases, and turn a vector that is kept in them."""
        parts = self._parts
        left, right, rows, columns = renewed(parts._replace(count=self._count))
        if kept is not None:
            changes = (
                old.mT @ new if isinstance(old, Tensor) else ()
                for old, new in ((parts.left_basis, left), (parts.right_basis, right))
            )
            kept.copy_(rotate(kept, *changes))
        for old, new in zip(
            (parts.left_basis, parts.right_basis, parts.rows, parts.columns), (left, right, rows, columns), strict=True
        ):
            if isinstance(old, Tensor):
                old.copy_(new)


def _add_square(v: Tensor, g: Tensor, scale: float) -> None:
    """Add the square of scale * g. A scale that is far from 1 keeps the square in range."""
    if scale != 1:
        g = g * scale
    v.addcmul_(g, g)


def _shape(held: dict[str, Any]) -> tuple[int, int]:
    return len(held["metric.rows"]), len(held["metric.columns"])


class Whole:
    """What any other metric remembers of an entry, which is a whole tensor.

    Args:
        metric: whatever it is.
        layout: that has the entry.
        e: which entry.
        state: the optimizer's.
        owned: whether the parts are to be in the state.
    """

    def __init__(self, metric: Metric, layout: Layout, e: int, state: dict[Any, Any], owned: bool) -> None:
        entry = layout.entries[e]
        p = layout.params[entry.start]
        self._metric, self._zero = metric, torch.zeros(entry.shape, dtype=entry.dtype, device=entry.device)
        fresh = metric.initial(self._zero)
        names = [f"metric.{name}" for name in getattr(type(fresh), "_fields", ())]
        held = state.get(p, {})
        if owned:
            held = state[p]
            for name, value in blank(metric, p).items():
                held.setdefault(name, value)
        # Parts that the metric has not for such a tensor, as (), are not kept.
        parts = [local(held[name]) if name in held else value for name, value in zip(names, fresh, strict=True)]
        self._state = type(fresh)(*parts) if names else fresh

    def sums(self) -> Tensor:
        """The sum over the tensor of the squares that D is made of."""
        like = torch.zeros((), dtype=scalar_dtype(self._zero.device), device=self._zero.device)
        mean = as_number(self._metric.mean_square(self._state, self._zero), like)
        return (mean.nan_to_num() * self._zero.numel()).reshape(1)

    def operator(self, means: list[Any], overall: Any) -> Opaque:
        """D of the coming step; see :meth:`Squares.operator`."""
        like = self._zero.new_zeros(())
        return Opaque(self._metric.operator(self._state, Means(as_number(means[0], like), as_number(overall, like))))

    def past_square(self, operator: Opaque) -> Any:
        """The mean of past <g, D^-1 g>."""
        return float(self._metric.past_square(self._state, operator.made))  # type: ignore[attr-defined]

    def observe(self, g: Tensor, gate: Gate, scale: float, h: Tensor, kept: Tensor | None) -> None:
        """Remember the mean gradient of an update; see :meth:`Matrices.observe`."""
        g = g if scale == 1 else g * scale
        for before, after in zip(self._state, self._metric.observe(self._state, g), strict=True):
            if isinstance(before, Tensor):
                after = torch.as_tensor(after, dtype=before.dtype, device=before.device)
                before.copy_(gate.choose(after, before))


def is_diagonal_on(metric: Any, param: Tensor) -> bool:
    """Whether D of this parameter is made as :class:`sgdol.metrics.RMS` makes it, coordinate by coordinate.

    The Kronecker metric leaves vectors and some matrices as they are, and those of which ranks have pieces.
    """
    if type(metric) is Kronecker:
        return is_sharded(param) or not any(sides(tuple(real_view(param.detach()).shape)))
    return isinstance(metric, RMS) and is_diagonal(metric)


def blank(metric: Metric, param: Tensor) -> dict[str, Tensor]:
    """What a metric remembers of a parameter before any update, by its name in the optimizer's state."""
    piece = real_view(local(param.detach()))
    zero = torch.zeros_like(piece, dtype=wide_dtype(param.dtype), memory_format=torch.contiguous_format)
    number = torch.zeros((), dtype=scalar_dtype(piece.device), device=piece.device)
    fresh = RMS().initial(zero) if is_diagonal_on(metric, param) else metric.initial(zero)
    return {
        f"metric.{name}": (like_parameter(value, param) if value.shape == zero.shape else value).clone()
        if isinstance(value, Tensor)
        else number + value
        for name, value in zip(getattr(type(fresh), "_fields", ()), fresh, strict=True)
        if not isinstance(value, tuple)  # what the metric does not remember of such a tensor
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
        v = fitted(parts["metric.square"], param).reshape(*_shape(fresh))
        for side, name, sums in (("left", "rows", v.sum(1)), ("right", "columns", v.sum(0))):
            fresh[f"metric.{name}"] = sums
            if f"metric.{side}" in fresh:
                fresh[f"metric.{side}"] = sums.diag()
        return {**rest, **fresh, "metric.weight": parts["metric.weight"]}
    if "metric.rows" in parts and is_sharded(param):
        found, bases = [], []
        for side, name in (("left", "rows"), ("right", "columns")):
            factor = parts.get(f"metric.{side}")
            found.append(parts[f"metric.{name}"] if factor is None else factor.diagonal())
            bases.append(parts.get(f"metric.{side}_basis", ()))
        total = found[0].sum().clamp(min=torch.finfo(found[0].dtype).tiny)
        for name in rest.keys() & set(in_basis):
            rest[name] = rotate_back(held[name].reshape(*_shape(held)), *bases).reshape(held[name].shape)
        square = torch.outer(found[0] / total, found[1])
        square = square.reshape((*param.shape, 2) if param.is_complex() else param.shape)
        return {**rest, "metric.square": square, "metric.weight": parts["metric.weight"]}
    return held
