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

from sgdol._kronecker import following, is_due, renewed, rotate, rotate_back, sides
from sgdol._numbers import maximum
from sgdol.metrics import RMS, Factors, Kronecker, Means, Metric, is_diagonal
from sgdol.torch._operators import Block, Diagonal, Opaque, Rotated
from sgdol.torch._update import Gate
from sgdol.torch._vectors import Layout, as_number, dot, scalar_dtype, wide_dtype
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
        self._v = self._make_squares(states, owned)
        if owned:
            for one, weight in zip(states, self._weights.unbind(), strict=True):
                one["metric.weight"] = weight  # a view: updating all weights of the entry updates the state
        self._read_weight()

    def _make_squares(self, states: list[dict[str, Any]], owned: bool) -> Any:
        if not owned:
            return self._layout.entry([one.get("metric.square") for one in states], self._e)
        self._layout.vector("metric.square", self._e)  # makes them
        return None

    def _squares(self) -> Tensor:
        return self._layout.vector("metric.square", self._e) if self._v is None else self._v

    def _read_weight(self) -> None:
        # One Python number if all tensors have the same w, as they usually have: arithmetic with it needs no kernel.
        self._weight: Any = self._weights
        if self._weights.device.type == "cpu":
            weights = self._weights.tolist()
            if weights.count(weights[0]) == len(weights):
                self._weight = weights[0]

    def sums(self) -> Tensor:
        """The sum of v/w over this rank's piece of each tensor."""
        return self._layout.sums(self._e, self._squares()) / maximum(self._weight, 1.0)  # w is 0 or at least 1

    def operator(self, means: list[Any], overall: Any) -> Diagonal:
        """D of the coming step: 1/D = (a v + b mean + c)^(-1/2).

        Args:
            means: the mean square of each tensor.
            overall: the mean square over all tensors of the metric.
        """
        a, b, c = self._metric.coefficients(self._weight, overall)
        # One w and one tensor; one w and several tensors; a w for each tensor. Each with as few kernels as it needs.
        if isinstance(a, float) and not self._entry.merged:
            return Diagonal(torch.mul(self._squares(), a).add_(b * means[0] + c).rsqrt_())
        if isinstance(a, float):
            return Diagonal(self._spread([b * mean + c for mean in means]).add_(self._squares(), alpha=a).rsqrt_())
        stacked = torch.stack([as_number(mean, self._weights) for mean in means])
        return Diagonal(torch.mul(self._squares(), self._spread(a)).add_(self._spread(b * stacked + c)).rsqrt_())

    def _spread(self, values: Any) -> Tensor:
        # One number per tensor -> one per coordinate. Of a list the result is new memory, which operator() writes to.
        if isinstance(values, list):
            values = torch.tensor(values, dtype=self._entry.dtype)
        return self._layout.spread(self._e, values.to(self._entry.dtype))

    def past_square(self, operator: Diagonal) -> float:
        """The mean of <g, D^-1 g> over earlier gradients: sum of v/(D w)."""
        if isinstance(self._weight, float):
            return dot(self._squares(), operator.inverse).item() / max(self._weight, 1.0)
        sums = self._layout.sums(self._e, self._squares() * operator.inverse)
        return (sums / self._weights.clamp(min=1)).sum().item()

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
        v = self._squares()
        _add_square(v.mul_(decay), g, scale)
        self._layout.store("metric.square", self._e, v)
        self._weights.mul_(decay).add_(gate.weight(1.0))
        self._read_weight()


