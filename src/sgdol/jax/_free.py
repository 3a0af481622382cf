r"""SGDOL without M as an optax gradient transformation: :mod:`sgdol.free` decides, here are the vectors.

It runs under ``jit``, ``scan`` and ``vmap``. The extra evaluations are ``lax.cond``, so that they cost nothing where
they are not made; every other choice is a ``where``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sgdol import averaging as averages
from sgdol import free, metrics, probing
from sgdol.free import State
from sgdol.jax._averaging import PolynomialAverageState
from sgdol.jax._checks import check_number
from sgdol.jax._geometry import choose_unit
from sgdol.metrics import RMS, Means, Metric

__all__ = ["SGDOLFreeState", "sgdol_free"]

Evaluate = Callable[[Any], tuple[jax.Array, Any]]


class SGDOLFreeState(NamedTuple):
    """Everything that the optimizer remembers between two calls of ``update``."""

    rule: State
    """Numbers; ``rule.step_size``, ``rule.smoothness`` and ``rule.evaluations`` are worth a look."""
    trace: Any
    """The momentum m, of the shape of the parameters, in units of ``unit``."""
    metric: Any
    """What the metric remembers of each leaf, of gradients in units of ``unit``."""
    average: PolynomialAverageState
    """The average, for :func:`sgdol.jax.averaged_params`."""
    previous: Any
    """The point before the last step."""
    unit: jax.Array
    """1, or a power of two that brings the gradients into the range where their squares can be added."""
    gradients: jax.Array
    """K of the last update."""


class _Point(NamedTuple):
    """A point, and what this step's batch says there."""

    x: Any
    loss: jax.Array
    g: Any
    """The mean gradient, in units."""
    norm: jax.Array
    """||g|| in the metric..."""
    squares: jax.Array
    """...and the root of the sum of the squared norms of the k contributions to it."""
    finite: jax.Array


class _Norm:
    """The norm of this step: D of each leaf, from past gradients; without a past, from these."""

    def __init__(self, metric: Metric, states: list[Any], g: Any, unit: jax.Array, kind: Any) -> None:
        leaves = jax.tree.leaves(g)
        means = [metric.mean_square(state, leaf) for state, leaf in zip(states, leaves, strict=True)]
        sizes = [leaf.size for leaf in leaves]
        overall = sum(size * mean for size, mean in zip(sizes, means, strict=True)) / max(sum(sizes), 1)
        ones = [jnp.ones_like(leaf) for leaf in leaves]
        parts = zip(states, means, ones, strict=True)
        diagonal = [metric.flat(state, Means(mean, overall), one).astype(one.dtype) for state, mean, one in parts]
        self._diagonal = jax.tree.unflatten(jax.tree.structure(g), diagonal)
        self._unit = unit
        self._kind = kind
        self._past = states if isinstance(metric, RMS) else None

    def sharp(self, g: Any) -> Any:
        """From a gradient to a direction: D^-1 g; several gradients may lie along a new first axis."""
        return jax.tree.map(jnp.divide, g, self._diagonal)

    def gradient(self, g: Any) -> jax.Array:
        """||g||: in D^-1. Of several along a new first axis, the root of the sum of the squares."""
        return self._unit * jnp.sqrt(self._sum(jnp.multiply, g, self.sharp(g)))

    def usual(self) -> jax.Array | None:
        """The root of the mean of the past ||g||^2, all in this norm; None if the metric does not remember them."""
        if self._past is None:
            return None
        roots, weight = [past.root for past in self._past], self._past[0].weight if self._past else 1.0
        squares = self._sum(lambda v, d: v * v / d, roots, jax.tree.leaves(self._diagonal))
        return self._unit * jnp.sqrt(squares / jnp.where(weight > 0, weight, 1.0))

    def along(self, g: Any, s: Any) -> jax.Array:
        """<g, s> of a gradient and a difference of points."""
        return self._unit * self._sum(jnp.multiply, g, s)

    def length(self, s: Any) -> jax.Array:
        """||s|| of a difference of points: in D. Whatever its scale: in units of the largest entry."""
        largest = [jnp.max(jnp.abs(leaf), initial=0.0).astype(self._kind) for leaf in jax.tree.leaves(s)]
        top = jnp.max(jnp.stack(largest))
        unit = jnp.where(top > 0, top, 1.0)

        def squares(v: jax.Array, d: jax.Array) -> jax.Array:
            v = v / unit.astype(v.dtype)
            return v * v * d

        return unit * jnp.sqrt(self._sum(squares, s, self._diagonal))

    def _sum(self, terms: Callable[[jax.Array, jax.Array], jax.Array], a: Any, b: Any) -> jax.Array:
        sums = jax.tree.map(lambda x, y: jnp.sum(terms(x, y), dtype=self._kind), a, b)
        return sum(jax.tree.leaves(sums), jnp.zeros((), self._kind))


