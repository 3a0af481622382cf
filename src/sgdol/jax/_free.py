r"""SGDOL without M as an optax gradient transformation: :mod:`sgdol.free` decides, here are the vectors.

It runs under ``jit``, ``scan`` and ``vmap``. The extra evaluations are rounds of one ``lax.while_loop``, so that they
cost nothing where they are not made; every other choice is a ``where``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sgdol import averaging as averages
from sgdol import free, metrics, probing
from sgdol.free import State
from sgdol.jax._averaging import PolynomialAverageState
from sgdol.jax._blocks import Blocks, add, dot, is_complex, numbers, total
from sgdol.jax._checks import check_number
from sgdol.jax._metric import Memory, Norm, choose_unit
from sgdol.metrics import Metric, is_scale_free

__all__ = ["SGDOLFreeState", "sgdol_free"]

Evaluate = Callable[[Any], tuple[jax.Array, Any]]

SMALLEST = 0.02
"""A multiplier below this looks like another optimizer's learning rate, as in PyTorch."""

_FIRST = (1.0, 0, 0, 0, *State())
"""unit, k, moved, left and the rule before the first update: the order and the kinds of the numbers of a state."""


class SGDOLFreeState(NamedTuple):
    """Everything that the optimizer remembers between two calls of ``update``."""

    numbers: jax.Array
    """``unit``, then the fields of ``rule`` that are real numbers."""
    counts: jax.Array
    """``gradients``, ``moved``, a checksum of the point where the last update ends, then the other fields of ``rule``.
    Few arrays, because each costs a compiled step some time."""
    trace: Any
    """The momentum m, of the shape of the parameters, in units of ``unit``."""
    metric: Any
    """What the metric remembers (:class:`sgdol.jax._metric.Memory`), of gradients in units of ``unit``."""
    average: PolynomialAverageState
    """The average, for :func:`sgdol.jax.averaged_params`."""
    previous: Any
    """The point before the last step."""

    @property
    def rule(self) -> State:
        """What has been learned; ``rule.step_size``, ``rule.smoothness`` and ``rule.evaluations`` are worth a look."""
        return _unpack(State(), (self.numbers[..., 1:], self.counts[..., 3:]))

    @property
    def unit(self) -> jax.Array:
        """1, or a power of two that brings the gradients into the range where their squares can be added."""
        return self.numbers[..., 0]

    @property
    def gradients(self) -> jax.Array:
        """K of the last update."""
        return self.counts[..., 0]

    @property
    def moved(self) -> jax.Array:
        """How many calls of ``update`` were given other parameters than the call before led to."""
        return self.counts[..., 1]


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


