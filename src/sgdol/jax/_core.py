"""From independent gradients to direction times multiplier: what every form of the optimizer has in common."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from sgdol import surrogate
from sgdol.jax import _record
from sgdol.jax._axes import sum_over
from sgdol.jax._blocks import Blocks, as_real, total
from sgdol.jax._metric import Memory, choose_unit, divided, in_unit, largest, operators, sharp
from sgdol.jax._options import Scaling
from sgdol.jax._sources import Gradients, refuse_integers, take
from sgdol.learners import uses_hindsight
from sgdol.metrics import Euclidean, Operator, is_scale_free

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
    """The held gradient, of the shape of the parameters; means nothing unless ``pending``."""
    learner: Any
    """The learner's state, per block; sums are in units of ``unit`` squared."""
    alpha: Any
    """alpha of each block, in the same unit; 0 as long as its default, the first squared direction, has not been
    seen."""
    multiplier: Any
    """s_t = M eta_t of the last update, per block; before the first, the multiplier that it will use."""
    trace: Any
    """The momentum m_t in units of ``unit``, like the parameters (complex numbers as pairs); empty without momentum."""
    trace_weight: Any
    """The sum of the weights of the gradients in m_t, 1 - beta^t if beta stays the same; empty without momentum."""
    record: Any
    """What :func:`sgdol.jax.diagnostics` reads; empty with ``record=False``."""
    metric: Any = ()
    """What the metric remembers (:class:`sgdol.jax._metric.Memory`); empty with Euclid's."""
    direction: Any = ()
    """d_t of the last update in units of ``unit``, like the parameters, if the learner uses hindsight and nothing else
    tells it; else empty."""
    unit: Any = ()
    """The unit of gradients, a power of two: 1 unless they are very large or very small; 0 before the first."""


class Statistics(NamedTuple):
    """What an update is made of; gradients in units, products in their squares, of each block."""

    d: list[jax.Array]
    """The direction of each leaf: real, in float32 or wider."""
    u: list[jax.Array]
    """The signal that the learner sees..."""
    n: list[jax.Array]
    """...and the squared length."""
    own_u: list[jax.Array]
    """The same two of the gradients themselves..."""
    own_n: list[jax.Array]
    """...which without momentum are those above."""
    last: list[jax.Array]
    """<gbar_t, d_{t-1}>, if the learner uses hindsight; else zeros."""
    k: int
    """How many gradients there were."""


