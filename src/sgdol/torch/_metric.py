r"""Metrics on an optimizer's parameters: the operators D that are made of what they remember.

D of a step is made of the gradients before it, so it is known while the backward passes of the step run, and what they
bring is measured in it at once. A tensor without a past needs the present gradient for its first D
(``Metrics.operators(..., present)``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.metrics import Euclidean, Kronecker, Means, Metric, is_diagonal, is_scale_free
from sgdol.torch._operators import IDENTITY, Operators, Rated
from sgdol.torch._remembered import Matrices, Squares, Whole, blank, is_diagonal_on
from sgdol.torch._update import Gate
from sgdol.torch._vectors import Layout, Vector, dot, size
from sgdol.torch._world import World, is_sharded

__all__ = ["Metrics"]


class _Kind(NamedTuple):
    """The parameters of one metric."""

    number: int
    metric: Any
    params: list[Tensor]
    fields: list[str]
    """The names under which the parts of the metric's state are kept."""


class _Entry(NamedTuple):
    """What is remembered of one entry of a layout."""

    kind: _Kind
    memory: Squares | Whole
    params: list[Tensor]
    ids: list[int]
    sizes: list[int]
    """How many numbers each of its tensors has, over all ranks."""


class _Past(NamedTuple):
    """What D of the coming step is made of, besides each tensor's own state."""

    overall: list[Any]
    """The mean square over all tensors with a past, of each kind; None if there are none."""
    tensor: dict[int, Any]
    """The mean square of each tensor with a past, by its id."""


