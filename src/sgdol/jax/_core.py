"""From independent gradients to direction times multiplier: what every form of the optimizer has in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sgdol.jax import _geometry, _record
from sgdol.jax._blocks import Blocks, as_real
from sgdol.jax._geometry import Geometry
from sgdol.jax._options import Scaling
from sgdol.jax._sources import Gradients, refuse_integers, take
from sgdol.jax._statistics import Statistics, in_epochs, of_gradients, with_momentum
from sgdol.learners import uses_hindsight
from sgdol.metrics import Euclidean

__all__ = ["Core", "ScaleBySGDOLState"]


class ScaleBySGDOLState(NamedTuple):
    """Everything that SGDOL remembers between two calls of ``update``.

    What there is one of per block is a scalar (``"global"``), a vector (``"group"``, ``"tensor"``) or a tree like the
    parameters (``"coordinate"``).
    """

    count: jax.Array  # type: ignore[assignment]  # optax's word for it; a tuple's method of that name is hidden
    """How many updates were made; a call that only holds a gradient is none."""
    pending: jax.Array
    """Whether a gradient is held and waits for its partner."""
    held: Any
    """The held gradient, of the shape of the parameters; zeros when nothing is pending."""
    learner: Any
    """The learner's state, per block; sums are in units of ``unit`` squared."""
    alpha: Any
    """alpha of each block, in the same unit; 0 as long as its default, the first squared direction, has not been
    seen."""
    multiplier: Any
    """s_t = M eta_t of the last update, per block; before the first, the multiplier that it will use."""
    trace: Any
    """The momentum m_t, like the parameters (complex numbers as pairs); empty without momentum."""
    trace_weight: Any
    """The sum of the weights of the gradients in m_t, 1 - beta^t if beta stays the same; empty without momentum."""
    record: Any
    """What :func:`sgdol.jax.diagnostics` reads; empty with ``record=False``."""
    metric: Any = ()
    """What the metric remembers, like the parameters or one number for each; empty with Euclid's."""
    direction: Any = ()
    """d_t of the last update, like the parameters, if the learner uses hindsight and nothing else tells; else empty."""
    unit: Any = ()
    """The unit of a gradient's length, a power of two, for the sums: 1 unless gradients are very large or very small;
    0 before the first. Empty in states that are older than it, whose unit is 1."""