class Core:
    """From gradients to s d; the base rate is only needed for the record."""

    def __init__(self, options: Scaling) -> None:
        self._options = options
        self._learner = cast(Any, options.learner)  # options have made objects of names
        self._metric = cast(Any, options.metric)
        self._memory = Memory(self._metric)
        self._kind: Any = jax.tree.structure(self._learner.initial(0.0))
        self._hindsight = uses_hindsight(self._learner)
        # With Euclid's norm and momentum, d_{t-1} is the trace.
        self._trace_tells = isinstance(self._metric, Euclidean) and options.momentum is not None
        self._keeps_direction = self._hindsight and not self._trace_tells

    def init(self, params: Any, rate: Any = 1.0) -> ScaleBySGDOLState:
        refuse_integers(params)
        options = self._options
        blocks = Blocks(options.granularity, params, options.param_labels)
        zeros = blocks.zeros()
        states = [self._learner.initial(zero) for zero in zeros]
        alphas, unit = zeros, jnp.zeros((), blocks.dtype)
        if options.alpha is not None:
            one = jnp.ones((), blocks.dtype)
            if self._measures_in_alpha(blocks):
                unit, _ = choose_unit([jnp.sqrt(in_unit(options.alpha, one))], blocks.dtype)
            first = in_unit(options.alpha, jnp.where(unit > 0, unit, one))
            alphas = [zero + first.astype(zero.dtype) for zero in zeros]
        vectors = [jnp.zeros_like(as_real(jnp.asarray(leaf))) for leaf in jax.tree.leaves(params)]
        momentum = options.momentum is not None
        like_params = jax.tree.unflatten(blocks.tree, vectors)
        state = ScaleBySGDOLState(
            count=jnp.zeros((), jnp.int32),
            pending=jnp.zeros((), bool),
            held=jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.result_type(p)), params),
            learner=blocks.pack(states, self._kind),
            alpha=blocks.pack(alphas),
            multiplier=blocks.pack([self._learner.predict(s, a) for s, a in zip(states, alphas, strict=True)]),
            trace=like_params if momentum else (),
            trace_weight=jnp.zeros((), blocks.dtype) if momentum else (),
            record=_record.empty(blocks, rate) if options.record else (),
            metric=self._memory.pack([self._metric.initial(v) for v in vectors], blocks.tree, blocks.dtypes),
            direction=like_params if self._keeps_direction else (),
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
        options = self._options
        blocks = Blocks(options.granularity, state.held, options.param_labels)
        if options.weight_decay is not None and params is None:
            raise ValueError("weight_decay needs the parameters: call update(grads, state, params)")
        found = take(updates, others, state.held, options.estimator, options.axis_name)

        # Gradients in units; D of the past, which without a past is made of the present mean.
        unit, has_unit = self._unit(state, found, blocks)
        given = found.mean
        found = found._replace(vectors=divided(found.vectors, unit), mean=divided(found.mean, unit))
        mean = found.mean if is_scale_free(self._metric) else given
        memory = self._memory.unpack(state.metric, blocks.tree, blocks.dtypes)
        D = operators(self._metric, memory, mean)

        # (d, u, n) -> multiplier s -> move s d.
        seen, trace, weight = self._measure(state, found, D, blocks)
        multipliers, learned, alphas = self._learn(state, seen, unit, blocks)
        moves = self._moves(blocks.spread(multipliers), seen.d, unit, params, found, state)

        # Squares of a finite gradient may overflow, and one infinite sum would end the learning for ever.
        finite = jnp.isfinite(total(seen.own_u) + total(seen.own_n) + total(seen.last))
        enough = jnp.ones((), bool) if found.waiting is None else state.pending
        go = enough & finite
        tree = blocks.tree
        moved = state._replace(
            count=optax.safe_increment(state.count),
            learner=blocks.pack(learned, self._kind),
            alpha=blocks.pack(alphas),
            multiplier=blocks.pack(multipliers),
            trace=() if trace is None else jax.tree.unflatten(tree, trace),
            trace_weight=weight,
            metric=self._memory.pack(
                [self._metric.observe(s, g) for s, g in zip(memory, mean, strict=True)], tree, blocks.dtypes
            ),
            direction=jax.tree.unflatten(tree, seen.d) if self._keeps_direction else (),
            # A signal without a direction, of gradients that cancel, has been taken in this unit, too.
            unit=jnp.where(has_unit | (total(seen.own_u) != 0), unit, 0.0),
            held=(),
            record=(),
        )
        new = _select(go, moved, state._replace(held=(), record=()))._replace(pending=~enough, held=state.held)
        if found.waiting is not None:
            new = new._replace(held=_select(enough, jax.tree.map(jnp.zeros_like, state.held), found.waiting))
        if options.record:
            record = _record.after_update(state.record, blocks, seen, multipliers, rate, go, enough & ~finite)
            new = new._replace(record=record)
        zero = [jnp.where(go, move, jnp.zeros_like(move)) for move in moves]
        return jax.tree.unflatten(tree, zero), new

    def _unit(self, state: ScaleBySGDOLState, found: Gradients, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
        """The unit of this update's gradients, and whether there was or is something to choose it by."""
        known = state.unit > 0
        if self._measures_in_alpha(blocks):
            return state.unit, known
        # A branch, as this is needed once: the largest entry of all gradients takes time to find.
        return jax.lax.cond(known, lambda: (state.unit, known), lambda: choose_unit(found.mean, blocks.dtype))

    def _measures_in_alpha(self, blocks: Blocks) -> bool:
        """Whether a given alpha sets the unit: float64 holds every square that matters beside it."""
        return self._options.alpha is not None and jnp.finfo(blocks.dtype).maxexp >= 1024

    def _measure(
        self, state: ScaleBySGDOLState, found: Gradients, D: list[Operator], blocks: Blocks
    ) -> tuple[Statistics, list[jax.Array] | None, Any]:
        """The statistics of the update, the momentum m_t and the sum of its weights."""
        options, mean = self._options, found.mean
        d = sharp(D, mean)
        own_n = n = blocks.products(mean, d)
        own_u = u = self._signal(found, D, n, blocks)
        low = blocks.zeros()  # by how much products with earlier gradients in the momentum are low
        if options.epoch is not None:
            # Products of two gradients of one epoch are low by a number of which (n - u)/B is an unbiased estimate.
            # Of m_{t-1}, a share of 1 - beta^p, p the updates since the epoch began, is of the same epoch.
            low = [(n_ - u_) / jnp.asarray(options.epoch, u_.dtype) for u_, n_ in zip(u, n, strict=True)]
            own_u = u = [u_ + c for u_, c in zip(u, low, strict=True)]
            beta = jnp.asarray(0.0 if options.momentum is None else options.momentum)
            share = 1 - beta ** jnp.mod(state.count, jnp.asarray(options.epoch, state.count.dtype))
            low = [share.astype(c.dtype) * c for c in low]
        trace, weight, before = None, state.trace_weight, jnp.ones((), blocks.dtype)
        crosses = low
        if options.momentum is not None:
            beta = jnp.asarray(options.momentum, blocks.dtype)
            weight = beta * state.trace_weight + (1 - beta)
            corrected = weight if options.bias_correction else jnp.ones_like(weight)
            before = jnp.where(state.trace_weight > 0, state.trace_weight, 1.0) if options.bias_correction else before
            past = blocks.tree.flatten_up_to(state.trace)
            # <m_{t-1}, D^-1 gbar_t>, D being symmetric.
            crosses = [cross + c for cross, c in zip(blocks.products(past, d), low, strict=True)]
            trace = [beta.astype(m.dtype) * m + (1 - beta).astype(m.dtype) * g for m, g in zip(past, mean, strict=True)]
            corrected_trace = [m / corrected.astype(m.dtype) for m in trace]
            d = sharp(D, corrected_trace)
            if options.statistics == "direction":
                n = blocks.products(corrected_trace, d)
                u = [
                    surrogate.momentum_signal(cross, own, beta.astype(own.dtype), corrected.astype(own.dtype))
                    for cross, own in zip(crosses, u, strict=True)
                ]
        last = blocks.zeros()
        if self._keeps_direction:
            products = blocks.products(mean, blocks.tree.flatten_up_to(state.direction))
            last = [v + c / before.astype(c.dtype) for v, c in zip(products, low, strict=True)]
        elif self._hindsight:
            last = [cross / before.astype(cross.dtype) for cross in crosses]
        return Statistics(d, u, n, own_u, own_n, last, found.k), trace, weight

    def _signal(self, found: Gradients, D: list[Operator], n: list[jax.Array], blocks: Blocks) -> list[jax.Array]:
        r"""U of the gradients alone; the symmetric estimator uses all of them, the paper's the first two.

        Over the devices of a named axis the k gradients are those of all devices, and besides their mean one number
        per block is communicated: :math:`Q = \sum_i \|g_i\|^2, u = \frac{k}{k-1} (\|\bar g\|^2 - Q/k^2)`.
        """
        if (found.k == 2 and not found.axes) or self._options.estimator == "paper":
            # For equal gradients, u = n to the last bit.
            return blocks.products([g[0] for g in found.vectors], sharp(D, [g[1] for g in found.vectors]))
        sharpened = [jax.vmap(op.sharp)(g).astype(g.dtype) for op, g in zip(D, found.vectors, strict=True)]
        k, squares = found.k, sum_over(found.axes, blocks.products(found.vectors, sharpened))
        return [surrogate.symmetric_signal(length, q / k**2, k) for length, q in zip(n, squares, strict=True)]

    def _learn(
        self, state: ScaleBySGDOLState, seen: Statistics, unit: jax.Array, blocks: Blocks
    ) -> tuple[list[jax.Array], list[Any], list[jax.Array]]:
        """The multipliers, the learner's states and alpha, of each block."""
        states, alphas = blocks.unpack(state.learner, self._kind), blocks.unpack(state.alpha)
        if self._options.alpha is None:
            after = self._first_alpha(alphas, seen.own_n, blocks)
        else:
            if not self._measures_in_alpha(blocks):
                first = in_unit(self._options.alpha, unit)
                alphas = [jnp.where(state.unit > 0, a, first.astype(a.dtype)) for a in alphas]
            after = alphas
        multipliers = [self._learner.predict(s, a) for s, a in zip(states, alphas, strict=True)]
        hindsight = [{"last": v} for v in seen.last] if self._hindsight else [{}] * len(states)
        rows = zip(states, multipliers, seen.u, seen.n, after, hindsight, strict=True)
        return multipliers, [self._learner.observe(s, m, u, n, a, **v) for s, m, u, n, a, v in rows], after

    def _first_alpha(self, alphas: list[jax.Array], n: list[jax.Array], blocks: Blocks) -> list[jax.Array]:
        """The default alpha: kappa times the first non-zero squared gradient, to each block its even share by size."""
        length = total(n)
        kappa: Any = self._options.kappa
        top = largest(length.dtype)
        kappa = min(kappa, top) if isinstance(kappa, float) else jnp.minimum(kappa, top).astype(length.dtype)
        first = jnp.where(length > 0, jnp.minimum(kappa * length, top), 0.0)
        unset = jnp.max(alphas[0]) == 0 if alphas[0].size else total(alphas) == 0
        return [
            jnp.where(unset, jnp.broadcast_to((first * share).astype(a.dtype), a.shape), a)
            for a, share in zip(alphas, blocks.shares(), strict=True)
        ]

    def _moves(
        self,
        factors: list[Any],
        directions: list[jax.Array],
        unit: jax.Array,
        params: Any,
        found: Gradients,
        state: ScaleBySGDOLState,
    ) -> list[jax.Array]:
        """S (d + weight_decay x) of each leaf, in the type that an update of it has."""
        directions = [unit.astype(d.dtype) * d for d in directions]
        if self._options.weight_decay is not None:
            decay = jnp.asarray(self._options.weight_decay)
            xs = [as_real(jnp.asarray(x)) for x in jax.tree.leaves(params)]
            directions = [d + decay.astype(d.dtype) * x for d, x in zip(directions, xs, strict=True)]
        moves = [(s * d).astype(d.dtype) for s, d in zip(factors, directions, strict=True)]
        types = zip(found.dtypes, jax.tree.leaves(state.held), strict=True)
        return [_like(move, jnp.result_type(*pair)) for move, pair in zip(moves, types, strict=True)]

    def _refuse_another_configuration(self, state: ScaleBySGDOLState) -> None:
        options = self._options
        parts = {
            "momentum": (state.trace_weight, options.momentum is not None),
            "record": (state.record, options.record),
            "a metric": (state.metric, not self._memory.is_empty),
            "a learner that uses hindsight": (state.direction, self._keeps_direction),
            "a unit, as those of version 0.1,": (state.unit, True),
        }
        for name, (part, wanted) in parts.items():
            has = not (isinstance(part, tuple) and len(part) == 0)
            if has != wanted:
                words = ("without", "with") if wanted else ("with", "without")
                raise ValueError(
                    f"state was made {words[0]} {name} and this optimizer is {words[1]}: init a state of its own"
                )


def _like(move: jax.Array, dtype: Any) -> jax.Array:
    """A real move as an update of that type."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        move = jax.lax.complex(move[..., 0], move[..., 1])
    return move.astype(dtype)


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
