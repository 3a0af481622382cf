"""The metrics of an optimizer's parameter groups: the operator D of a step, and the memory that it is computed from.

D is computed from the gradients of earlier steps. So it is known before the backward passes of the step run, and each
contribution is measured in it at once. A tensor without an earlier gradient is the exception: its first D is computed
from the gradient of the same step (``Metrics.operators(..., present)``).
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
    """All parameters that have one metric in common."""

    number: int
    metric: Any
    params: list[Tensor]
    fields: list[str]  # keys of the metric's state in the optimizer's state of a parameter


class _Entry(NamedTuple):
    """One entry of a layout, and the memory of its metric."""

    kind: _Kind
    memory: Squares | Whole
    params: list[Tensor]
    ids: list[int]
    sizes: list[int]  # numbers in each tensor, over all ranks


class _MeanSquares(NamedTuple):
    """Means of squared gradients of earlier steps, over the numbers of all ranks."""

    overall: list[Any]  # for each kind the mean over all its tensors; None if none has a past
    tensor: dict[int, Any]  # for each tensor with a past, by id


class Metrics:
    """The metrics of an optimizer's parameter groups. Their memory is in the optimizer's state.

    Args:
        groups: the parameter groups.
        metric_of: returns the metric of a group.
        state: the optimizer's state.
        world: returns the world that the optimizer is in.
        ratios: returns rho of each group, by which D is divided; None for 1.
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
        self.euclidean = not self._kinds  # whether D = 1 up to rho of the groups
        self._kind_of = {id(p): kind for kind in self._kinds for p in kind.params}
        self._update_in(None)

    def _update_in(self, layout: Layout | None) -> None:
        # Updates are made in this layout from now on: the state of its parameters is views of its vectors. Parameters
        # with a past that are not in it lie in a layout of their own.
        self._layout = layout
        self._layout_of_others: Layout | None = None
        self._entries: dict[Layout, list[_Entry | None]] = {}
        self._without_past: dict[Layout, frozenset[int]] = {}
        self.forget()

    def merges(self, group: dict[str, Any], param: Tensor) -> tuple[int, ...] | None:
        """Sort key of a small tensor among those that it is merged with (see :class:`Layout`); None to keep it apart.

        The key of a matrix that the Kronecker metric rotates is its shape: these come last, one shape after the other.
        """
        metric = self._metric_of(group)
        if isinstance(metric, Euclidean) or is_diagonal_on(metric, param):
            return ()
        return tuple(param.shape) if type(metric) is Kronecker else None

    def forget(self) -> None:
        """Drop D of the coming step: the memory has changed, or the gradient that D was computed from is discarded."""
        self._means: _MeanSquares | None = None
        self._operators: dict[Layout, Operators] = {}
        self._operator_of: dict[tuple[int, ...], Any] = {}  # by the ids of an entry's tensors

    def without_past(self, layout: Layout) -> frozenset[int]:
        """Entries that need the gradient of the coming step for D: one of their tensors has no earlier gradient."""
        if self.euclidean:
            return frozenset()
        if layout not in self._without_past:
            past = self._means_of_past().tensor
            new = {i for i, p in enumerate(layout.params) if id(p) in self._kind_of and id(p) not in past}
            entries = (e for e, entry in enumerate(layout.entries) if new.intersection(range(entry.start, entry.stop)))
            self._without_past[layout] = frozenset(entries)
        return self._without_past[layout]

    def _entries_of(self, layout: Layout) -> list[_Entry | None]:
        # None for an entry with D = 1.
        if layout not in self._entries:
            self._entries[layout] = [self._entry(layout, e) for e in range(len(layout.entries))]
        return self._entries[layout]

    def _entry(self, layout: Layout, e: int) -> _Entry | None:
        params = layout.params[layout.rows(e)]
        kind = self._kind_of.get(id(params[0]))
        if kind is None:
            return None
        diagonal = all(is_diagonal_on(kind.metric, p) for p in params)
        make: Any = Squares if diagonal else Matrices if type(kind.metric) is Kronecker else Whole
        memory = make(kind.metric, layout, e, self._state, layout is self._layout)
        return _Entry(kind, memory, params, [id(p) for p in params], [size(p) for p in params])

    # D of a step ------------------------------------------------------------------------------------------------------

    def operators(
        self, layout: Layout, present: Vector | None = None, among: Sequence[Tensor] | None = None
    ) -> Operators:
        """D of the coming step; None for the entries of :meth:`without_past`, unless ``present`` is given.

        Args:
            layout: the parameters.
            present: the mean gradient of the step, from which D of tensors without a past is computed.
            among: the parameters that take part in the step; None for all.
        """
        operators = self._operators.get(layout)
        if operators is None:
            operators = self._operators_of_past(layout)
            self._operators[layout] = self._rated(layout, operators, range(len(operators)))
        if present is not None and None in operators:
            self._add_operators_of_present(layout, operators, present, {id(p) for p in among or layout.params})
        return operators

    def _operators_of_past(self, layout: Layout) -> Operators:
        if self.euclidean:
            return Operators([IDENTITY] * len(layout.entries))
        overall, mean = self._means_of_past()
        without_past, operators = self.without_past(layout), Operators()
        for e, entry in enumerate(self._entries_of(layout)):
            if entry is None:
                operators.append(IDENTITY)
            elif e in without_past:
                operators.append(None)
            else:
                key = tuple(entry.ids)  # the layout of the backward passes and that of the update share most entries
                if key not in self._operator_of:
                    means = [mean[i] for i in entry.ids]
                    self._operator_of[key] = entry.memory.operator(means, overall[entry.kind.number])
                operators.append(self._operator_of[key])
        return operators

    def _add_operators_of_present(self, layout: Layout, operators: Operators, g: Vector, among: set[int]) -> None:
        past = self._means_of_past()
        missing = {e: entry for e, entry in enumerate(self._entries_of(layout)) if entry and operators[e] is None}
        params = [p for entry in missing.values() for p in entry.params]
        squares = self._world().total(params, torch.cat([_squares(layout, e, g[e]) for e in missing])[None])[0]
        self._choose_unit(squares.sum(), min(torch.finfo(x.dtype).max for x in g))
        mean, overall = dict(past.tensor), list(past.overall)
        for kind in self._kinds:
            new = [id(p) in among and id(p) not in mean and self._kind_of[id(p)] is kind for p in params]
            rows = [i for i, is_new in enumerate(new) if is_new]
            if rows:
                scale = self.unit**2 if is_scale_free(kind.metric) else 1.0
                means = _means(squares[rows] * scale, [size(params[i]) for i in rows])
                mean.update(zip([id(params[i]) for i in rows], means.tensor, strict=True))
                if overall[kind.number] is None:
                    overall[kind.number] = means.overall
        for e, entry in missing.items():
            # If no tensor of the entry takes part, its gradient is 0, and any D will do.
            operators[e], total = IDENTITY, overall[entry.kind.number]
            if among.intersection(entry.ids):
                operators[e] = entry.memory.operator([mean.get(i, total) for i in entry.ids], total)
        self._rated(layout, operators, missing)

    def _rated(self, layout: Layout, operators: Operators, entries: Iterable[int]) -> Operators:
        # D -> D/rho, where lr differs between groups.
        ratios = [] if self._ratios is None else self._ratios()
        for e in entries if ratios else ():
            rate = ratios[layout.places[layout.entries[e].group]]
            if rate != 1 and operators[e] is not None:
                operators[e] = Rated(operators[e], rate)
        return operators

    def _means_of_past(self) -> _MeanSquares:
        if self._means is None:
            self._means = _MeanSquares([None] * len(self._kinds), {})
            if self._layout_of_others is None:
                updated = {id(p) for p in self._layout.params} if self._layout else set()
                members = [[p for p in g["params"] if id(p) not in updated and self._has_past(p)] for g in self._groups]
                self._layout_of_others = Layout(self._groups, members, self.merges, self._state)
            layouts = [layout for layout in (self._layout, self._layout_of_others) if layout is not None]
            entries = [entry for layout in layouts for entry in self._entries_of(layout) if entry is not None]
            world = self._world()
            for number in range(len(self._kinds)):
                of_kind = [entry for entry in entries if entry.kind.number == number]
                if of_kind:
                    sums = torch.cat([entry.memory.sums() for entry in of_kind])
                    if world.spread:
                        sums = world.total([p for entry in of_kind for p in entry.params], sums[None])[0]
                    means = _means(sums, [numel for entry in of_kind for numel in entry.sizes])
                    self._means.overall[number] = means.overall
                    ids = [i for entry in of_kind for i in entry.ids]
                    self._means.tensor.update(zip(ids, means.tensor, strict=True))
        return self._means

    def _has_past(self, p: Tensor) -> bool:
        kind, state = self._kind_of.get(id(p)), self._state.get(p, {})
        if kind is None or not any(name in state for name in kind.fields):
            return kind is not None and not kind.fields  # a metric without memory needs no past
        weight = state.get("metric.weight")
        # A weight of 0 is that of a state which no update has changed. Reading it would wait for an accelerator: where
        # that has skipped its first update, D of the second one is 1.
        return weight is None or weight.device.type != "cpu" or weight.item() > 0

    # The unit ---------------------------------------------------------------------------------------------------------

    @property
    def unit(self) -> float:
        """The factor of gradients before they are squared, 1 as a rule.

        It is a power of two if the squares would leave the range, and more if past gradients are to count as shorter.

        It does not change D of a scale-free metric, and a power of two changes no digit.
        """
        return self._groups[0].get("unit", 1.0)

    def _choose_unit(self, square: Tensor, largest: float) -> None:
        if "unit" in self._groups[0] or square.device.type != "cpu":  # an accelerator is not waited for
            return
        exponent = math.frexp(math.sqrt(square.item()))[1] if 0 < square.item() < math.inf else 0
        bound = math.frexp(largest)[1] // 4  # the fourth root of the largest float: room for growth, and for sums
        for group in self._groups:
            group["unit"] = 1.0 if abs(exponent) <= bound else 2.0**-exponent

    def shorten_past(self, factor: float) -> None:
        """Let past gradients count as ``factor`` times as long, where D depends on nothing but their ratios."""
        unit = self.unit / factor
        for group in self._groups:
            group["unit"] = unit

    # The past ---------------------------------------------------------------------------------------------------------

    def usual(self, layout: Layout) -> float | None:
        """The root mean square of ||g|| over earlier gradients, in D of the coming step; None if it is not known."""
        if self.euclidean or any(not hasattr(kind.metric, "past_square") for kind in self._kinds):
            return None
        squares = []
        for entry, operator in zip(self._entries_of(layout), self.operators(layout), strict=True):
            unrated, rate = (operator.operator, operator.rate) if isinstance(operator, Rated) else (operator, 1.0)
            squares.append(0.0 if entry is None else rate * entry.memory.past_square(unrated))
        if self._world().spread:  # one tensor stands for its entry: all of them are distributed in the same way
            firsts = [layout.params[entry.start] for entry in layout.entries]
            squares = self._world().total(firsts, layout.like.new_tensor(squares)[None])[0].tolist()
        return math.sqrt(sum(squares)) / self.unit

    def observe(
        self,
        layout: Layout,
        g: Vector,
        gate: Gate,
        scale: float = 1.0,
        h: Vector | None = None,
        momentum: Vector | None = None,
    ) -> None:
        """Update the memory with the mean gradient of an update, ``scale`` g.

        Args:
            layout: the parameters.
            g: the mean gradient before it was shortened.
            gate: whether the update counts.
            scale: the factor by which it was shortened.
            h: g in the coordinates of D; None to compute it.
            momentum: a vector that the caller keeps in the coordinates of D. When these change it is rotated to the new
                ones, in place.
        """
        if self.euclidean:
            self._operators = {}  # rho may change
            return
        h = self.operators(layout, g).turned(g) if h is None else h
        if layout is not self._layout:
            self._update_in(layout)
        for e, entry in enumerate(self._entries_of(layout)):
            if entry is not None:
                factor = scale * self.unit if is_scale_free(entry.kind.metric) else scale
                entry.memory.observe(g[e], gate, factor, h[e], None if momentum is None else momentum[e])
        # Other layouts had copies of the memory as it was.
        up_to_date = (layout, self._layout_of_others)
        self._entries = {key: entries for key, entries in self._entries.items() if key in up_to_date}
        self.forget()
        self._means_of_past()  # now, when all ranks are here: in a backward one of them may not ask for it

    def join(self, layout: Layout) -> None:
        """Give tensors without a past the memory that gradients of 0 in all earlier steps would have left."""
        for e in self.without_past(layout):
            for p in layout.params[layout.rows(e)]:
                kind = self._kind_of[id(p)]
                others = [self._state[q] for q in kind.params if self._has_past(q)]
                if others and not self._has_past(p):
                    fresh = self.blank(p)
                    for name in [name for name, value in fresh.items() if not value.dim()]:
                        # Single numbers (the sum of weights, the number of updates) are those of any other tensor.
                        fresh[name] = next((state[name].clone() for state in others if name in state), fresh[name])
                    self._state[p].update(fresh)
        self._update_in(None)

    def blank(self, param: Tensor) -> dict[str, Tensor]:
        kind = self._kind_of.get(id(param))
        return {} if kind is None else blank(kind.metric, param)


def _squares(layout: Layout, e: int, x: Tensor) -> Tensor:
    # One number for each tensor of entry e.
    if layout.entries[e].merged:
        return layout.sums(e, x.to(layout.like.dtype).square())
    return dot(x, x).to(layout.like.device).reshape(1)


def _means(sums: Tensor, sizes: list[int]) -> Means:
    if sums.device.type == "cpu":  # Python's numbers are faster
        rows = sums.tolist()
        overall = math.fsum(rows) if math.isfinite(sum(rows)) else math.nan  # fsum: the order must not matter
        return Means([a / max(b, 1) for a, b in zip(rows, sizes, strict=True)], overall / max(sum(sizes), 1))
    numel = sums.new_tensor(sizes)
    return Means(list(sums / numel.clamp(min=1)), sums.sum() / numel.sum().clamp(min=1))
