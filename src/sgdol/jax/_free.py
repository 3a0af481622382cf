r"""SGDOL without M as an optax gradient transformation: :mod:`sgdol.free` decides, here are the vectors.

It runs under ``jit``, ``scan`` and ``vmap``. The extra evaluations are rounds of one ``lax.while_loop``, so that they
cost nothing where they are not made; every other choice is a ``where``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sgdol import averaging as averages
from sgdol import free, metrics, probing
from sgdol.free import State
from sgdol.jax._averaging import PolynomialAverageState
from sgdol.jax._blocks import add, dot, is_complex, total
from sgdol.jax._checks import check_number
from sgdol.jax._metric import Memory, choose_unit, operators, sharp
from sgdol.metrics import Metric, Operator

__all__ = ["SGDOLFreeState", "sgdol_free"]

Evaluate = Callable[[Any], tuple[jax.Array, Any]]


class SGDOLFreeState(NamedTuple):
    """Everything that the optimizer remembers between two calls of ``update``."""

    rule: State
    """Numbers; ``rule.step_size``, ``rule.smoothness`` and ``rule.evaluations`` are worth a look."""
    trace: Any
    """The momentum m, of the shape of the parameters, in units of ``unit``."""
    metric: Any
    """What the metric remembers (:class:`sgdol.jax._metric.Memory`), of gradients in units of ``unit``."""
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

    x: list[jax.Array]
    loss: jax.Array
    g: list[jax.Array]
    """The mean gradient, in units."""
    norm: jax.Array
    """||g|| in the metric..."""
    squares: jax.Array
    """...and the root of the sum of the squared norms of the k contributions to it."""
    finite: jax.Array


class _Norm:
    """The norm of this step.

    Args:
        D: of each leaf.
        unit: of gradients.
    """

    def __init__(self, D: list[Operator], unit: jax.Array) -> None:
        self.D = D
        self._unit = unit

    def gradient(self, g: list[jax.Array]) -> jax.Array:
        """||g||, in D^-1."""
        return self._unit * jnp.sqrt(dot(g, sharp(self.D, g), self._unit.dtype))

    def gradients(self, parts: list[jax.Array]) -> jax.Array:
        """The root of the sum of the squares of several gradients along a new first axis."""
        turned = [jax.vmap(D.sharp)(v).astype(v.dtype) for D, v in zip(self.D, parts, strict=True)]
        return self._unit * jnp.sqrt(dot(parts, turned, self._unit.dtype))

    def along(self, g: list[jax.Array], s: list[jax.Array]) -> jax.Array:
        """<g, s> of a gradient and a difference of points: no metric is in that."""
        return self._unit * dot(g, s, self._unit.dtype)

    def length(self, s: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """||s|| of a difference of points, in D, and s/||s||; whatever its scale: in units of the largest entry."""
        top = jnp.max(jnp.stack([jnp.max(jnp.abs(v), initial=0.0).astype(self._unit.dtype) for v in s]))
        top = jnp.where(top > 0, top, 1.0)
        s = [v / top.astype(v.dtype) for v in s]
        length = jnp.sqrt(dot(s, [D.flat(v).astype(v.dtype) for D, v in zip(self.D, s, strict=True)], top.dtype))
        inverse = 1 / jnp.where(length > 0, length, 1.0)
        return top * length, [v * inverse.astype(v.dtype) for v in s]


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
        metric: ``"rms"``, ``"adagrad"``, ``"euclidean"``, ``"kronecker"``, or an object of :mod:`sgdol.metrics`.

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
    memory = Memory(metric)

    def init(params: Any) -> SGDOLFreeState:
        leaves: list[Any] = jax.tree.leaves(params)
        tree: Any = jax.tree.structure(params)
        if any(is_complex(leaf) for leaf in leaves):
            raise TypeError("complex parameters need optax.contrib.split_real_and_imaginary around this optimizer")
        dtypes = [_wide(leaf) for leaf in leaves]
        kind = jnp.result_type(jnp.float32, *dtypes)
        zeros = [jnp.zeros(jnp.shape(leaf), dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        state = SGDOLFreeState(
            rule=_arrays(State(), kind),
            trace=jax.tree.unflatten(tree, zeros),
            metric=memory.pack([metric.initial(zero) for zero in zeros], tree, dtypes),
            average=PolynomialAverageState(jax.tree.map(lambda p: jnp.asarray(p, _wide(p)), params)),
            previous=params,
            unit=jnp.ones((), kind),
            gradients=jnp.zeros((), jnp.int32),
        )
        return jax.tree.map(jnp.array, state)  # its own memory, so that parameters and state can both be donated

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
        leaves: list[Any] = jax.tree.leaves(params)
        tree: Any = jax.tree.structure(params)
        dtypes = [_wide(leaf) for leaf in leaves]
        rule = state.rule._replace(evaluations=state.rule.evaluations + 1)
        k = _count(updates, params)

        def contributions(stacked: Any) -> list[jax.Array]:
            return [jnp.asarray(v, dtype) / k for v, dtype in zip(jax.tree.leaves(stacked), dtypes, strict=True)]

        parts = contributions(updates)
        mean = [add(v) for v in parts]
        kind = state.unit.dtype
        unit = jax.lax.cond(rule.updates == 0, lambda: choose_unit(mean, kind)[0], lambda: state.unit)
        remembered = memory.unpack(state.metric, tree, dtypes)
        D = operators(metric, remembered, _divided(mean, unit))
        norm = _Norm(D, unit)

        def point(x: list[jax.Array], loss: Any, parts: list[jax.Array]) -> _Point:
            parts = _divided(parts, unit)
            g = [add(v) for v in parts]
            loss, length, squares = jnp.asarray(loss, kind), norm.gradient(g), norm.gradients(parts)
            finite = jnp.isfinite(loss) & jnp.isfinite(length) & jnp.isfinite(squares)
            return _Point(x, loss, g, length, squares, finite)

        def evaluate(x: list[jax.Array]) -> _Point:
            x = [a.astype(p.dtype) for a, p in zip(x, leaves, strict=True)]
            loss, stacked = value_and_grads(jax.tree.unflatten(tree, x))
            return point(x, loss, contributions(stacked))

        leaves = [jnp.asarray(leaf) for leaf in leaves]
        now = point(leaves, value, parts)
        average, previous = (tree.flatten_up_to(t) for t in (state.average.average, state.previous))
        rule, now = _elsewhere(rule, now, average, previous, norm, unit, evaluate)

        # The step.
        go = now.finite & (rule.first_norm > 0)
        fresh = rule.momentum_weight == 0
        clipped = free.clipping(rule, now.norm, _usual(metric, remembered, D, unit))
        g = [clipped.astype(v.dtype) * v for v in now.g]
        pairs = zip(tree.flatten_up_to(state.trace), g, strict=True)
        trace = [jnp.where(fresh, (1 - momentum) * g, m + (1 - momentum) * (g - m)) for m, g in pairs]
        weight = momentum * rule.momentum_weight + (1 - momentum)
        direction = sharp(D, trace)
        length = norm.gradient(trace) / weight
        new = free.choose_step(free.track(rule, now.loss)._replace(momentum_weight=weight), length, weight_decay)
        new = free.observe(new, now.norm, now.squares, k, clipped)
        scale, factor = 1 - new.step_size * weight_decay, new.step_size / weight * unit
        share = averages.weight(new.updates.astype(kind), averaging)
        averaged = [a + share * (x.astype(a.dtype) - a) for a, x in zip(average, now.x, strict=True)]
        like = functools.partial(jax.tree.unflatten, tree)
        moved = SGDOLFreeState(
            rule=new,
            trace=like(trace),
            metric=memory.pack([metric.observe(s, v) for s, v in zip(remembered, g, strict=True)], tree, dtypes),
            average=PolynomialAverageState(like(averaged)),
            previous=like(now.x),
            unit=unit,
            gradients=jnp.asarray(k, jnp.int32),
        )
        stayed = state._replace(rule=rule._replace(skipped=rule.skipped + ~now.finite))
        # After a skipped batch that was looked back at, the point is where it was before the call.
        steps = [
            jnp.where(go, (scale * x.astype(d.dtype) - factor * d).astype(x.dtype) - p, jnp.zeros_like(p))
            for x, d, p in zip(now.x, direction, leaves, strict=True)
        ]
        return like(steps), _select(go, moved, stayed)

    return optax.GradientTransformationExtraArgs(init, update)


class _Search(NamedTuple):
    """Where the batch of a step is evaluated besides the present point, one place after the other."""

    stage: jax.Array
    """What is evaluated next: a probe along the first gradient (0), the average (1), the point before the last step
    (2), nothing (3)."""
    rule: State
    now: _Point
    bracket: probing.Bracket
    """The search for a first M."""


def _elsewhere(
    rule: State,
    now: _Point,
    average: list[jax.Array],
    previous: list[jax.Array],
    norm: _Norm,
    unit: jax.Array,
    evaluate: Callable[[list[jax.Array]], _Point],
) -> tuple[State, _Point]:
    """Probes at the first point, the guard on the loss and the look-back: the rule and the point that they leave.

    All three evaluate the batch at one other point and compare. They share one loop, because whatever calls
    ``value_and_grads`` once more in the program compiles the user's gradient once more.
    """
    first = (rule.updates == 0) & now.finite & (now.norm > 0)
    first_norm = jnp.where(now.norm > 0, now.norm, 1.0)
    direction = sharp(norm.D, now.g)
    size, _ = norm.length([x.astype(g.dtype) for x, g in zip(now.x, now.g, strict=True)])
    start = _arrays(probing.first_probe(first_norm, size, now.loss), unit.dtype)
    alarm = free.alarm(rule, now.loss)

    def wants_look_back(rule: State, now: _Point) -> tuple[State, jax.Array]:
        counted, looks = free.wants_look_back(rule, jnp.where(now.finite, now.norm, jnp.nan))
        return _like(rule, counted), jnp.where(looks, 2, 3)

    def body(c: _Search) -> _Search:
        rule, now, bracket = c.rule._replace(evaluations=c.rule.evaluations + 1), c.now, c.bracket
        share = bracket.length / first_norm * unit
        points = zip(now.x, direction, average, previous, strict=True)
        there = evaluate(
            [
                jnp.where(
                    c.stage == 0,
                    x.astype(d.dtype) - share.astype(d.dtype) * d,
                    jnp.where(c.stage == 1, a, p.astype(a.dtype)),
                )
                for x, d, a, p in points
            ]
        )
        y = [a - b for a, b in zip(now.g, there.g, strict=True)]
        y_norm = norm.gradient(y)

        # A probe: M along the first gradient, by probes that get longer or shorter until one tells.
        probed = _like(bracket, probing.next_probe(bracket, jnp.where(there.finite, y_norm / first_norm, jnp.inf)))
        done = probed.told | (probed.count >= probing.DEFAULTS.probes)
        begun = _select(done, free.begin(rule, probed.curvature * first_norm, first_norm), rule)

        # The guard: the loss has jumped. Go back to the average if this batch is fine there.
        back = there.finite & free.confirms(rule, now.loss, there.loss)
        guarded, next_stage = wants_look_back(
            _select(back, free.roll_back(rule), rule),
            now._replace(norm=jnp.where(back, there.norm, now.norm), finite=back | now.finite),
        )

        # The look-back: stay at the point before the last step if the step was too long.
        s = [a.astype(g.dtype) - b.astype(g.dtype) for a, b, g in zip(now.x, there.x, now.g, strict=True)]
        length, along = norm.length(s)
        y_along = jnp.where(now.finite, norm.along(y, along), jnp.nan)
        learned, rejected = free.look_back(rule, y_along, y_norm, length, norm.along(there.g, along))
        looked = _select(there.finite, learned, rule)

        probes, guards = c.stage == 0, c.stage == 1
        return _Search(
            stage=jnp.where(probes, jnp.where(done, 3, 0), jnp.where(guards, next_stage, 3)),
            rule=_select(probes, begun, _select(guards, guarded, looked)),
            now=_select(~probes & there.finite & jnp.where(guards, back, rejected), there, now),
            bracket=_select(probes, probed, bracket),
        )

    counted, stage = wants_look_back(rule, now)
    stage = jnp.where(first, 0, jnp.where(alarm, 1, stage))
    begin = _Search(stage, _select(alarm, rule, counted), now, start)
    end = jax.lax.while_loop(lambda c: c.stage < 3, body, begin)
    return end.rule, end.now


def _usual(metric: Any, states: list[Any], D: list[Operator], unit: jax.Array) -> jax.Array | None:
    """The root of the mean of the past ||g||^2, all in this norm; None if the metric does not know it."""
    if not hasattr(metric, "past_square"):
        return None
    squares = [metric.past_square(s, d).astype(unit.dtype) for s, d in zip(states, D, strict=True)]
    return unit * jnp.sqrt(total(squares))


def _divided(leaves: list[jax.Array], unit: jax.Array) -> list[jax.Array]:
    return [v / unit.astype(v.dtype) for v in leaves]


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
