r"""Metrics on an optimizer's parameters: what they remember, and the operators D that they make of it.

D of a step is made of the gradients before it, so it is known while the backward passes of the step run, and what they
bring is measured in it at once. A tensor without a past needs the present gradient for its first D
(``Metrics.operators(..., present)``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgdol._numbers import ratio
from sgdol.metrics import RMS, Euclidean, Means, Metric, is_diagonal, is_scale_free
from sgdol.torch._gate import Gate
from sgdol.torch._operators import IDENTITY, Diagonal, Opaque, Operators
from sgdol.torch._vectors import Layout, Vector, as_number, dot, is_small, scalar_dtype, size, sum_of, wide_dtype
from sgdol.torch._world import World, is_sharded, like_parameter, local, real_view

__all__ = ["Metrics"]


FEW = 32
"""Python's own numbers are faster than arrays for so many tensors."""


class _Kind(NamedTuple):
    """The parameters of one metric."""

    metric: Any
    params: list[Tensor]
    fields: list[str]
    """The names under which the parts of the metric's state are kept."""
    rms: bool
    """Whether it is the diagonal metric of this library, which works on merged entries in place."""


class _Past(NamedTuple):
    """What D of the coming step is made of, besides each tensor's own state."""

    overall: list[Any]
    """The mean square over all tensors with a past, of each kind; None if there are none."""
    tensor: dict[Tensor, Any]
    """The mean square of each tensor with a past."""


def _is_rms(metric: Metric) -> bool:
    return isinstance(metric, RMS) and is_diagonal(metric)