class Metrics:
    """The metrics of an optimizer's groups. What they remember is in the optimizer's state.

    Args:
        groups: the parameter groups.
        metric_of: the metric of a group.
        state: the optimizer's state.
        world: gives the world that the optimizer is in.
        ratios: gives what the metric multiplies the steps of each group by; None for 1.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        metric_of: Callable[[dict[str, Any]], Metric],
        state: dict[Any, Any],
        world: Callable[[], World],
        ratios: Callable[[], list[float]] | None = None,
    ) -> None:
        self._groups, self._metric_of, self._state, self._world = groups, metric_of, state, world
        self._ratios = ratios
        self._kinds: list[_Kind] = []
        for group in groups:
            metric = metric_of(group)
            if isinstance(metric, Euclidean):
                continue
            kind = next((k for k in self._kinds if k.metric == metric), None)
            if kind is None:
                fields = getattr(type(metric.initial(torch.zeros(2, 2))), "_fields", ())
                kind = _Kind(len(self._kinds), metric, [], [f"metric.{name}" for name in fields])
                self._kinds.append(kind)
            kind.params.extend(group["params"])
            sharded = next((p for p in group["params"] if is_sharded(p)), None)
            if sharded is not None and not (is_diagonal(metric) or is_diagonal_on(metric, sharded)):
                raise NotImplementedError(
                    f"metric={metric!r} needs whole matrices, got a sharded parameter of shape {tuple(sharded.shape)}: "
                    'use metric="rms", which works on pieces'
                )
        self.euclidean = not self._kinds
        """Whether D = 1 for all parameters, but for the rates of groups."""
        self.identity = self.euclidean and ratios is None
        """Whether D = 1, always."""
        self._kind_of = {id(p): kind for kind in self._kinds for p in kind.params}
        self._own(None)

    def _own(self, layout: Layout | None) -> None:
        """From now on updates are made in this layout, whose vectors the state is; None while there was none."""
        self._owner = layout
        self._rest: Layout | None = None
        self._entries: dict[int, tuple[Layout, list[_Entry | None]]] = {}
        self._late: dict[int, tuple[Layout, frozenset[int]]] = {}
        self.forget()

    def merges(self, group: dict[str, Any], param: Tensor) -> tuple[int, ...] | None:
        """The place of a small tensor among others that it lies end to end with; None if it has to lie alone.

        Matrices that the Kronecker metric turns come last, those of one shape one after the other.
        """
        metric = self._metric_of(group)
        if isinstance(metric, Euclidean) or is_diagonal_on(metric, param):
            return ()
        return tuple(param.shape) if type(metric) is Kronecker else None

    def forget(self) -> None:
        """What is remembered has changed, or the present gradient does not count."""
        self._past: _Past | None = None
        self._made: dict[int, tuple[Layout, Operators]] = {}
        self._shared: dict[tuple[int, ...], Any] = {}

    def late(self, layout: Layout) -> frozenset[int]:
        """The entries whose D of the coming step is not known before its gradients are."""
        if self.euclidean:
            return frozenset()
        known = self._late.get(id(layout))
        if known is None or known[0] is not layout:
            past = self._means_of_past().tensor
            unknown = {i for i, p in enumerate(layout.params) if id(p) in self._kind_of and id(p) not in past}
            known = self._late[id(layout)] = (
                layout,
                frozenset(
                    e for e, entry in enumerate(layout.entries) if unknown.intersection(range(entry.start, entry.stop))
                ),
            )
        return known[1]

    def _entries_of(self, layout: Layout) -> list[_Entry | None]:
        """What is remembered of each entry of a layout; None where D = 1."""
        known = self._entries.get(id(layout))
        if known is None or known[0] is not layout:
            known = layout, [self._entry(layout, e) for e in range(len(layout.entries))]
            self._entries[id(layout)] = known
        return known[1]

    def _entry(self, layout: Layout, e: int) -> _Entry | None:
        params = layout.params[layout.rows(e)]
        kind = self._kind_of.get(id(params[0]))
        if kind is None:
            return None
        turns = type(kind.metric) is Kronecker
        diagonal = all(is_diagonal_on(kind.metric, p) for p in params)
        make: Any = Squares if diagonal else Matrices if turns else Whole
        memory = make(kind.metric, layout, e, self._state, layout is self._owner)
        return _Entry(kind, memory, params, [id(p) for p in params], [size(p) for p in params])

    # D of a step ------------------------------------------------------------------------------------------------------

    def operators(
        self, layout: Layout, present: Vector | None = None, among: Sequence[Tensor] | None = None
    ) -> Operators:
        """D of the coming step; None for an entry that needs the present gradient, while that is not given.

        Args:
            layout: the parameters.
            present: the mean gradient of this step, of which D of tensors without a past is made.
            among: the parameters that take part in the step; None for all.
        """
        known = self._made.get(id(layout))
        if known is None or known[0] is not layout:
            operators = self._operators_of_past(layout)
            known = self._made[id(layout)] = layout, self._rated(layout, operators, range(len(operators)))
        if present is not None and None in known[1]:
            self._add_operators_of_present(layout, known[1], present, {id(p) for p in among or layout.params})
        return known[1]

    def _operators_of_past(self, layout: Layout) -> Operators:
        """D of the entries whose tensors all have a past, or D = 1."""
        if self.euclidean:
            return Operators([IDENTITY] * len(layout.entries))
        overall, mean = self._means_of_past()
        late, found = self.late(layout), Operators()
        for e, entry in enumerate(self._entries_of(layout)):
            if entry is None:
                found.append(IDENTITY)
            elif e in late:
                found.append(None)
            else:
                key = tuple(entry.ids)  # another layout may have the same entry
                if key not in self._shared:
                    means = [mean[i] for i in entry.ids]
                    self._shared[key] = entry.memory.operator(means, overall[entry.kind.number])
                found.append(self._shared[key])
        return found

    def _add_operators_of_present(self, layout: Layout, found: Operators, g: Vector, among: set[int]) -> None:
        """D of the other entries, with the mean squares of the present gradient for tensors without a past."""
        past = self._means_of_past()
        missing = {e: entry for e, entry in enumerate(self._entries_of(layout)) if entry and found[e] is None}
        params = [p for entry in missing.values() for p in entry.params]
        squares = self._world().total(params, torch.cat([_squares(layout, e, g[e]) for e in missing])[None])[0]
        self._choose_unit(squares.sum(), min(torch.finfo(x.dtype).max for x in g))
        mean, overall = dict(past.tensor), list(past.overall)
        for kind in self._kinds:
            new = [id(p) in among and id(p) not in mean and self._kind_of[id(p)] is kind for p in params]
            rows = [i for i, is_new in enumerate(new) if is_new]
            if rows:
                scale = self.unit**2 if is_scale_free(kind.metric) else 1.0
                each, together = _means(squares[rows] * scale, [size(params[i]) for i in rows])
                mean.update(zip([id(params[i]) for i in rows], each, strict=True))
                overall[kind.number] = together if overall[kind.number] is None else overall[kind.number]
        for e, entry in missing.items():
            # Where no tensor takes part, the gradient is 0, whatever D is.
            found[e], total = IDENTITY, overall[entry.kind.number]
            if among.intersection(entry.ids):
                found[e] = entry.memory.operator([mean.get(i, total) for i in entry.ids], total)
        self._rated(layout, found, missing)

    def _rated(self, layout: Layout, operators: Operators, entries: Iterable[int]) -> Operators:
        """D/rho of the entries of groups whose steps are multiplied by rho."""
        ratios = [] if self._ratios is None else self._ratios()
        for e in entries if ratios else ():
            rate = ratios[layout.places[layout.entries[e].group]]
            if rate != 1 and operators[e] is not None:
                operators[e] = Rated(operators[e], rate)
        return operators

    def _means_of_past(self) -> _Past:
        """The mean squares over whole tensors, and over all of them: by all ranks together."""
        if self._past is None:
            self._past = _Past([None] * len(self._kinds), {})
            layouts = [layout for layout in (self._owner, self._others()) if layout is not None]
            held = [entry for layout in layouts for entry in self._entries_of(layout) if entry is not None]
            world = self._world()
            for number in range(len(self._kinds)):
                mine = [entry for entry in held if entry.kind.number == number]
                if mine:
                    sums = torch.cat([entry.memory.sums() for entry in mine])
                    if world.spread:
                        sums = world.total([p for entry in mine for p in entry.params], sums[None])[0]
                    means = _means(sums, [numel for entry in mine for numel in entry.sizes])
                    self._past.overall[number] = means.overall
                    self._past.tensor.update(zip([i for entry in mine for i in entry.ids], means.tensor, strict=True))
        return self._past

    def _others(self) -> Layout:
        """Parameters with a past that the last update was not of."""
        if self._rest is None:
            taken = {id(p) for p in self._owner.params} if self._owner else set()
            members = [[p for p in g["params"] if id(p) not in taken and self._has_past(p)] for g in self._groups]
            self._rest = Layout(self._groups, members, self.merges, self._state)
        return self._rest

    def _has_past(self, p: Tensor) -> bool:
        """Whether a gradient of the parameter has been seen. A device is not asked for the number of them."""
        kind, held = self._kind_of.get(id(p)), self._state.get(p, {})
        if kind is None or not any(name in held for name in kind.fields):
            return kind is not None and not kind.fields  # a metric that remembers nothing needs no past
        weight = held.get("metric.weight")
        return weight is None or weight.device.type != "cpu" or weight.item() > 0

    # The unit ---------------------------------------------------------------------------------------------------------

    @property
    def unit(self) -> float:
        """What gradients are multiplied by before they are squared: 1 as a rule.

        It is a power of two that keeps squares in range, and more if past gradients are to count as shorter.

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

    def shorten_past(self, factor: float) -> None:
        """Let past gradients count as ``factor`` times as long, where D depends on nothing but their ratios."""
        unit = self.unit / factor
        for group in self._groups:
            group["unit"] = unit

    # The past ---------------------------------------------------------------------------------------------------------

    def usual(self, layout: Layout) -> float | None:
        """The root of the mean of past <g, D^-1 g>, all in the D of this step; None if no past is remembered."""
        if self.euclidean or any(not hasattr(kind.metric, "past_square") for kind in self._kinds):
            return None
        held = zip(self._entries_of(layout), self.operators(layout), strict=True)
        found = []
        for entry, operator in held:
            inner, rate = (operator.operator, operator.rate) if isinstance(operator, Rated) else (operator, 1.0)
            found.append(0.0 if entry is None else rate * entry.memory.past_square(inner))
        if self._world().spread:  # all tensors of an entry lie on the ranks alike
            firsts = [layout.params[entry.start] for entry in layout.entries]
            found = self._world().total(firsts, layout.like.new_tensor(found)[None])[0].tolist()
        return math.sqrt(sum(found)) / self.unit

    def observe(
        self,
        layout: Layout,
        g: Vector,
        gate: Gate,
        scale: float = 1.0,
        h: Vector | None = None,
        kept: Vector | None = None,
    ) -> None:
        """Remember the mean gradient of an update.

        Args:
            layout: the parameters.
            g: the mean gradient, divided by ``scale``.
            gate: whether the update counts.
            scale: what it was multiplied by.
            h: g in the coordinates of D; None if that is not known.
            kept: a vector that is kept in the coordinates of D, which may change.
        """
        if self.euclidean:
            self._made = {}  # rates may change
            return
        h = self.operators(layout, g).turned(g) if h is None else h
        if layout is not self._owner:
            self._own(layout)
        for e, entry in enumerate(self._entries_of(layout)):
            if entry is not None:
                factor = scale * self.unit if is_scale_free(entry.kind.metric) else scale
                entry.memory.observe(g[e], gate, factor, h[e], None if kept is None else kept[e])
        used = (id(layout), id(self._rest))
        self._entries = {number: known for number, known in self._entries.items() if number in used}
        self.forget()
        self._means_of_past()  # by all ranks together, not when a backward first asks

    def join(self, layout: Layout) -> None:
        """Let tensors without a past join those that have one as if their gradients had been 0 so far."""
        for e in self.late(layout):
            for p in layout.params[layout.rows(e)]:
                kind = self._kind_of[id(p)]
                others = [self._state[q] for q in kind.params if self._has_past(q)]
                if others and not self._has_past(p):
                    fresh = self.blank(p)
                    for name in [name for name, value in fresh.items() if not value.dim()]:
                        fresh[name] = next((held[name].clone() for held in others if name in held), fresh[name])
                    self._state[p].update(fresh)
        self._own(None)

    def blank(self, param: Tensor) -> dict[str, Tensor]:
        """What the metric remembers of a parameter before any update, by its name in the optimizer's state."""
        kind = self._kind_of.get(id(param))
        return {} if kind is None else blank(kind.metric, param)


def _squares(layout: Layout, e: int, x: Tensor) -> Tensor:
    """The squared norm of each tensor of an entry."""
    if layout.entries[e].merged:
        return layout.sums(e, x.to(layout.like.dtype).square())
    return dot(x, x).to(layout.like.device).reshape(1)


def _means(sums: Tensor, sizes: list[int]) -> Means:
    """The mean squares of tensors, and of all their numbers, from the sums of squares of each."""
    if sums.device.type == "cpu":  # Python's numbers are faster
        rows = sums.tolist()
        overall = math.fsum(rows) if math.isfinite(sum(rows)) else math.nan  # the same in any order of the tensors
        return Means([a / max(b, 1) for a, b in zip(rows, sizes, strict=True)], overall / max(sum(sizes), 1))
    numel = sums.new_tensor(sizes)
    return Means(list(sums / numel.clamp(min=1)), sums.sum() / numel.sum().clamp(min=1))