class Matrices(Squares):
    """The memory of :class:`sgdol.metrics.Kronecker`, for one matrix or for small tensors, matrices last.

    v is the decayed sum of squares in the basis. For a matrix v_ij = a_i c_j / sum a, with the sums a over its rows and
    the sums c over its columns. Arguments as in :class:`Squares`.
    """

    def _make_squares(self, states: list[dict[str, Any]], owned: bool) -> Tensor:
        layout, e = self._layout, self._e
        params = layout.params[layout.rows(e)]
        for p, one in zip(params, states, strict=True):
            for name, value in blank(self._metric, p).items():
                one.setdefault(name, value)
        v = torch.empty(self._entry.shape, dtype=self._entry.dtype, device=self._entry.device)
        parts = layout.parts(e, v)
        # The first tensors have squares per coordinate, like RMS; from here on there are matrices.
        first = next(i for i, one in enumerate(states) if "metric.square" not in one)
        for p, part, one in zip(params[:first], parts, states, strict=False):
            part.copy_(real_view(local(one["metric.square"])))
            if owned:
                one["metric.square"] = like_parameter(part, p)
        self._matrices_start = start = sum(self._entry.sizes[:first])
        self._batches: list[_Batch] = []

        def alike(one: dict[str, Any]) -> tuple[int, int, float]:
            return len(one["metric.rows"]), len(one["metric.columns"]), one["metric.count"].item()

        for _, batch_states in groupby(states[first:], alike):
            batch = _Batch(start, list(batch_states))
            self._batches.append(batch)
            start = batch.block.stop
        for batch in self._batches:  # the squares of matrices are not in the state: they follow from rows and columns
            batch.write_squares(v)
        return v

    def operator(self, means: list[Any], overall: Any) -> Rotated:  # type: ignore[override]
        return Rotated(super().operator(means, overall).inverse, [batch.block for batch in self._batches])

    def observe(self, g: Tensor, gate: Gate, scale: float, h: Tensor, momentum: Tensor | None) -> None:
        decay, start = gate.weight(self._metric.decay, 1.0), self._matrices_start
        if start:
            _add_square(self._v[:start].mul_(decay), g[:start], scale)
        for batch in self._batches:
            batch.observe(g, decay, scale, h, momentum)
            batch.write_squares(self._v)
        self._weights.mul_(decay).add_(gate.weight(1.0))
        self._read_weight()


class _Batch:
    """Matrices of one shape that lie end to end in an entry, and whose bases are renewed in the same updates.

    Args:
        start: the index of their first number in the entry.
        states: the optimizer's state of each; its tensors are replaced by views of stacked ones.
    """

    def __init__(self, start: int, states: list[dict[str, Any]]) -> None:
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
        shape = (*parts.rows.shape, parts.columns.shape[-1])
        self.block = Block(start, start + math.prod(shape), shape, parts.left_basis, parts.right_basis)

    def write_squares(self, v: Tensor) -> None:
        rows, columns = self._parts.rows, self._parts.columns
        total = rows.sum(-1, keepdim=True).clamp_(min=torch.finfo(rows.dtype).tiny)  # 0 before any gradient but 0
        torch.mul((rows / total).unsqueeze(-1), columns.unsqueeze(-2), out=self.block.of(v))

    def observe(self, g: Tensor, decay: Any, scale: float, h: Tensor, momentum: Tensor | None) -> None:
        parts, block = self._parts, self.block
        g, h = (block.of(x) if scale == 1 else block.of(x) * scale for x in (g, h))
        squares = h.square()
        parts.rows.mul_(decay).add_(squares.sum(-1))
        parts.columns.mul_(decay).add_(squares.sum(-2))
        # Only the device knows whether the update counts, and it is not waited for: the count rises in any case.
        self._count = following(self._count)
        parts.count.fill_(self._count)
        for factor, a in ((parts.left, g), (parts.right, g.mT)):
            if isinstance(factor, Tensor):
                factor.mul_(decay)
                (factor.addmm_ if factor.dim() == 2 else factor.baddbmm_)(a, a.mT)  # g g^T and g^T g
        if is_due(self._count):
            self._renew_bases(None if momentum is None else block.of(momentum))

    def _renew_bases(self, momentum: Tensor | None) -> None:
        parts = self._parts
        before = parts.left_basis, parts.right_basis, parts.rows, parts.columns
        after = renewed(parts._replace(count=self._count))
        if momentum is not None:  # from the old basis to the new one: Q_new^T Q_old on either side
            changes = (
                old.mT @ new if isinstance(old, Tensor) else () for old, new in zip(before[:2], after[:2], strict=True)
            )
            momentum.copy_(rotate(momentum, *changes))
        for old, new in zip(before, after, strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)


def _add_square(v: Tensor, g: Tensor, scale: float) -> None:
    if scale != 1:
        g = g * scale  # before squaring: scale^2 g^2 is in range where g^2 is not
    v.addcmul_(g, g)


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
    return isinstance(metric, RMS) and is_diagonal(metric)


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
        v = fitted(parts["metric.square"], param).to(wide_dtype(param.dtype))
        v = v.reshape(len(fresh["metric.rows"]), len(fresh["metric.columns"]))
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
        shape = len(held["metric.rows"]), len(held["metric.columns"])
        total = found[0].sum().clamp(min=torch.finfo(found[0].dtype).tiny)
        for name in rest.keys() & set(in_basis):
            rest[name] = rotate_back(held[name].reshape(shape).to(total.dtype), *bases).reshape(held[name].shape)
        square = torch.outer(found[0] / total, found[1])
        square = square.reshape((*param.shape, 2) if param.is_complex() else param.shape)
        return {**rest, "metric.square": square, "metric.weight": parts["metric.weight"]}
    return held