def sgdol_free(
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    averaging: float = 8.0,
    metric: str | Metric = "rms",
) -> optax.GradientTransformationExtraArgs:
    r"""SGDOL that needs neither a learning rate nor a smoothness constant. Experimental.

    See :class:`sgdol.SGDOLFree` and ``docs/without_smoothness.md`` for the algorithm. ``update`` takes the k >= 2
    gradients of the parts of one batch, stacked along a new first axis of every leaf, the loss of the batch, and a
    function that evaluates the same batch elsewhere::

        evaluate = lambda p: microbatch_grads(loss, 2, value=True)(p, x, y)
        value, grads = evaluate(params)
        updates, state = optimizer.update(grads, state, params, value=value, value_and_grads=evaluate)

    Evaluate and save :func:`sgdol.jax.averaged_params`.

    Args:
        momentum: beta, in [0, 1).
        weight_decay: decoupled, scaled by the step size.
        averaging: a of the polynomial average, at least 0.
        metric: ``"rms"``, ``"adagrad"``, ``"euclidean"``, or an object of :mod:`sgdol.metrics`.

    >>> import jax.numpy as jnp
    >>> from sgdol.jax import averaged_params, microbatch_grads
    >>> def loss(x, noise):
    ...     return jnp.sum(jnp.array([1.0, 10.0]) * x**2) / 2 + jnp.mean(noise @ x)
    >>> optimizer = sgdol_free()
    >>> x = jnp.array([3.0, -1.0])
    >>> state = optimizer.init(x)
    >>> @jax.jit
    ... def step(x, state, noise):
    ...     def evaluate(x):
    ...         return microbatch_grads(loss, 2, value=True)(x, noise)
    ...     value, grads = evaluate(x)
    ...     updates, state = optimizer.update(grads, state, x, value=value, value_and_grads=evaluate)
    ...     return optax.apply_updates(x, updates), state
    >>> for key in jax.random.split(jax.random.key(0), 200):
    ...     x, state = step(x, state, jax.random.normal(key, (4, 2)))
    >>> bool(jnp.linalg.norm(averaged_params(state, x)) < 0.2)
    True
    """
    momentum = check_number("momentum", momentum, lambda beta: 0 <= beta < 1, "in [0, 1)")
    weight_decay = check_number("weight_decay", weight_decay, lambda decay: decay >= 0, "finite and at least 0")
    averaging = check_number("averaging", averaging, lambda power: power >= 0, "finite and at least 0")
    metric = metrics.get(metric)

    def init(params: Any) -> SGDOLFreeState:
        leaves = jax.tree.leaves(params)
        for leaf in leaves:
            if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
                raise TypeError("complex parameters need optax.contrib.split_real_and_imaginary around this optimizer")
        kind = jnp.result_type(jnp.float32, *(_wide(leaf) for leaf in leaves))
        rule = _arrays(State(), kind)
        wide = jax.tree.map(lambda p: jnp.asarray(p, _wide(p)), params)
        remembered = [metric.initial(jnp.zeros_like(leaf)) for leaf in jax.tree.leaves(wide)]
        return SGDOLFreeState(
            rule=rule,
            trace=jax.tree.map(jnp.zeros_like, wide),
            metric=jax.tree.map(lambda v: jnp.asarray(v, getattr(v, "dtype", kind)), remembered),
            average=PolynomialAverageState(wide),
            previous=jax.tree.map(jnp.asarray, params),
            unit=jnp.ones((), kind),
            gradients=jnp.zeros((), jnp.int32),
        )

    def update(
        updates: Any,
        state: SGDOLFreeState,
        params: Any = None,
        *,
        value: Any = None,
        value_and_grads: Evaluate | None = None,
        **extra: Any,
    ) -> tuple[Any, SGDOLFreeState]:
        del extra
        if params is None or value is None or value_and_grads is None:
            raise ValueError(
                "sgdol_free evaluates the batch at an earlier point as well: call update(grads, state, params, "
                "value=loss, value_and_grads=f), f a function of the parameters that returns the loss and the gradients"
            )
        rule = state.rule._replace(evaluations=state.rule.evaluations + 1)
        k = _count(updates, params)
        mean = jax.tree.map(lambda v: jnp.sum(v.astype(_wide(v)), axis=0) / k, updates)
        unit = jnp.where(rule.updates == 0, choose_unit(jax.tree.leaves(mean), state.unit.dtype)[0], state.unit)
        norm = _Norm(metric, state.metric, _in_units(mean, unit), unit, unit.dtype)

        def point(x: Any, loss: Any, stacked: Any) -> _Point:
            parts = _in_units(jax.tree.map(lambda v: v.astype(_wide(v)) / k, stacked), unit)
            g = jax.tree.map(lambda v: jnp.sum(v, axis=0), parts)
            loss = jnp.asarray(loss, unit.dtype)
            length, squares = norm.gradient(g), norm.gradient(parts)
            return _Point(
                x, loss, g, length, squares, jnp.isfinite(loss) & jnp.isfinite(length) & jnp.isfinite(squares)
            )

        def evaluate(x: Any) -> _Point:
            x = jax.tree.map(lambda a, p: a.astype(p.dtype), x, params)
            return point(x, *value_and_grads(x))

        now = point(params, value, updates)
        rule = _first_point(rule, now, norm, unit, evaluate)
        rule, now = _guard(rule, now, state.average.average, evaluate)
        rule, now = _look_back(rule, now, state.previous, norm, evaluate)

        # The step.
        go = now.finite & (rule.first_norm > 0)
        fresh = rule.momentum_weight == 0
        clipped = free.clipping(rule, now.norm, norm.usual())
        g = jax.tree.map(lambda v: clipped.astype(v.dtype) * v, now.g)
        trace = jax.tree.map(
            lambda m, g: jnp.where(fresh, (1 - momentum) * g, m + (1 - momentum) * (g - m)), state.trace, g
        )
        weight = momentum * rule.momentum_weight + (1 - momentum)
        direction = norm.sharp(trace)
        length = norm.gradient(trace) / weight
        new = free.choose_step(free.track(rule, now.loss)._replace(momentum_weight=weight), length, weight_decay)
        new = free.observe(new, now.norm, now.squares, k, clipped)
        scale, factor = 1 - new.step_size * weight_decay, new.step_size / weight * unit
        x = jax.tree.map(lambda x, d: (scale * x.astype(d.dtype) - factor * d).astype(x.dtype), now.x, direction)
        share = averages.weight(new.updates.astype(unit.dtype), averaging)
        average = jax.tree.map(lambda a, x: a + share * (x.astype(a.dtype) - a), state.average.average, now.x)
        remembered = [metric.observe(s, leaf) for s, leaf in zip(state.metric, jax.tree.leaves(g), strict=True)]
        average = PolynomialAverageState(average)
        moved = SGDOLFreeState(new, trace, remembered, average, now.x, unit, jnp.asarray(k, jnp.int32))
        stayed = state._replace(rule=rule._replace(skipped=rule.skipped + ~now.finite))
        # After a skipped batch that was looked back at, the point is where it was before the call.
        x = _select(go, x, params)
        return jax.tree.map(jnp.subtract, x, params), _select(go, moved, stayed)

    return optax.GradientTransformationExtraArgs(init, update)