class Core:
    """From gradients to s d; the base rate is only needed for the record."""

    def __init__(self, options: Scaling) -> None:
        self._options = options
        self._learner: Any = options.learner
        self._metric: Any = options.metric
        self._hindsight = options.learner is not None and uses_hindsight(options.learner)
        self._trace_tells = isinstance(self._metric, Euclidean) and options.momentum is not None

    def init(self, params: Any, rate: Any = 1.0) -> ScaleBySGDOLState:
        refuse_integers(params)
        options, blocks = self._options, self._blocks(params)
        zeros = blocks.zeros()
        states = [self._learner.initial(zero) for zero in zeros]
        alphas, unit = zeros, jnp.zeros((), blocks.dtype)
        if options.alpha is not None:
            one = jnp.ones((), blocks.dtype)
            if self._measures_in_alpha(blocks):
                unit, _ = _geometry.choose_unit([jnp.sqrt(_geometry.in_unit(options.alpha, one))], blocks.dtype)
            first = _geometry.in_unit(options.alpha, jnp.where(unit > 0, unit, one))
            alphas = [zero + first.astype(zero.dtype) for zero in zeros]
        vectors = [jnp.zeros_like(as_real(jnp.asarray(leaf))) for leaf in jax.tree.leaves(params)]
        with_momentum = options.momentum is not None
        state = ScaleBySGDOLState(
            count=jnp.zeros((), jnp.int32),
            pending=jnp.zeros((), bool),
            held=jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.result_type(p)), params),
            learner=blocks.pack_states(states, self._kind()),
            alpha=blocks.pack(alphas),
            multiplier=blocks.pack([self._learner.predict(s, a) for s, a in zip(states, alphas, strict=True)]),
            trace=blocks.tree(vectors) if with_momentum else (),
            trace_weight=jnp.zeros((), blocks.dtype) if with_momentum else (),
            record=_record.empty(blocks, rate) if options.record else (),
            metric=_geometry.pack(self._metric, [self._metric.initial(zero) for zero in vectors], blocks),
            direction=blocks.tree(vectors) if self._keeps_direction else (),
            unit=unit,
        )
        # Each its own memory, as a learner may use one zero twice: nobody can donate the same buffer twice.
        return jax.tree.map(jnp.array, state)

    def update(
        self, updates: Any, state: ScaleBySGDOLState, params: Any, others: Any, rate: Any = 1.0
    ) -> tuple[Any, ScaleBySGDOLState]:
        if not jax.tree.leaves(state.held):  # a mask can leave nothing
            return updates, state
        self._refuse_another_configuration(state)
        options, blocks = self._options, self._blocks(state.held)
        if options.weight_decay is not None and params is None:
            raise ValueError("weight_decay needs the parameters: call update(grads, state, params)")
        found = take(updates, others, state.held, state.pending, options.estimator, options.axis_name)
        scaled, moved, finite = self._complete(found, state, blocks, params, rate)
        go = found.enough & finite
        stay = state._replace(
            pending=~found.enough,
            held=_select(found.enough, jax.tree.map(jnp.zeros_like, state.held), found.waiting),
            record=_record.after_skip(state.record, found.enough) if options.record else (),
        )
        moves = [jnp.where(go, move, jnp.zeros_like(move)) for move in scaled]
        return blocks.tree(moves), _select(go, moved, stay)

    def _complete(
        self, found: Gradients, state: ScaleBySGDOLState, blocks: Blocks, params: Any, rate: Any
    ) -> tuple[list[jax.Array], ScaleBySGDOLState, jax.Array]:
        """The update of each leaf and the state after it, if the gradients are enough; and whether all is finite."""
        options = self._options
        unit, has_unit = self._unit(state, found, blocks)
        geometry = Geometry(self._metric, _geometry.unpack(self._metric, state.metric, blocks), found.mean, unit)
        alone = of_gradients(found, geometry, blocks, options.estimator)
        momentum = 0.0 if options.momentum is None else options.momentum
        raw = seen = in_epochs(alone, options.epoch, state.count, momentum)
        trace, weight = state.trace, state.trace_weight
        if options.momentum is not None:
            beta = jnp.asarray(options.momentum, blocks.dtype)
            weight = beta * state.trace_weight + (1 - beta)
            before = blocks.leaves(trace)
            corrected = weight if options.bias_correction else jnp.ones_like(weight)
            seen, after = with_momentum(raw, found, geometry, blocks, before, corrected, beta, options.statistics)
            trace = blocks.tree(after)

        last = self._hindsight_of(state, found, geometry, blocks, raw.low)
        multipliers, observed, alphas = self._learn(state, seen, last, raw.n, unit, blocks)
        new = ScaleBySGDOLState(
            count=optax.safe_increment(state.count),
            pending=jnp.zeros((), bool),
            held=jax.tree.map(jnp.zeros_like, state.held),
            learner=blocks.pack_states(observed, self._kind()),
            alpha=blocks.pack(alphas),
            multiplier=blocks.pack(multipliers),
            trace=trace,
            trace_weight=weight,
            record=(),
            metric=_geometry.pack(self._metric, geometry.observe(found.mean), blocks),
            direction=blocks.tree(seen.directions) if self._keeps_direction else (),
            # A signal without a direction, of gradients that cancel, has been taken in this unit, too.
            unit=jnp.where(has_unit | (_record.total(raw.u) != 0), unit, 0.0) if _has(state.unit) else (),
        )
        if options.record:
            lengths = geometry.products(seen.directions, seen.directions) if blocks.per_coordinate else seen.n
            record = _record.after_update(state.record, blocks, seen, raw, multipliers, lengths, rate)
            new = new._replace(record=record)
        # Squares of a finite gradient may overflow, and one infinite sum would end the learning for ever.
        finite = jnp.isfinite(_record.total(raw.u) + _record.total(raw.n) + _record.total(last))
        return self._moves(blocks.spread(multipliers), seen.directions, params, found, state, blocks), new, finite

    def _unit(self, state: ScaleBySGDOLState, found: Gradients, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
        """The unit of this update's products, and whether there was or is something to choose it by."""
        if not _has(state.unit):
            return jnp.ones((), blocks.dtype), jnp.ones((), bool)
        known = state.unit > 0
        if self._measures_in_alpha(blocks):
            return state.unit, known
        # A branch, as this is needed once: the largest entry of all gradients takes time to find.
        return jax.lax.cond(known, lambda: (state.unit, known), lambda: _geometry.choose_unit(found.mean, blocks.dtype))

    def _measures_in_alpha(self, blocks: Blocks) -> bool:
        """Whether a given alpha sets the unit: float64 holds every square that matters beside it."""
        return self._options.alpha is not None and jnp.finfo(blocks.dtype).maxexp >= 1024

    def _learn(
        self,
        state: ScaleBySGDOLState,
        seen: Statistics,
        last: list[jax.Array],
        lengths: list[jax.Array],
        unit: jax.Array,
        blocks: Blocks,
    ) -> tuple[list[jax.Array], list[Any], list[jax.Array]]:
        """The multipliers, the learner's states and alpha, of each block."""
        states, alphas = blocks.unpack_states(state.learner, self._kind()), blocks.unpack(state.alpha)
        if self._options.alpha is None:
            after = self._first_alpha(alphas, lengths, blocks)
        else:
            if _has(state.unit) and not self._measures_in_alpha(blocks):
                first = _geometry.in_unit(self._options.alpha, unit)
                alphas = [jnp.where(state.unit > 0, a, first.astype(a.dtype)) for a in alphas]
            after = alphas
        multipliers = [self._learner.predict(s, a) for s, a in zip(states, alphas, strict=True)]
        hindsight = [{"last": v} for v in last] if self._hindsight else [{}] * len(states)
        blockwise = zip(states, multipliers, seen.u, seen.n, after, hindsight, strict=True)
        return multipliers, [self._learner.observe(s, m, u, n, a, **v) for s, m, u, n, a, v in blockwise], after

    def _hindsight_of(
        self, state: ScaleBySGDOLState, found: Gradients, geometry: Geometry, blocks: Blocks, low: list[jax.Array]
    ) -> list[jax.Array]:
        """V = <gbar_t, d_{t-1}> of each block, if the learner wants it; 0 at the first update."""
        if not self._hindsight:
            return blocks.zeros()
        weight = jnp.ones((), blocks.dtype)
        if self._options.bias_correction and self._options.momentum is not None:
            weight = jnp.where(state.trace_weight > 0, state.trace_weight, 1.0)
        if self._trace_tells:
            before = [m / weight.astype(m.dtype) for m in blocks.leaves(state.trace)]
        else:
            before = blocks.leaves(state.direction)
        products = blocks.sums(geometry.products(found.mean, before))
        return [v + c / weight.astype(c.dtype) for v, c in zip(products, low, strict=True)]

    def _moves(
        self,
        factors: list[Any],
        directions: list[jax.Array],
        params: Any,
        found: Gradients,
        state: ScaleBySGDOLState,
        blocks: Blocks,
    ) -> list[jax.Array]:
        """S (d + weight_decay x) of each leaf, in the type that an update of it has."""
        if self._options.weight_decay is not None:
            decay = jnp.asarray(self._options.weight_decay)
            xs = [as_real(jnp.asarray(x)) for x in blocks.leaves(params)]
            directions = [d + decay.astype(d.dtype) * x for d, x in zip(directions, xs, strict=True)]
        moves = [(s * d).astype(d.dtype) for s, d in zip(factors, directions, strict=True)]
        types = zip(found.dtypes, blocks.leaves(state.held), strict=True)
        return [_like(move, jnp.result_type(*pair)) for move, pair in zip(moves, types, strict=True)]

    def _first_alpha(self, alphas: list[jax.Array], n: list[jax.Array], blocks: Blocks) -> list[jax.Array]:
        """The default alpha: kappa times the first non-zero squared gradient, to each block its even share by size."""
        length = _record.total(n)
        kappa, largest = _geometry.in_unit(self._options.kappa, jnp.ones_like(length)), _geometry.largest(length.dtype)
        first = jnp.where(length > 0, jnp.minimum(kappa * length, largest), 0.0)
        unset = jnp.max(alphas[0]) == 0 if alphas[0].size else _record.total(alphas) == 0
        return [
            jnp.where(unset, jnp.broadcast_to((first * share).astype(a.dtype), a.shape), a)
            for a, share in zip(alphas, blocks.shares(), strict=True)
        ]

    def _refuse_another_configuration(self, state: ScaleBySGDOLState) -> None:
        options = self._options
        parts = {
            "momentum": (state.trace_weight, options.momentum is not None),
            "record": (state.record, options.record),
            "a metric": (state.metric, bool(jax.tree.leaves(self._metric.initial(0.0)))),
            "a learner that uses hindsight": (state.direction, self._keeps_direction),
        }
        for name, (part, wanted) in parts.items():
            if _has(part) != wanted:
                words = ("without", "with") if wanted else ("with", "without")
                raise ValueError(
                    f"state was made {words[0]} {name} and this optimizer is {words[1]}: init a state of its own"
                )

    @property
    def _keeps_direction(self) -> bool:
        """Whether the last direction has to be kept: with Euclid's norm and momentum the trace tells it."""
        return self._hindsight and not self._trace_tells

    def _blocks(self, params: Any) -> Blocks:
        return Blocks(self._options.granularity, params, self._options.param_labels)

    def _kind(self) -> Any:
        """The tree structure of the learner's state."""
        return jax.tree.structure(jax.eval_shape(lambda: self._learner.initial(jnp.zeros(()))))


def _has(part: Any) -> bool:
    """Whether that part of a state is there."""
    return not (isinstance(part, tuple) and len(part) == 0)


def _like(move: jax.Array, dtype: Any) -> jax.Array:
    """A real move as an update of that type."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        move = jax.lax.complex(move[..., 0], move[..., 1])
    return move.astype(dtype)


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
