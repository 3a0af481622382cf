r"""The diagonals D of an optimizer's parameters: what the metrics remember, and D of the step at hand.

D of a step is made of the gradients before it, so that it is known while the step's backward passes run, and what they
bring is measured in it at once. A tensor without a past has the mean of its present squares instead, a constant, by
which what was measured in Euclid's norm is divided afterwards (:meth:`Diagonals.begin`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.metrics import RMS, Means, Metric, Roots
from sgdol.torch._packs import Pack, pack
from sgdol.torch._tensors import real_view, scalar_dtype, size, squared_norms, stacked, wide_dtype
from sgdol.torch._world import World, like_parameter, local

__all__ = ["Diagonal", "Diagonals"]


class Diagonal:
    """D of one tensor in the step at hand: hypot(a root, c), made by the metric itself, or one number c."""

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
        return self._square().sqrt_().to(like.dtype)

    def reciprocal(self, like: Tensor) -> Tensor:
        """1/D, of the shape and type of ``like``, in new memory."""
        if self.a is None:
            return self.of(like).reciprocal().expand_as(like).clone()
        return self._square().rsqrt_().to(like.dtype)

    def _square(self) -> Tensor:
        return torch.mul(self.state.root, self.a).square_().add_(self.c * self.c)


class _Kind(NamedTuple):
    """The parameters of one metric."""

    metric: Metric
    params: list[Tensor]
    memory: type
    """The class of what the metric remembers of a tensor."""
    names: list[str]
    """Of its parts, in the optimizer's state."""


class Diagonals:
    """What the metrics remember, kept in the optimizer's state, and the diagonals that they make of it.

    Args:
        metrics: the metric of each parameter that is not measured by Euclid's, in an order that all ranks have.
        state: the optimizer's state.
        world: gives the world that the optimizer is in.
    """

    def __init__(self, metrics: dict[Tensor, Metric], state: dict[Any, Any], world: Callable[[], World]) -> None:
        self._metrics = metrics
        self._state = state
        self._world = world
        self._kinds = _kinds(metrics)
        self._kind_of = {p: kind for kind in self._kinds for p in kind.params}
        self._past: dict[Tensor, Diagonal] | None = None
        self._present: dict[Tensor, Diagonal] = {}
        self._overalls: dict[int, Tensor] = {}

    def __contains__(self, param: Tensor) -> bool:
        return param in self._metrics

    def __len__(self) -> int:
        return len(self._metrics)

    def of(self, param: Tensor) -> Diagonal | None:
        """D of a parameter; None if it is 1, or not known before :meth:`begin`."""
        if param not in self._metrics:
            return None
        return self._known().get(param) or self._present.get(param)

    def laid(self, params: Sequence[Tensor]) -> tuple[Tensor, list[float], list[float]] | None:
        """The roots of small tensors laid end to end in float64, and a and c of each; None if any D has no root."""
        found = [self.of(p) for p in params]
        diagonals = [d for d in found if d is not None and d.a is not None]
        if len(diagonals) < len(found):
            return None
        roots = [d.state.root for d in diagonals]
        return Pack.laid(roots, torch.float64), [d.a for d in diagonals], [d.c for d in diagonals]

    def settled(self, param: Tensor) -> bool:
        """Whether D of the coming step is known: else lengths are Euclid's until :meth:`begin` says more."""
        return param not in self._metrics or param in self._known()

    def begin(self, params: list[Tensor], n: Tensor) -> Tensor | None:
        """Settle D of this step.

        Args:
            params: the parameters that take part.
            n: ||gbar||^2 of each over all ranks, in Euclid's norm where D is not settled yet.

        Returns:
            By what each parameter's products, Euclid's so far, are to be divided; None if all are right.
        """
        self._present = {}
        if not self._metrics:
            return None
        known = self._known()
        fresh = [i for i, p in enumerate(params) if p in self._metrics and p not in known]
        if not fresh:
            return None
        divisors = torch.ones_like(n)
        for place, kind in enumerate(self._kinds):
            rows = [i for i in fresh if self._kind_of[params[i]] is kind]
            if not rows:
                continue
            means = _means(n[rows], [params[i] for i in rows])
            overall = self._overalls.get(place)
            means = means if overall is None else Means(means.tensor, overall.to(n))
            constants = _constants(kind.metric, means)
            divisors[rows] = constants
            for i, c in zip(rows, _numbers(constants), strict=True):
                self._present[params[i]] = Diagonal(kind.metric, None, None, None, c)
        return divisors

    def observe(self, params: Sequence[Tensor], gradients: Sequence[Tensor], scale: float, ok: Tensor | None) -> None:
        """Remember the mean gradients ``scale * gradients`` of an update.

        Args:
            params: the parameters that took part.
            gradients: real tensors, this rank's pieces.
            scale: a number.
            ok: None, or a boolean scalar on the device: whether the update counts.
        """
        if not self._metrics:
            return
        for kind in self._kinds:
            rows = [i for i, p in enumerate(params) if self._kind_of.get(p) is kind]
            if rows:
                states = [self._remembered(kind, params[i], create=True) for i in rows]
                _observe(kind.metric, states, [gradients[i] for i in rows], scale, ok)
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
            name: like_parameter(value, param)
            if isinstance(value, Tensor) and value.shape == zero.shape
            else number + value
            for name, value in zip(self._kind_of[param].names, fresh, strict=True)
        }

    def _remembered(self, kind: _Kind, param: Tensor, *, create: bool = False) -> Any:
        """The metric's state of a parameter, as tensors that may be written to; None if it has no past."""
        if create and any(name not in self._state[param] for name in kind.names):
            self._state[param].update(self.blank(param))
        held = self._state.get(param, {})
        if any(name not in held for name in kind.names):
            return None
        return kind.memory(*[local(held[name]) for name in kind.names]) if kind.names else kind.memory()

    def _known(self) -> dict[Tensor, Diagonal]:
        """D of the parameters that have a past."""
        if self._past is None:
            self._past, self._overalls = {}, {}
            for place, kind in enumerate(self._kinds):
                states = {p: self._remembered(kind, p) for p in kind.params}
                self._past.update(self._from_past(place, _with_past(states)))
        return self._past

    def _from_past(self, place: int, states: dict[Tensor, Any]) -> dict[Tensor, Diagonal]:
        if not states:
            return {}
        params, metric = list(states), self._kinds[place].metric
        like = torch.zeros((), dtype=scalar_dtype(params[0].device), device=params[0].device)
        if isinstance(metric, RMS):
            weights = stacked([s.weight for s in states.values()], like)
            sums = _squared_lengths([s.root for s in states.values()], like)
            sums = sums / torch.where(weights > 0, weights, 1)
        else:
            local_sizes = [s[0].numel() for s in states.values()]
            each = [metric.mean_square(s, torch.zeros_like(s[0])) for s in states.values()]
            sums = stacked([torch.as_tensor(m) for m in each], like).nan_to_num() * like.new_tensor(local_sizes)
        sums = self._world().total(params, sums.unsqueeze(0))[0]
        means = _means(sums, params)
        self._overalls[place] = means.overall
        if not isinstance(metric, RMS):
            return {
                p: Diagonal(metric, s, Means(m.to(s[0]), means.overall.to(s[0])), None, None)
                for (p, s), m in zip(states.items(), means.tensor.unbind(), strict=True)
            }
        a, c = metric.coefficients(weights, means)
        return {
            p: Diagonal(metric, s, None, a_of, c_of)
            for (p, s), a_of, c_of in zip(states.items(), _numbers(a), _numbers(c), strict=True)
        }