class _Norm(Norm):
    """The norm of this step, with the lengths that the rule asks for.

    Args:
        unit: of gradients.
        norm: as for :class:`sgdol.jax._metric.Norm`.
    """

    def __init__(self, unit: jax.Array, *norm: Any) -> None:
        super().__init__(*norm)
        self._unit = unit

    def gradient(self, g: list[jax.Array]) -> jax.Array:
        """||g||, in D^-1."""
        return self._unit * jnp.sqrt(dot(*self.factors(g), self._unit.dtype))

    def gradients(self, parts: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Of gradients along a new first axis, the norm of their sum and the root of the sum of their squared norms."""
        a, b = self.factors(parts, several=True)
        whole, squares = dot([add(v) for v in a], [add(v) for v in b], self._unit.dtype), dot(a, b, self._unit.dtype)
        return self._unit * jnp.sqrt(whole), self._unit * jnp.sqrt(squares)

    def along(self, g: list[jax.Array], s: list[jax.Array]) -> jax.Array:
        """<g, s> of a gradient and a difference of points: no metric is in that."""
        return self._unit * dot(g, s, self._unit.dtype)

    def length(self, s: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """||s|| of a difference of points, in D, and s/||s||; whatever its scale: in units of the largest entry."""
        top = jnp.max(jnp.stack([jnp.max(jnp.abs(v), initial=0.0).astype(self._unit.dtype) for v in s]))
        top = jnp.where(top > 0, top, 1.0)
        s = [v / top.astype(v.dtype) for v in s]
        length = jnp.sqrt(dot(s, self.flat(s), top.dtype))
        inverse = 1 / jnp.where(length > 0, length, 1.0)
        return top * length, [v * inverse.astype(v.dtype) for v in s]


def sgdol_free(
    learning_rate: Any = 1.0,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    averaging: float = 8.0,
    metric: str | Metric = "kronecker",
) -> optax.GradientTransformationExtraArgs:
    r"""SGDOL that needs neither a learning rate nor a smoothness constant. Experimental.

    See :class:`sgdol.SGDOLFree` and ``docs/explanation/without_smoothness.md`` for the algorithm. ``update`` takes the
    k >= 2 gradients of the parts of one batch, stacked along a new first axis of every leaf, the loss of the batch, and
    a function that evaluates the same batch elsewhere::

        evaluate = lambda p: microbatch_grads(loss, 2, value=True)(p, x, y)
        value, grads = evaluate(params)
        updates, state = optimizer.update(grads, state, params, value=value, value_and_grads=evaluate)

    Evaluate and save :func:`sgdol.jax.averaged_params`. It has to be the last of an ``optax.chain``, and nothing else
    may move the parameters: a step that is taken back ends at a point, and ``optax.scale(0.1)`` behind it would go a
    tenth of the way. ``learning_rate=0.1`` is what multiplies the steps. A compiled program cannot raise an error, so
    ``sgdol.jax.diagnostics(state)["moved"]`` counts the calls of ``update`` whose parameters were not those that the
    call before led to. It is 0 where nothing else moves the parameters. A projection after ``optax.apply_updates`` is
    counted as well; it does no harm, because curvatures are measured between the points where the gradients were.

    Args:
        learning_rate: a multiplier of the step size that is learned, at least 0, 1 as a rule; or an optax schedule of
            it, which counts the calls of ``update``. It changes nothing that is learned.
        momentum: beta, in [0, 1).
        weight_decay: decoupled, in units of the root mean square of the direction d over all coordinates: x <- x -
            eta (d + weight_decay rms(d) x). It means what it means in AdamW; usual values are 0.01 to 0.1.
        averaging: a of the polynomial average, at least 0.
        metric: ``"kronecker"``, ``"rms"``, ``"adagrad"``, ``"euclidean"``, or an object of :mod:`sgdol.metrics`.
            ``"kronecker"`` measures matrices and convolutions in the eigenbases of their rows and columns, and vectors
            and sides of more than 512 coordinate by coordinate, as ``"rms"`` does.

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
    if not callable(learning_rate):
        words = "finite and at least 0; 1 is the step size that is learned"
        learning_rate = check_number("learning_rate", learning_rate, lambda rate: rate >= 0, words)
        if isinstance(learning_rate, float | int) and 0 < learning_rate < SMALLEST:
            warnings.warn(
                f"learning_rate={learning_rate:g} looks like another optimizer's. In sgdol_free it is a factor on the "
                f"learned step size, so every step is {1 / learning_rate:,.0f} times too short: write sgdol_free()",
                stacklevel=2,
            )
    momentum = check_number("momentum", momentum, lambda beta: 0 <= beta < 1, "in [0, 1)")
    weight_decay = check_number("weight_decay", weight_decay, lambda decay: decay >= 0, "finite and at least 0")
    averaging = check_number("averaging", averaging, lambda power: power >= 0, "finite and at least 0")
    metric = metrics.get(metric)
    memory = Memory(metric)

    def init(params: Any) -> SGDOLFreeState:
        leaves, tree = jax.tree.flatten(params)
        if any(is_complex(leaf) for leaf in leaves):
            raise TypeError("complex parameters need optax.contrib.split_real_and_imaginary around this optimizer")
        blocks = Blocks("global", params)
        dtypes, kind = blocks.dtypes, blocks.dtype
        zeros = [jnp.zeros(jnp.shape(leaf), dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        state = SGDOLFreeState(
            *_pack(_FIRST, _FIRST, kind),
            trace=jax.tree.unflatten(tree, zeros),
            metric=memory.pack([metric.initial(zero) for zero in zeros], tree, dtypes),
            average=PolynomialAverageState(jax.tree.map(lambda p: jnp.asarray(p, _wide(p)), params)),
            previous=params,
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
                " (flax's TrainState does not pass these on)"
            )
        blocks = Blocks("global", params)
        leaves: list[Any] = jax.tree.leaves(params)
        tree, dtypes = blocks.tree, blocks.dtypes
        rule = state.rule._replace(evaluations=state.rule.evaluations + 1)
        k = _count(updates, params)

        def contributions(stacked: Any) -> list[jax.Array]:
            wide = [jnp.asarray(v, dtype) for v, dtype in zip(jax.tree.leaves(stacked), dtypes, strict=True)]
            return [v / k for v in blocks.join(wide)]

        parts = contributions(updates)
        mean = [add(v) for v in parts]
        kind = state.unit.dtype
        unit = jax.lax.cond(rule.updates == 0, lambda: choose_unit(mean, kind), lambda: state.unit)
        unit = jnp.where(unit > 0, unit, 1.0)
        remembered = memory.unpack(state.metric, tree, dtypes)
        norm = _Norm(unit, metric, remembered, _divided(mean, unit), blocks)

        def point(x: list[jax.Array], loss: Any, parts: list[jax.Array]) -> _Point:
            parts = _divided(parts, unit)
            loss, (length, squares) = jnp.asarray(loss, kind), norm.gradients(parts)
            finite = jnp.isfinite(loss) & jnp.isfinite(length) & jnp.isfinite(squares)
            return _Point(x, loss, [add(v) for v in parts], length, squares, finite)

        def evaluate(x: list[jax.Array]) -> _Point:
            x = [a.astype(p.dtype) for a, p in zip(x, leaves, strict=True)]
            loss, stacked = value_and_grads(jax.tree.unflatten(tree, x))
            return point(x, loss, contributions(stacked))

        leaves = [jnp.asarray(leaf) for leaf in leaves]
        moved = state.moved + ((state.rule.evaluations > 0) & (_checksum(leaves) != state.counts[..., 2]))
        now = point(leaves, value, parts)
        average, previous = (tree.flatten_up_to(t) for t in (state.average.average, state.previous))
        rule = free.judge_first(rule, jnp.where(now.finite, now.norm, jnp.nan))
        rule, now = _elsewhere(rule, now, average, previous, norm, unit, evaluate, blocks)

        # The step.
        go = now.finite & (rule.first_norm > 0)
        fresh = rule.momentum_weight == 0
        clipped = free.clipping(rule, now.norm, _usual(metric, remembered, norm, unit))
        # In a smaller unit, what is remembered in units is shorter. Some metrics may only see gradients as they are.
        smaller = rule.past if is_scale_free(metric) else jnp.ones_like(rule.past)
        g = [(clipped / smaller).astype(v.dtype) * v for v in now.g]
        old = blocks.join(tree.flatten_up_to(state.trace))
        kept = momentum * rule.past / smaller
        trace = [
            jnp.where(go, jnp.where(fresh, 0.0, kept.astype(v.dtype) * m) + (1 - momentum) * v, m)
            for m, v in zip(old, g, strict=True)
        ]
        # The old trace is read no more from here on, so that it can be overwritten if it is donated.
        trace = jax.lax.optimization_barrier(trace)
        weight = momentum * rule.momentum_weight + (1 - momentum)
        direction = norm.sharp(trace)
        length = smaller * norm.gradient(trace) / weight
        unit = smaller * unit
        rate = learning_rate(rule.updates + rule.skipped) if callable(learning_rate) else learning_rate
        tracked = free.track(rule, now.loss)._replace(momentum_weight=weight)
        new = free.choose_step(tracked, length, multiplier=jnp.asarray(rate, kind))
        new = free.observe(new, now.norm, now.squares, k, clipped)
        factor = new.step_size * new.multiplier / weight * unit
        rms = jnp.sqrt(dot(direction, direction, kind) / sum(v.size for v in direction))
        scale = 1 - weight_decay * factor * rms
        share = averages.weight(new.updates.astype(kind), averaging)
        averaged = [a + share * (x.astype(a.dtype) - a) for a, x in zip(average, now.x, strict=True)]
        like = functools.partial(jax.tree.unflatten, tree)
        momenta = like(blocks.split(trace))
        # After a skipped batch that was looked back at, the point is where it was before the call. What is added up is
        # what is returned: without the barrier it may be computed twice, and rounded in two ways.
        steps = jax.lax.optimization_barrier(
            [
                jnp.where(go, (scale * x.astype(d.dtype) - factor * d).astype(x.dtype) - p, jnp.zeros_like(p))
                for x, d, p in zip(now.x, blocks.split(direction), leaves, strict=True)
            ]
        )
        left = _checksum([p + step for p, step in zip(leaves, steps, strict=True)])
        stepped = SGDOLFreeState(
            *_pack((unit, k, moved, left, *new), _FIRST, kind),
            trace=momenta,
            metric=memory.pack(
                [metric.observe(s, v) for s, v in zip(remembered, blocks.split(g), strict=True)], tree, dtypes
            ),
            average=PolynomialAverageState(like(averaged)),
            previous=like(now.x),
        )
        rule = rule._replace(skipped=rule.skipped + ~now.finite)
        real, whole = _pack((state.unit, state.gradients, moved, left, *rule), _FIRST, kind)
        stayed = state._replace(numbers=real, counts=whole, trace=momenta)
        return like(steps), _select(go, stepped, stayed)

    return optax.GradientTransformationExtraArgs(init, update)


class _Search(NamedTuple):
    """Where the batch of a step is evaluated besides the present point, one place after the other."""

    stage: jax.Array
    """What is evaluated next: a probe along the first gradient (0), the average (1), the point before the last step
    (2), nothing (3)."""
    rule: Any
    """A ``State``, packed."""
    now: _Point
    bracket: Any
    """The search for a first M: a ``Bracket``, packed."""


def _elsewhere(
    rule: State,
    now: _Point,
    average: list[jax.Array],
    previous: list[jax.Array],
    norm: _Norm,
    unit: jax.Array,
    evaluate: Callable[[list[jax.Array]], _Point],
    blocks: Blocks,
) -> tuple[State, _Point]:
    """Probes at the first point, the guard on the loss and the look-back: the rule and the point that they leave.

    All three evaluate the batch at one other point and compare. They share one loop, because whatever calls
    ``value_and_grads`` once more in the program compiles the user's gradient once more.
    """
    kind = unit.dtype
    nothing = probing.Bracket(0.0)
    first = (rule.updates == 0) & now.finite & (now.norm > 0)
    first_norm = jnp.where(now.norm > 0, now.norm, 1.0)

    def wide(x: list[jax.Array]) -> list[jax.Array]:
        return [a.astype(dtype) for a, dtype in zip(x, blocks.dtypes, strict=True)]

    size = jax.lax.cond(first, lambda: norm.length(blocks.join(wide(now.x)))[0], lambda: jnp.ones((), kind))
    start = probing.first_probe(first_norm, size, now.loss)
    alarm = free.alarm(rule, now.loss)

    def wants_look_back(rule: State, now: _Point) -> tuple[State, jax.Array]:
        counted, looks = free.wants_look_back(rule, jnp.where(now.finite, now.norm, jnp.nan))
        return counted, jnp.where(looks, 2, 3)

    def body(c: _Search) -> _Search:
        rule, bracket, now = _unpack(State(), c.rule), _unpack(nothing, c.bracket), c.now
        rule = rule._replace(evaluations=rule.evaluations + 1)
        share = bracket.length / first_norm * unit
        towards = blocks.split(norm.sharp(now.g))
        points = zip(wide(now.x), towards, average, wide(previous), strict=True)
        there = evaluate(
            [
                jnp.where(c.stage == 0, x - share.astype(x.dtype) * d, jnp.where(c.stage == 1, a, p))
                for x, d, a, p in points
            ]
        )
        y = [a - b for a, b in zip(now.g, there.g, strict=True)]
        y_norm = norm.gradient(y)

        # A probe: M along the first gradient, by probes that get longer or shorter until one tells.
        probed = probing.next_probe(bracket, jnp.where(there.finite, y_norm / first_norm, jnp.inf))
        done = probed.told | (probed.count >= probing.DEFAULTS.probes)
        begun = free.begin(rule, probed.curvature * first_norm, first_norm)

        # The way from the other point to this one.
        s = blocks.join([a - b for a, b in zip(wide(now.x), wide(there.x), strict=True)])
        length, along = norm.length(s)
        y_along = jnp.where(now.finite, norm.along(y, along), jnp.nan)

        # The guard: the loss has jumped. Go back to the average if this batch is fine there.
        back = there.finite & free.confirms(rule, now.loss, there.loss)
        guarded, next_stage = wants_look_back(
            _select(back, free.roll_back(rule, y_along, y_norm, length), rule),
            now._replace(norm=jnp.where(back, there.norm, now.norm), finite=back | now.finite),
        )

        # The look-back: stay at the point before the last step if the step was too long.
        learned, rejected = free.look_back(rule, y_along, y_norm, length, norm.along(there.g, along))

        probes, guards = c.stage == 0, c.stage == 1
        kept = _pack(rule, State(), kind)
        probed_rule = _select(done, _pack(begun, State(), kind), kept)
        looked = _select(there.finite, _pack(learned, State(), kind), kept)
        return _Search(
            stage=jnp.where(probes, jnp.where(done, 3, 0), jnp.where(guards, next_stage, 3)),
            rule=_select(probes, probed_rule, _select(guards, _pack(guarded, State(), kind), looked)),
            now=_select(~probes & there.finite & jnp.where(guards, back, rejected), there, now),
            bracket=_select(probes, _pack(probed, nothing, kind), c.bracket),
        )

    counted, stage = wants_look_back(rule, now)
    stage = jnp.where(first, 0, jnp.where(alarm, 1, stage))
    since = jnp.where(alarm, rule.since, counted.since)
    begin = _Search(stage, _pack(counted._replace(since=since), State(), kind), now, _pack(start, nothing, kind))
    end = jax.lax.while_loop(lambda c: c.stage < 3, body, begin)
    return _unpack(State(), end.rule), end.now


def _usual(metric: Any, states: list[Any], norm: _Norm, unit: jax.Array) -> jax.Array | None:
    """The root of the mean of the past ||g||^2, all in this norm; None if the metric does not know it."""
    if norm.operators is None or not hasattr(metric, "past_square"):
        return None
    squares = [metric.past_square(s, d).astype(unit.dtype) for s, d in zip(states, norm.operators, strict=True)]
    return unit * jnp.sqrt(total(squares))


def _checksum(leaves: list[jax.Array]) -> jax.Array:
    """The sum of the bits of all entries as integers: the same in any order, and exact."""
    kinds = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int32}
    bits = [jax.lax.bitcast_convert_type(v, kinds[v.dtype.itemsize]) for v in leaves]
    return sum((jnp.sum(v, dtype=jnp.int32) for v in bits), jnp.zeros((), jnp.int32))


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


def _pack(values: Any, example: Any, kind: Any) -> tuple[jax.Array, jax.Array]:
    """The fields of a named tuple of numbers in two arrays: those that are real in the example, and the others."""
    real = [isinstance(v, float) for v in example]
    return (
        numbers([v for v, is_real in zip(values, real, strict=True) if is_real], kind),
        numbers([v for v, is_real in zip(values, real, strict=True) if not is_real], jnp.int32),
    )


def _unpack(example: Any, packed: tuple[jax.Array, jax.Array]) -> Any:
    """The named tuple again."""
    real, whole = (iter([array[..., i] for i in range(array.shape[-1])]) for array in packed)
    fields = [next(real if isinstance(v, float) else whole) for v in example]
    return type(example)(
        *(field > 0 if isinstance(v, bool) else field for v, field in zip(example, fields, strict=True))
    )


def _wide(leaf: Any) -> Any:
    return jnp.result_type(leaf, jnp.float32)
