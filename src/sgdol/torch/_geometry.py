r"""Lengths and inner products of gradients: a metric on the parameters.

With the diagonal :math:`D` of :mod:`sgdol.metrics`, gradients are measured in :math:`D^{-1}` and points in
:math:`D`. Everything that multiplies two gradients does it here; Euclid's norm, D = 1, has its own short way.

D of a step is made of the gradients before it, so that it is known while the step's backward passes run, and what they
bring is measured in it at once. A tensor without a past has the mean of its present squares instead, a constant, by
which what was measured in Euclid's norm is divided afterwards (:meth:`Geometry.begin`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sgdol.metrics import RMS, Means, Metric
from sgdol.torch._tensors import (
    inner,
    norm,
    product_dtype,
    real_view,
    scalar_dtype,
    size,
    squared_norms,
    stacked,
    wide_dtype,
)
from sgdol.torch._world import World, like_parameter, local

__all__ = ["Geometry"]


class _Diagonal:
    """D of one tensor in the step at hand: made of a state, or one number for the whole tensor."""

    __slots__ = ("a", "c", "means", "metric", "state")

    def __init__(self, metric: Metric, state: Any, means: Means | None, a: Any, c: Any) -> None:
        self.metric = metric
        self.state = state
        self.means = means
        self.a = a
        self.c = c

    def of(self, like: Tensor) -> Tensor:
        """D, in the type of ``like``."""
        if self.state is None:
            return torch.as_tensor(self.c, dtype=like.dtype, device=like.device)
        if self.means is not None:
            return self.metric.flat(self.state, self.means, torch.ones_like(self.state[0])).to(like.dtype)
        diagonal = torch.mul(self.state.root, self.a)
        c = self.c * self.c
        return diagonal.square_().add_(c).sqrt_().to(like.dtype)


class Geometry:
    """The metrics of an optimizer's parameters, and what they remember.

    Args:
        metrics: the metric of each parameter that is not measured by Euclid's.
        state: the optimizer's state, where the metrics' own is kept.
        world: gives the world that the optimizer is in.
    """

    def __init__(self, metrics: dict[Tensor, Metric], state: dict[Any, Any], world: Callable[[], World]) -> None:
        self._metrics = metrics
        self._state = state
        self._world = world
        self._past: dict[Tensor, _Diagonal] | None = None
        self._present: dict[Tensor, _Diagonal] = {}
        self._overalls: list[tuple[Metric, Tensor]] = []
        self._precisions: dict[Tensor, torch.dtype] = {}

    @property
    def plain(self) -> bool:
        """Whether all lengths are Euclid's."""
        return not self._metrics

    def euclidean(self, param: Tensor) -> bool:
        """Whether this parameter's are."""
        return param not in self._metrics

    # Measuring ------------------------------------------------------------------------------------------------------

    def norm(self, param: Tensor, gradient: Tensor) -> Tensor:
        """The length of a gradient of this parameter, of this rank's piece; see :meth:`settled`."""
        diagonal = self._diagonal(param)
        if diagonal is None:
            return norm(gradient)
        wide = gradient.to(wide_dtype(gradient.dtype))
        return norm(wide / diagonal.of(wide).sqrt())

    def norms(self, params: Sequence[Tensor], gradients: Sequence[Tensor], like: Tensor) -> Tensor:
        """<g, D^-1 g> of each parameter's gradient, of this rank's pieces."""
        if self.plain:
            return squared_norms(gradients, like)
        return stacked([self.norm(p, g) for p, g in zip(params, gradients, strict=True)], like).square_()

    def inner(self, params: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], like: Tensor) -> Tensor:
        """<a, D^-1 b> of each parameter, of this rank's pieces."""
        if self.plain:
            return stacked([inner(x, y) for x, y in zip(a, b, strict=True)], like)
        return stacked([inner(x, self.sharp(p, y)) for p, x, y in zip(params, a, b, strict=True)], like)

    def products(self, param: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The same for each coordinate, in float32 or wider, in new memory."""
        wide = self.precision(param, a)
        return torch.mul(a.to(wide), self.sharp(param, b.to(wide)))

    def precision(self, param: Tensor, gradient: Tensor) -> torch.dtype:
        """The type of products of single entries: that of what has been learned from them, or what the first needs.

        Where several ranks have one parameter they have to agree on it, so that it is what the parameter's type says.
        """
        wide = wide_dtype(gradient.dtype)
        if wide == torch.float64 or param.device.type != "cpu":
            return wide
        known = self._precisions.get(param)
        if known is None:
            world = self._world()
            held = self._state.get(param, {})
            learned = next((v.dtype for key, v in held.items() if key.startswith("learner.") and v.dim()), None)
            alone = world.ranks == 1 and not world.spread
            known = learned or (product_dtype(gradient) if alone else wide)
            if known is None:
                return wide
            self._precisions[param] = known
        return known

    def pairing(self, gradient: Tensor, direction: Tensor) -> Tensor:
        """<g, d> of this rank's piece, of a gradient and a direction: D has no part in it."""
        return inner(gradient, direction)

    def lengths(self, params: Sequence[Tensor], steps: Sequence[Tensor], like: Tensor) -> Tensor:
        """||s||_D^2 of each parameter's step, of this rank's pieces."""
        return stacked([inner(s, self.flat(p, s)) for p, s in zip(params, steps, strict=True)], like)

    def sharp(self, param: Tensor, gradient: Tensor) -> Tensor:
        """From a gradient to a direction: D^-1 g, in new memory, or the gradient itself if D is 1."""
        diagonal = self._diagonal(param)
        if diagonal is None:
            return gradient
        wide = gradient.to(wide_dtype(gradient.dtype))
        return wide / diagonal.of(wide)

    def flat(self, param: Tensor, vector: Tensor) -> Tensor:
        """From a direction to a gradient: D v."""
        diagonal = self._diagonal(param)
        if diagonal is None:
            return vector
        wide = vector.to(wide_dtype(vector.dtype))
        return wide * diagonal.of(wide)

    # From step to step ------------------------------------------------------------------------------------------------

    def settled(self, param: Tensor) -> bool:
        """Whether D of the coming step is known: else lengths are Euclid's until :meth:`begin` says more."""
        return param not in self._metrics or param in self._known()

    def begin(self, params: list[Tensor], n: Tensor) -> Tensor | None:
        """Settle D of this step.

        Args:
            params: the parameters that take part.
            n: ||gbar||^2 of each over all ranks, in Euclid's norm where D is not settled yet.

        Returns:
            What has been measured so far is to be divided by, for each parameter; None if by nothing.
        """
        self._present = {}
        fresh = [i for i, p in enumerate(params) if not self.settled(p)]
        if not fresh:
            return None
        divisors = torch.ones_like(n)
        for metric, members in self._alike([params[i] for i in fresh]):
            rows = [i for i in fresh if params[i] in members]
            numel = n.new_tensor([max(size(params[i]), 1) for i in rows])
            squares = n[rows]
            known = self._overall(metric)
            overall = squares.sum() / numel.sum() if known is None else known.to(n)
            constants = _constants(metric, Means(squares / numel, overall))
            divisors[rows] = constants
            for i, c in zip(rows, _numbers(constants), strict=True):
                self._present[params[i]] = _Diagonal(metric, None, None, None, c)
        return divisors

    def observe(self, params: Sequence[Tensor], gradients: Sequence[Tensor], scale: float, ok: Tensor | None) -> None:
        """Remember the mean gradients ``scale * gradients`` of an update.

        Args:
            params: the parameters that took part.
            gradients: real tensors, this rank's pieces.
            scale: a number.
            ok: None, or a boolean scalar on the device: whether the update counts.
        """
        if self.plain:
            return
        for p, vector in zip(params, gradients, strict=True):
            metric = self._metrics.get(p)
            if metric is None:
                continue
            state = self._remembered(p, create=True)
            g = vector.to(wide_dtype(vector.dtype)) * scale
            new = metric.observe(state, g)
            for old, value in zip(state, new, strict=True):
                value = torch.as_tensor(value, dtype=old.dtype, device=old.device)
                old.copy_(value if ok is None else torch.where(ok, value, old))
        self.forget()
        self._known()  # by all ranks together, not when a backward first asks

    def forget(self) -> None:
        """Make D anew of what is remembered: that has changed."""
        self._past, self._present = None, {}

    def blank(self, param: Tensor) -> dict[str, Tensor]:
        """What a metric remembers of this parameter before any update, by its name in the optimizer's state."""
        metric = self._metrics.get(param)
        if metric is None:
            return {}
        like = real_view(local(param.detach()))
        zero = torch.zeros_like(like, dtype=wide_dtype(like.dtype), memory_format=torch.contiguous_format)
        fresh = metric.initial(zero)
        number = torch.zeros((), dtype=scalar_dtype(like.device), device=like.device)
        return {
            f"metric.{name}": like_parameter(value, param)
            if isinstance(value, Tensor) and value.shape == zero.shape
            else number + value
            for name, value in zip(getattr(fresh, "_fields", ()), fresh, strict=True)
        }

    # Inside -----------------------------------------------------------------------------------------------------------

    def _diagonal(self, param: Tensor) -> _Diagonal | None:
        if self.plain or param not in self._metrics:
            return None
        return self._known().get(param) or self._present.get(param)

    def _remembered(self, param: Tensor, *, create: bool = False) -> Any:
        """The metric's state of a parameter, as tensors that may be written to; None if it has no past."""
        kind = self._metrics[param].initial(torch.zeros(()))
        names = [f"metric.{name}" for name in getattr(kind, "_fields", ())]
        if create and any(name not in self._state[param] for name in names):
            self._state[param].update(self.blank(param))
        held = self._state.get(param, {})
        if any(name not in held for name in names):
            return None
        return type(kind)(*(local(held[name]) for name in names)) if names else kind

    def _known(self) -> dict[Tensor, _Diagonal]:
        """D of the parameters that have a past."""
        if self._past is None:
            self._past, self._overalls = {}, []
            for metric, members in self._alike(list(self._metrics)):
                states = {p: self._remembered(p) for p in members}
                self._past.update(self._from_past(metric, {p: s for p, s in states.items() if _has_past(s)}))
        return self._past

    def _from_past(self, metric: Metric, states: dict[Tensor, Any]) -> dict[Tensor, _Diagonal]:
        if not states:
            return {}
        params = list(states)
        like = torch.zeros((), dtype=scalar_dtype(params[0].device), device=params[0].device)
        numel = like.new_tensor([max(size(p), 1) for p in params])
        if isinstance(metric, RMS):
            weights = stacked([s.weight for s in states.values()], like)
            sums = squared_norms([s.root for s in states.values()], like)
            sums = sums / torch.where(weights > 0, weights, 1)
        else:
            local_sizes = [s[0].numel() for s in states.values()]
            each = [metric.mean_square(s, torch.zeros_like(s[0])) for s in states.values()]
            sums = stacked([torch.as_tensor(m) for m in each], like).nan_to_num() * like.new_tensor(local_sizes)
        sums = self._world().total(params, sums.unsqueeze(0))[0]
        means, overall = sums / numel, sums.sum() / numel.sum()
        self._overalls.append((metric, overall))
        if not isinstance(metric, RMS):
            return {
                p: _Diagonal(metric, s, Means(m.to(s[0]), overall.to(s[0])), None, None)
                for (p, s), m in zip(states.items(), means.unbind(), strict=True)
            }
        a, c = metric.coefficients(weights, Means(means, overall))
        return {
            p: _Diagonal(metric, s, None, a_of, c_of)
            for (p, s), a_of, c_of in zip(states.items(), _numbers(a), _numbers(c), strict=True)
        }

    def _overall(self, metric: Metric) -> Tensor | None:
        """The mean square over all coordinates that have a past."""
        self._known()
        return next((overall for known, overall in self._overalls if known == metric), None)

    def _alike(self, params: list[Tensor]) -> list[tuple[Metric, dict[Tensor, None]]]:
        """The parameters by their metric, in an order that is the same on all ranks."""
        found: list[tuple[Metric, dict[Tensor, None]]] = []
        for p in params:
            metric = self._metrics[p]
            members = next((s for m, s in found if m == metric), None)
            if members is None:
                found.append((metric, {p: None}))
            else:
                members[p] = None
        return found


def _constants(metric: Metric, means: Means) -> Tensor:
    """D of tensors without a past: one number each."""
    if isinstance(metric, RMS):
        return metric.coefficients(torch.zeros_like(means.tensor), means)[1]
    zero = metric.initial(torch.zeros_like(means.tensor[:1]))
    each = [metric.flat(zero, Means(m, means.overall), torch.ones_like(means.tensor[:1])) for m in means.tensor]
    return torch.cat(each)


def _has_past(state: Any) -> bool:
    """Whether a gradient has been seen; a device is not asked, there D is 1 if its first update was skipped."""
    if state is None:
        return False
    weight = getattr(state, "weight", None)
    return not isinstance(weight, Tensor) or weight.device.type != "cpu" or weight.item() > 0


def _numbers(values: Tensor) -> Sequence[Any]:
    """One number each: Python's on the host, where they are cheaper, else tensors: a device must not be waited for."""
    return values.tolist() if values.device.type == "cpu" else values.unbind()