def _kinds(metrics: dict[Tensor, Metric]) -> list[_Kind]:
    """The parameters by their metric, in an order that is the same on all ranks."""
    found: list[_Kind] = []
    by_id: dict[int, _Kind] = {}
    for p, metric in metrics.items():
        kind = by_id.get(id(metric)) or next((k for k in found if k.metric == metric), None)
        if kind is None:
            memory = type(metric.initial(torch.zeros(())))
            kind = _Kind(metric, [], memory, [f"metric.{name}" for name in getattr(memory, "_fields", ())])
            found.append(kind)
        by_id[id(metric)] = kind
        kind.params.append(p)
    return found


def _observe(metric: Metric, states: list[Any], gradients: list[Tensor], scale: float, ok: Tensor | None) -> None:
    """Write to the states of some tensors."""
    packed, others = None, list(range(len(states)))
    if ok is None and isinstance(metric, RMS):
        packed, others = pack([s.root for s in states], states[0].weight)
    if packed is not None:
        roots, weights, vectors = zip(*[(*states[i], gradients[i]) for i in packed.rows], strict=True)
        dtype = roots[0].dtype
        past = Roots(packed.laid(roots, dtype), torch.stack(weights))
        new = metric.observe(past, packed.laid(vectors, dtype).mul_(scale))
        packed.write(new.root, roots)
        torch._foreach_copy_(weights, new.weight.unbind())
    for i in others:
        g = gradients[i].to(wide_dtype(gradients[i].dtype))
        new = metric.observe(states[i], g if scale == 1.0 else g * scale)
        for old, value in zip(states[i], new, strict=True):
            value = torch.as_tensor(value, dtype=old.dtype, device=old.device)
            old.copy_(value if ok is None else torch.where(ok, value, old))


def _constants(metric: Metric, means: Means) -> Tensor:
    """D of tensors without a past: one number each."""
    if isinstance(metric, RMS):
        return metric.coefficients(torch.zeros_like(means.tensor), means)[1]
    zero = metric.initial(torch.zeros_like(means.tensor[:1]))
    each = [metric.flat(zero, Means(m, means.overall), torch.ones_like(means.tensor[:1])) for m in means.tensor]
    return torch.cat(each)


def _means(sums: Tensor, params: list[Tensor]) -> Means:
    """The mean squares of tensors, and of all their numbers, from the sums of squares of each."""
    numel = sums.new_tensor([size(p) for p in params])
    return Means(sums / numel.clamp(min=1), sums.sum() / numel.sum().clamp(min=1))


def _squared_lengths(tensors: list[Tensor], like: Tensor) -> Tensor:
    packed, others = pack(tensors, like)
    if packed is None:
        return squared_norms(tensors, like)
    together = packed.laid(packed.chosen(tensors), torch.float64)
    return packed.merged(packed.sums(together, together), squared_norms([tensors[i] for i in others], like), others)


def _with_past(states: dict[Tensor, Any]) -> dict[Tensor, Any]:
    """Those of which a gradient has been seen; a device is not asked, there D is 1 if its first update was skipped."""

    def seen(state: Any) -> bool:
        weight = getattr(state, "weight", None)
        known: Any = weight.tolist() if isinstance(weight, Tensor) and weight.device.type == "cpu" else 1.0
        return bool(known > 0)

    return {p: state for p, state in states.items() if state is not None and seen(state)}


def _numbers(values: Tensor) -> Sequence[Any]:
    """One number each: Python's on the host, where they are cheaper, else tensors: a device must not be waited for."""
    return values.tolist() if values.device.type == "cpu" else values.unbind()