class Metrics:
    """The metrics of an optimizer's groups. What they remember is in the optimizer's state.

    Args:
        groups: the parameter groups.
        metric_of: the metric of a group.
        state: the optimizer's state.
        world: gives the world that the optimizer is in.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        metric_of: Callable[[dict[str, Any]], Metric],
        state: dict[Any, Any],
        world: Callable[[], World],
    ) -> None:
        self._groups, self._metric_of, self._state, self._world = groups, metric_of, state, world
        self._kinds: list[_Kind] = []
        for group in groups:
            metric = metric_of(group)
            if isinstance(metric, Euclidean):
                continue
            kind = next((k for k in self._kinds if k.metric == metric), None)
            if kind is None:
                fields = getattr(type(metric.initial(torch.zeros(2, 2))), "_fields", ())
                kind = _Kind(metric, [], [f"metric.{name}" for name in fields], _is_rms(metric))
                self._kinds.append(kind)
            kind.params.extend(group["params"])
            sharded = next((p for p in group["params"] if is_sharded(p)), None)
            if sharded is not None and not is_diagonal(metric):
                raise NotImplementedError(
                    f"metric={metric!r} needs whole matrices, got a sharded parameter of shape {tuple(sharded.shape)}: "
                    'use metric="rms", which works on pieces'
                )
        self.euclidean = not self._kinds
        """Whether D = 1 for all parameters."""
        self._kind_of = {p: kind for kind in self._kinds for p in kind.params}
        self._owner: Layout | None = None  # the layout that the last update had, whose vectors the state is
        self._past: _Past | None = None
        self._made: dict[int, tuple[Layout, Operators]] = {}
        self._known: dict[int, tuple[Sequence[Tensor], bool]] = {}

    def merges(self, group: dict[str, Any]) -> bool:
        """Whether small tensors of a group may lie end to end: the metric treats every coordinate on its own."""
        return isinstance(self._metric_of(group), Euclidean) or _is_rms(self._metric_of(group))

    def forget(self) -> None:
        """What is remembered has changed."""
        self._past, self._made, self._known = None, {}, {}

    def known(self, params: Sequence[Tensor]) -> bool:
        """Whether D of the coming step is known before its gradients are."""
        if self.euclidean:
            return True
        known = self._known.get(id(params))  # by the list itself, which a layout keeps: tensors are slow to look up
        if known is None or known[0] is not params:
            past = self._means_of_past().tensor
            known = params, all(p in past or p not in self._kind_of for p in params)
            self._known[id(params)] = known
        return known[1]

    def _has_past(self, p: Tensor) -> bool:
        """Whether a gradient of the parameter has been seen. A device is not asked for the number of them."""
        held = self._state.get(p, {})
        if not any(name in held for name in self._kind_of[p].fields):
            return not self._kind_of[p].fields  # a metric that remembers nothing needs no past
        weight = held.get("metric.weight")
        return weight is None or _positive(weight)

    # D of a step ------------------------------------------------------------------------------------------------------

    def operators(
        self, layout: Layout, present: Vector | None = None, among: Sequence[Tensor] | None = None
    ) -> Operators:
        """D of the coming step.

        Args:
            layout: the parameters.
            present: the mean gradient of this step, of which D of tensors without a past is made.
            among: the parameters that take part in the step; None for all.
        """
        known = self._made.get(id(layout))
        if known is None or known[0] is not layout:
            operators = Operators([IDENTITY] * len(layout.entries))
            known = layout, operators if self.euclidean else self._operators(layout, present, among or layout.params)
            self._made[id(layout)] = known
        return known[1]

    def _operators(self, layout: Layout, present: Vector | None, among: Sequence[Tensor]) -> Operators:
        past = self._means_of_past()
        needed = present is not None and not self.known(layout.params)
        fresh = self._means_of_present(layout, present, set(among)) if needed else {}  # type: ignore[arg-type]
        found = Operators([IDENTITY] * len(layout.entries))
        for e, entry in enumerate(layout.entries):
            params = layout.params[entry.start : entry.stop]
            kind = self._kind_of.get(params[0])
            if kind is None:
                continue
            overall = past.overall[self._kinds.index(kind)]
            if overall is None:
                overall = fresh.get(("overall", id(kind)), 1.0)  # 1 if none of them takes part
            means = [past.tensor[p] if p in past.tensor else fresh.get(p, overall) for p in params]
            if kind.rms:
                found[e] = self._diagonal(kind.metric, layout, e, means, overall)
            else:
                like = torch.zeros(entry.shape, dtype=entry.dtype, device=entry.device)
                state = self._memory(kind, params[0], like)
                means_of = Means(as_number(means[0], like), as_number(overall, like))
                found[e] = Opaque(kind.metric.operator(state, means_of))
        return found

    def _diagonal(self, metric: RMS, layout: Layout, e: int, means: list[Any], overall: Any) -> Diagonal:
        entry, params = layout.entries[e], layout.params[layout.rows(e)]
        held = [self._state.get(p, {}) for p in params]
        weights = [one.get("metric.weight", layout.like) for one in held]
        past = any("metric.square" in one for one in held)
        if entry.device.type == "cpu":  # numpy's calls take a fraction of the time of torch's
            numbers = [w.item() for w in weights]
            if len(params) <= FEW:
                each = [metric.coefficients(w, Means(m, overall)) for w, m in zip(numbers, means, strict=True)]
                a, c = np.array(each).T
            else:
                a, c = metric.coefficients(np.array(numbers), Means(np.array(means), np.full(len(means), overall)))
            if past and not entry.merged:
                v = (
                    layout.vector("metric.square", e)
                    if layout is self._owner
                    else layout.entry([held[0]["metric.square"]], e)
                )
                return Diagonal(torch.mul(v, a.item()).add_(c.item()).rsqrt_())
            narrow = np.float64 if entry.dtype == torch.float64 else np.float32
            if past and layout is self._owner and min(numbers) == max(numbers):  # as a rule: all have been there always
                spread = layout.spread(e, torch.from_numpy(c.astype(narrow)))
                return Diagonal(torch.mul(layout.vector("metric.square", e), a[0]).add_(spread).rsqrt_())
            a, c = (torch.from_numpy(x.astype(narrow)) for x in (a, c))
        else:
            a, c = metric.coefficients(torch.stack(weights), Means(torch.stack(means), overall))
            a, c = a.to(entry.dtype), c.to(entry.dtype)
        if not past:  # a constant in each tensor
            return Diagonal(layout.spread(e, c.rsqrt()).expand(entry.shape))
        if layout is self._owner:
            v = layout.vector("metric.square", e)
        else:
            v = layout.entry([one.get("metric.square") for one in held], e)
        return Diagonal(torch.mul(v, layout.spread(e, a)).add_(layout.spread(e, c)).rsqrt_())

    def _memory(self, kind: _Kind, p: Tensor, zero: Tensor) -> Any:
        """The metric's state of one tensor. Parts that it has not for this tensor, as (), are not kept."""
        fresh = kind.metric.initial(zero)
        held = self._state.get(p, {})
        parts = [local(held[name]) if name in held else value for name, value in zip(kind.fields, fresh, strict=True)]
        return type(fresh)(*parts) if kind.fields else fresh

    def _means_of_past(self) -> _Past:
        """The mean squares over whole tensors, and over all of them: by all ranks together."""
        if self._past is None:
            self._past = _Past([], {})
            for kind in self._kinds:
                params, sums = self._sums_of_past(kind)
                if not params:
                    self._past.overall.append(None)
                    continue
                world = self._world()
                means = _means(world.total(params, sums[None])[0] if world.spread else sums, params)
                self._past.overall.append(means.overall)
                self._past.tensor.update(zip(params, means.tensor, strict=True))
        return self._past

    def _sums_of_past(self, kind: _Kind) -> tuple[list[Tensor], Tensor]:
        """The tensors with a past, and the sums over this rank's pieces of the squares that D is made of."""
        owner = self._owner
        if owner is not None and kind.rms and self._covers(owner, kind):
            each = [owner.sums(e, owner.vector("metric.square", e)) for e in range(len(owner.entries))]
            weights = [self._state[p]["metric.weight"] for p in owner.params]
            total = each[0] if len(each) == 1 else torch.cat(each)
            if total.device.type == "cpu":
                return owner.params, total / total.new_tensor([weight.item() for weight in weights])
            divisors = torch.stack(weights).to(total)
            return owner.params, total / torch.where(divisors > 0, divisors, 1)
        params = [p for p in kind.params if self._has_past(p)]
        sums = []
        for p in params:
            like = torch.zeros((), device=p.device, dtype=scalar_dtype(p.device))
            if kind.rms:
                held = self._state[p]
                sums.append(
                    sum_of(real_view(local(held["metric.square"])), is_small(p)).to(like) / held["metric.weight"]
                )
                continue
            piece = real_view(local(p.detach()))
            zero = torch.zeros_like(piece, dtype=wide_dtype(p.dtype))
            mean = as_number(kind.metric.mean_square(self._memory(kind, p, zero), zero), like)
            sums.append(mean.nan_to_num() * piece.numel())
        return params, torch.stack(sums) if sums else torch.zeros(0)

    def _covers(self, layout: Layout, kind: _Kind) -> bool:
        """Whether a layout has the parameters of a kind and no others, all with a past."""
        held = [self._state.get(p, {}) for p in layout.params]
        alike = len(layout.params) == len(kind.params) and all(self._kind_of.get(p) is kind for p in layout.params)
        return alike and all("metric.square" in one and _positive(one["metric.weight"]) for one in held)

    def _means_of_present(self, layout: Layout, g: Vector, among: set[Tensor]) -> dict[Any, Any]:
        """The mean squares of the present gradient, of each tensor, and ("overall", kind) over all of a kind."""
        squares = layout.totals(layout.products(g, g))
        squares = self._world().total(layout.params, squares[None])[0]
        self._choose_unit(squares.sum(), min(torch.finfo(x.dtype).max for x in g))
        unit = self.unit
        found: dict[Any, Any] = {}
        for kind in self._kinds:
            known = self._means_of_past().tensor
            rows = [
                i for i, p in enumerate(layout.params) if self._kind_of.get(p) is kind and p in among and p not in known
            ]
            params = [layout.params[i] for i in rows]
            if not params:
                continue
            scale = unit * unit if is_scale_free(kind.metric) else 1.0
            means = _means(squares[rows] * scale, params)
            found.update(zip(params, means.tensor, strict=True))
            found["overall", id(kind)] = means.overall
        return found

    # The unit ---------------------------------------------------------------------------------------------------------

    @property
    def unit(self) -> float:
        """What gradients are multiplied by before they are squared: 1, or a power of two that keeps squares in range.

        D does not change with the unit of the gradients; squares leave the range of floats long before gradients do.
        """
        return self._groups[0].get("unit", 1.0)

    def _choose_unit(self, square: Tensor, largest: float) -> None:
        if "unit" in self._groups[0] or square.device.type != "cpu":
            return
        exponent = math.frexp(math.sqrt(square.item()))[1] if 0 < square.item() < math.inf else 0
        bound = math.frexp(largest)[1] // 4
        for group in self._groups:
            group["unit"] = 1.0 if abs(exponent) <= bound else 2.0**-exponent

    # The past ---------------------------------------------------------------------------------------------------------

    def usual(self, layout: Layout) -> float | None:
        """The root of the mean of past <g, D^-1 g>, all in the D of this step; None if no past is remembered."""
        if self.euclidean or any(not hasattr(kind.metric, "past_square") for kind in self._kinds):
            return None
        total = layout.like
        for e, operator in enumerate(self.operators(layout)):
            entry = layout.entries[e]
            params = layout.params[entry.start : entry.stop]
            kind = self._kind_of[params[0]]
            if not kind.rms:
                zero = torch.zeros(entry.shape, dtype=entry.dtype, device=entry.device)
                total = total + kind.metric.past_square(self._memory(kind, params[0], zero), operator.made).to(total)
                continue
            weights = [self._state.get(p, {}).get("metric.weight", layout.like) for p in params]
            v = layout.entry([self._state.get(p, {}).get("metric.square") for p in params], e)
            inverse = operator.inverse.expand(entry.shape)
            if all(weight == weights[0] for weight in weights):
                total = total + ratio(dot(v, inverse), weights[0], 0.0)
            else:  # tensors that joined later have seen less, or nothing
                total = total + ratio(layout.sums(e, v * inverse), torch.stack(weights), 0.0).sum()
        total = self._world().total(layout.params[:1], total.reshape(1, 1)) if self._world().spread else total
        return math.sqrt(total.item()) / self.unit

    def observe(self, layout: Layout, g: Vector, gate: Gate, scale: float = 1.0) -> None:
        """Remember the mean gradient ``scale * g`` of an update."""
        if self.euclidean:
            return
        self._owner = layout
        for e, entry in enumerate(layout.entries):
            params = layout.params[entry.start : entry.stop]
            kind = self._kind_of.get(params[0])
            if kind is None:
                continue
            factor = scale * (self.unit if is_scale_free(kind.metric) else 1.0)
            seen = g[e] if factor == 1.0 else g[e] * factor
            for p in params:
                if not any(name in self._state[p] for name in kind.fields):
                    self._state[p].update(self.blank(p))
            if kind.rms:
                decay = gate.weight(kind.metric.decay, 1.0)
                layout.vector("metric.square", e).mul_(decay).addcmul_(seen, seen)
                weights = [self._state[p]["metric.weight"] for p in params]
                if gate.host:
                    torch._foreach_mul_(weights, decay)
                    torch._foreach_add_(weights, 1.0)
                else:
                    for weight in weights:
                        weight.mul_(decay).add_(gate.weight(1.0))
            else:
                old = self._memory(kind, params[0], torch.zeros_like(seen))
                new = kind.metric.observe(old, seen)
                for before, after in zip(old, new, strict=True):
                    if isinstance(before, Tensor):
                        after = torch.as_tensor(after, dtype=before.dtype, device=before.device)
                        before.copy_(gate.choose(after, before))
        self.forget()
        self._means_of_past()  # by all ranks together, not when a backward first asks

    def join(self, layout: Layout) -> None:
        """Let tensors without a past join those that have one as if their gradients had been 0 so far."""
        past = self._means_of_past().tensor
        new = [p for p in layout.params if p in self._kind_of and p not in past]
        for p in new:
            kind = self._kind_of[p]
            other = next((self._state[q] for q in kind.params if q in past), None)
            if other is not None:
                numbers = {name: other[name] for name in kind.fields if name in other and not other[name].dim()}
                state = {**self.blank(p), **{name: number.clone() for name, number in numbers.items()}}
                self._state[p].update(state)
        if new:
            self._owner = None
            self.forget()

    def blank(self, param: Tensor) -> dict[str, Tensor]:
        """What the metric remembers of a parameter before any update, by its name in the optimizer's state."""
        kind = self._kind_of.get(param)
        if kind is None:
            return {}
        piece = real_view(local(param.detach()))
        zero = torch.zeros_like(piece, dtype=wide_dtype(param.dtype), memory_format=torch.contiguous_format)
        number = torch.zeros((), dtype=scalar_dtype(piece.device), device=piece.device)
        return {
            name: (like_parameter(value, param) if value.shape == zero.shape else value).clone()
            if isinstance(value, Tensor)
            else number + value
            for name, value in zip(kind.fields, kind.metric.initial(zero), strict=True)
            if not isinstance(value, tuple)  # what the metric does not remember of such a tensor
        }


def _positive(weight: Tensor) -> bool:
    """Whether a number is positive; a device is not asked."""
    return weight.device.type != "cpu" or weight.item() > 0


def _means(sums: Tensor, params: list[Tensor]) -> Means:
    """The mean squares of tensors, and of all their numbers, from the sums of squares of each."""
    sizes = [size(p) for p in params]
    if sums.device.type == "cpu":  # Python's numbers are faster
        rows = sums.tolist()
        return Means([a / max(b, 1) for a, b in zip(rows, sizes, strict=True)], sum(rows) / max(sum(sizes), 1))
    numel = sums.new_tensor(sizes)
    return Means(list(sums / numel.clamp(min=1)), sums.sum() / numel.sum().clamp(min=1))