def _first_point(rule: State, now: _Point, norm: _Norm, unit: jax.Array, evaluate: Callable[[Any], _Point]) -> State:
    """M along the first gradient, by probes that get longer or shorter until one tells."""
    first = (rule.updates == 0) & now.finite & (now.norm > 0)
    length = jnp.where(now.norm > 0, now.norm, 1.0)
    direction = norm.sharp(now.g)

    def probe(bracket: probing.Bracket) -> probing.Bracket:
        share = bracket.length / length * unit
        there = evaluate(jax.tree.map(lambda x, d: x.astype(d.dtype) - share.astype(d.dtype) * d, now.x, direction))
        change = norm.gradient(jax.tree.map(jnp.subtract, there.g, now.g)) / length
        return _like(bracket, probing.next_probe(bracket, jnp.where(there.finite, change, jnp.inf)))

    def search() -> State:
        start = probing.first_probe(length, norm.length(now.x), now.loss)
        start = _arrays(start, unit.dtype)
        done = jax.lax.while_loop(lambda b: ~b.told & (b.count < probing.DEFAULTS.probes), probe, start)
        counted = rule._replace(evaluations=rule.evaluations + done.count)
        return _like(rule, free.begin(counted, done.curvature * length, length))

    return jax.lax.cond(first, search, lambda: rule)


