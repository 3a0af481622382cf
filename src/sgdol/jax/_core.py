"""From independent gradients to direction times multiplier: what every form of the optimizer has in common."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sgdol import surrogate
from sgdol.jax import _record
from sgdol.jax._blocks import GRANULARITIES, Blocks, Granularity, as_real
from sgdol.jax._checks import check_choice, check_number, is_given, learner_or_default
from sgdol.jax._draw import draw, with_momentum
from sgdol.jax._ways import Gradients, gradients, refuse_integers
from sgdol.learners import Learner

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
    """The learner's state, per block."""
    alpha: Any
    """alpha of each block; 0 as long as its default, the first squared direction, has not been seen."""
    multiplier: Any
    """s_t = M eta_t of the last update, per block; before the first, the multiplier that it will use."""
    trace: Any
    """The momentum m_t, like the parameters (complex numbers as pairs); empty without momentum."""
    trace_weight: Any
    """The sum of the weights of the gradients in m_t, 1 - beta^t if beta stays the same; empty without momentum."""
    record: Any
    """What :func:`sgdol.jax.diagnostics` reads; empty with ``record=False``."""


class Core:
    """From gradients to s d; the base rate is only needed for the record."""

    def __init__(
        self,
        *,
        alpha: Any,
        kappa: Any,
        estimator: surrogate.Estimator,
        granularity: Granularity,
        param_labels: Any,
        momentum: Any,
        statistics: surrogate.MomentumStatistics,
        weight_decay: Any,
        learner: Learner | None,
        axis_name: Any,
        record: bool,
    ) -> None:
        if alpha is not None:
            check_number("alpha", alpha, lambda a: a > 0, "positive and finite, or None")
        check_number("kappa", kappa, lambda c: c > 0, "positive and finite")
        if alpha is not None and isinstance(kappa, Real) and kappa != 1:
            raise ValueError(
                f"give alpha or kappa, not both: got alpha={alpha!r} and kappa={kappa!r} "
                "(kappa is in units of the first squared direction)"
            )
        check_choice("estimator", estimator, surrogate.ESTIMATORS)
        check_choice("granularity", granularity, GRANULARITIES)
        check_choice("statistics", statistics, surrogate.MOMENTUM_STATISTICS)
        if momentum is not None:
            check_number("momentum", momentum, lambda beta: 0 <= beta < 1, "at least 0 and less than 1, or None")
        if weight_decay is not None:
            check_number("weight_decay", weight_decay, lambda decay: decay >= 0, "at least 0 and finite, or None")
        if (granularity == "group") != (param_labels is not None):
            raise ValueError(
                f'param_labels belongs to granularity="group", got granularity={granularity!r} and '
                f"param_labels={param_labels!r}"
            )
        if not isinstance(record, bool):
            raise TypeError(f"record must be True or False, got {record!r}")
        self._alpha = alpha
        self._kappa = kappa
        self._estimator = estimator
        self._granularity = granularity
        self._param_labels = param_labels
        self._momentum = momentum if is_given(momentum) else None
        self._statistics = statistics
        self._weight_decay = weight_decay if is_given(weight_decay) else None
        self._learner = learner_or_default(learner)
        self._axis_name = axis_name
        self._record = record

    def init(self, params: Any, rate: Any = 1.0) -> ScaleBySGDOLState:
        refuse_integers(params)
        blocks = self._blocks(params)
        zeros = blocks.zeros()
        states = [self._learner.initial(zero) for zero in zeros]
        alphas = [zero if self._alpha is None else zero + jnp.asarray(self._alpha, zero.dtype) for zero in zeros]
        with_momentum = self._momentum is not None
        state = ScaleBySGDOLState(
            count=jnp.zeros((), jnp.int32),
            pending=jnp.zeros((), bool),
            held=jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.result_type(p)), params),
            learner=blocks.pack_states(states, self._kind()),
            alpha=blocks.pack(alphas),
            multiplier=blocks.pack([self._learner.predict(s, a) for s, a in zip(states, alphas, strict=True)]),
            trace=jax.tree.map(lambda p: jnp.zeros_like(as_real(jnp.asarray(p))), params) if with_momentum else (),
            trace_weight=jnp.zeros((), blocks.dtype) if with_momentum else (),
            record=_record.empty(blocks, rate) if self._record else (),
        )
        # Each its own memory, as a learner may use one zero twice: nobody can donate the same buffer twice.
        return jax.tree.map(jnp.array, state)

    def update(
        self, updates: Any, state: ScaleBySGDOLState, params: Any, others: Any, rate: Any = 1.0
    ) -> tuple[Any, ScaleBySGDOLState]:
        if not jax.tree.leaves(state.held):  # a mask can leave nothing
            return updates, state
        self._refuse_another_configuration(state)
        if self._weight_decay is not None and params is None:
            raise ValueError("weight_decay needs the parameters: call update(grads, state, params)")
        found = gradients(updates, state.held, others, self._estimator, self._axis_name)
        scaled, completed = self._complete(found, state, params, rate)
        if found.partner is None:
            return scaled, completed
        # A gradient alone: it completes a pair, or is held.
        held = jax.tree.map(lambda g, h: g.astype(h.dtype), found.partner, state.held)
        holding = state._replace(pending=jnp.ones((), bool), held=held)
        nothing = jax.tree.map(jnp.zeros_like, scaled)
        return _select(state.pending, scaled, nothing), _select(state.pending, completed, holding)

    def _complete(
        self, found: Gradients, state: ScaleBySGDOLState, params: Any, rate: Any
    ) -> tuple[Any, ScaleBySGDOLState]:
        """One update from the k gradients stacked in every leaf."""
        blocks, kind = self._blocks(state.held), self._kind()
        leaves = jax.tree.leaves(found.stacked)
        tree: Any = jax.tree.structure(found.stacked)
        raw = drawn = draw(leaves, blocks, self._estimator, found.axis_name, found.devices)
        trace, weight = state.trace, state.trace_weight
        if self._momentum is not None:
            beta = jnp.asarray(self._momentum, blocks.dtype)
            weight = beta * state.trace_weight + (1 - beta)
            drawn, after = with_momentum(raw, blocks, tree.flatten_up_to(trace), weight, beta, self._statistics)
            trace = jax.tree.unflatten(tree, after)

        states, alphas = blocks.unpack_states(state.learner, kind), blocks.unpack(state.alpha)
        multipliers = [self._learner.predict(s, a) for s, a in zip(states, alphas, strict=True)]
        if self._alpha is None:
            alphas = self._first_alpha(alphas, drawn.n, blocks)
        observed = [
            self._learner.observe(s, m, u, n, a)
            for s, m, u, n, a in zip(states, multipliers, drawn.u, drawn.n, alphas, strict=True)
        ]
        new = ScaleBySGDOLState(
            count=optax.safe_increment(state.count),
            pending=jnp.zeros((), bool),
            held=jax.tree.map(jnp.zeros_like, state.held),
            learner=blocks.pack_states(observed, kind),
            alpha=blocks.pack(alphas),
            multiplier=blocks.pack(multipliers),
            trace=trace,
            trace_weight=weight,
            record=_record.after_update(state.record, blocks, drawn, raw, multipliers, rate) if self._record else (),
        )
        unchanged = state._replace(pending=new.pending, held=new.held)
        if self._record:
            unchanged = unchanged._replace(record=_record.after_skip(state.record))
        # Squares of a finite gradient may overflow, and one infinite sum would end the learning for ever.
        finite = jnp.isfinite(_record.total(raw.u) + _record.total(raw.n))
        moves = self._moves(blocks.spread(multipliers), drawn.directions, params, tree)
        values = [
            _like(move, jnp.result_type(leaf, held))
            for move, leaf, held in zip(moves, leaves, jax.tree.leaves(state.held), strict=True)
        ]
        updates = [jnp.where(finite, value, jnp.zeros_like(value)) for value in values]
        return jax.tree.unflatten(tree, updates), _select(finite, new, unchanged)

    def _moves(self, factors: list[Any], directions: list[Any], params: Any, tree: Any) -> list[jax.Array]:
        """S (d + weight_decay x) of each leaf."""
        if self._weight_decay is not None:
            decay = jnp.asarray(self._weight_decay)
            xs = [as_real(jnp.asarray(x)) for x in tree.flatten_up_to(params)]
            directions = [d + decay.astype(d.dtype) * x for d, x in zip(directions, xs, strict=True)]
        return [(s * d).astype(d.dtype) for s, d in zip(factors, directions, strict=True)]

    def _first_alpha(self, alphas: list[jax.Array], n: list[jax.Array], blocks: Blocks) -> list[jax.Array]:
        """The default alpha: kappa times the first non-zero squared direction, to each block its even share by size."""
        first = self._kappa * _record.total(n)
        unset = jnp.max(alphas[0]) == 0 if alphas[0].size else _record.total(alphas) == 0
        return [
            jnp.where(unset, jnp.broadcast_to((first * share).astype(a.dtype), a.shape), a)
            for a, share in zip(alphas, blocks.shares(), strict=True)
        ]

    def _refuse_another_configuration(self, state: ScaleBySGDOLState) -> None:
        parts = {"momentum": (state.trace_weight, self._momentum is not None), "record": (state.record, self._record)}
        for name, (part, wanted) in parts.items():
            there = not (isinstance(part, tuple) and len(part) == 0)
            if there != wanted:
                words = ("with", "without") if there else ("without", "with")
                raise ValueError(
                    f"state was made {words[0]} {name} and this optimizer is {words[1]}: init a state of its own"
                )

    def _blocks(self, params: Any) -> Blocks:
        return Blocks(self._granularity, params, self._param_labels)

    def _kind(self) -> Any:
        """The tree structure of the learner's state."""
        return jax.tree.structure(jax.eval_shape(lambda: self._learner.initial(jnp.zeros(()))))


def _like(move: jax.Array, dtype: Any) -> jax.Array:
    """A real move as an update of that type."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        move = jax.lax.complex(move[..., 0], move[..., 1])
    return move.astype(dtype)


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