def _guard(rule: State, now: _Point, average: Any, evaluate: Callable[[Any], _Point]) -> tuple[State, _Point]:
    """The loss has jumped: go back to the average if this batch is fine there."""
    alarm = free.alarm(rule, now.loss)
    there = jax.lax.cond(alarm, lambda: evaluate(average), lambda: now)
    rule = rule._replace(evaluations=rule.evaluations + alarm)
    back = alarm & there.finite & free.confirms(rule, now.loss, there.loss)
    return _select(back, free.roll_back(rule), rule), _select(back, there, now)


def _look_back(
    rule: State, now: _Point, previous: Any, norm: _Norm, evaluate: Callable[[Any], _Point]
) -> tuple[State, _Point]:
    """Evaluate this batch before the last step as well, and stay there if the step was too long."""
    rule, looks = free.wants_look_back(rule, jnp.where(now.finite, now.norm, jnp.nan))
    before = jax.lax.cond(looks, lambda: evaluate(previous), lambda: now)
    rule = rule._replace(evaluations=rule.evaluations + looks)
    s = jax.tree.map(lambda a, b, g: a.astype(g.dtype) - b.astype(g.dtype), now.x, before.x, now.g)
    y = jax.tree.map(jnp.subtract, now.g, before.g)
    length = norm.length(s)
    along = jax.tree.map(lambda v: v / jnp.where(length > 0, length, 1.0).astype(v.dtype), s)
    y_along = jnp.where(now.finite, norm.along(y, along), jnp.nan)
    learned, rejected = free.look_back(rule, y_along, norm.gradient(y), length, norm.along(before.g, along))
    looked = looks & before.finite
    return _select(looked, learned, rule), _select(looked & rejected, before, now)


def _in_units(tree: Any, unit: jax.Array) -> Any:
    return jax.tree.map(lambda v: v / unit.astype(v.dtype), tree)


def _count(stacked: Any, params: Any) -> int:
    pairs = list(zip(jax.tree.leaves(stacked), jax.tree.leaves(params), strict=True))
    shapes = [(jnp.shape(g), jnp.shape(p)) for g, p in pairs]
    counts = {g[0] if len(g) == len(p) + 1 and g[1:] == p else 1 for g, p in shapes}
    if len(counts) != 1 or min(counts) < 2:
        raise ValueError(
            "sgdol_free needs k >= 2 independent gradients, stacked along a new first axis of every leaf (see "
            f"microbatch_grads); got (gradient, parameter) shapes {shapes}"
        )
    return int(min(counts))


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b).astype(b.dtype), yes, no)


def _arrays(numbers: Any, kind: Any) -> Any:
    """Python's numbers as arrays, floats of this type."""
    kinds = {bool: jnp.bool_, int: jnp.int32}
    return jax.tree.map(lambda v: jnp.asarray(v, kinds.get(type(v), kind)), numbers)


def _like(old: Any, new: Any) -> Any:
    """The new values, in the types of the old ones."""
    return jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), old, new)


def _wide(leaf: Any) -> Any:
    return jnp.result_type(leaf, jnp.float32)
