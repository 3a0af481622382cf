r"""SGDOL without M as an optax gradient transformation: the algorithm of :mod:`sgdol.free`, without branches.

Whatever :mod:`sgdol.free` decides with ``if`` is a ``jnp.where`` here, so that it runs under ``jit``, ``scan`` and
``vmap``. Only the extra evaluations are real branches, ``lax.cond``, that cost nothing where they are not taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sgdol import surrogate
from sgdol.free import AIM, PROBED, Settings
from sgdol.jax._averaging import PolynomialAverageState
from sgdol.jax._checks import check_number

__all__ = ["SGDOLFreeState", "sgdol_free"]

PROBES = 8
"""How many points the first step may probe for a first M."""

Evaluate = Callable[[Any], tuple[jax.Array, Any]]


class Learned(NamedTuple):
    """What has been learned so far: the fields of :class:`sgdol.free.Rule`, as scalars."""

    updates: jax.Array
    signal: jax.Array
    noise: jax.Array
    signal_squares: jax.Array
    alpha: jax.Array
    momentum_weight: jax.Array
    curvature_squares: jax.Array
    curvature_weight: jax.Array
    norm_squares: jax.Array
    smoothness: jax.Array
    since: jax.Array
    penalty: jax.Array
    longest: jax.Array
    largest_gradient: jax.Array
    mean_loss: jax.Array
    loss_deviation: jax.Array
    first_loss: jax.Array
    late_loss: jax.Array
    later_half_loss: jax.Array
    step_size: jax.Array
    capped: jax.Array
    rejections: jax.Array
    rollbacks: jax.Array
    skipped: jax.Array
    evaluations: jax.Array


class SGDOLFreeState(NamedTuple):
    """Everything that the optimizer remembers between two calls of ``update``."""

    learned: Learned
    """Numbers; ``learned.step_size``, ``learned.smoothness`` and ``learned.evaluations`` are worth a look."""
    trace: Any
    """The momentum m, of the shape of the parameters."""
    average: PolynomialAverageState
    """The average, for :func:`sgdol.jax.averaged_params`."""


class _Point(NamedTuple):
    """A point, and what this step's batch says there."""

    x: Any
    loss: jax.Array
    g: Any
    u: jax.Array
    n: jax.Array
    finite: jax.Array


class _Probe(NamedTuple):
    """How far the search for a first M has come."""

    length: jax.Array
    smoothness: jax.Array
    told: jax.Array
    count: jax.Array  # type: ignore[assignment]


def sgdol_free(
    *,
    momentum: float = 0.9,
    averaging: float = 8.0,
    weight_decay: float = 0.0,
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
        averaging: a of the polynomial average, at least 0.
        weight_decay: decoupled, scaled by the step size.

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
    check_number("momentum", momentum, lambda beta: 0 <= beta < 1, "in [0, 1)")
    check_number("averaging", averaging, lambda power: power >= 0, "finite and at least 0")
    check_number("weight_decay", weight_decay, lambda decay: decay >= 0, "finite and at least 0")
    settings = Settings()

    def init(params: Any) -> SGDOLFreeState:
        leaves = jax.tree.leaves(params)
        for leaf in leaves:
            if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
                raise TypeError("complex parameters need optax.contrib.split_real_and_imaginary around this optimizer")
        zero = jnp.zeros((), jnp.result_type(jnp.float32, *(_wide(leaf) for leaf in leaves)))
        counts = {"updates", "since", "rejections", "rollbacks", "skipped", "evaluations"}
        start = {name: jnp.zeros((), jnp.int32) if name in counts else zero for name in Learned._fields}
        learned = Learned(**{**start, "penalty": zero + 1, "capped": jnp.zeros((), bool)})
        wide = jax.tree.map(lambda p: jnp.asarray(p, _wide(p)), params)
        return SGDOLFreeState(learned, jax.tree.map(jnp.zeros_like, wide), PolynomialAverageState(wide))

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
        r = state.learned
        kind = r.signal.dtype

        def point(x: Any, loss: Any, stacked: Any) -> _Point:
            k = _count(stacked, params)
            wide = jax.tree.map(lambda g: g.astype(_wide(g)), stacked)
            g = jax.tree.map(lambda v: jnp.sum(v, axis=0) / k, wide)
            n = _dot(g, g).astype(kind)
            u = surrogate.symmetric_signal(n, _dot(wide, wide).astype(kind) / k**2, k)
            loss = jnp.asarray(loss, kind)
            return _Point(x, loss, g, u, n, jnp.isfinite(loss) & jnp.isfinite(n) & jnp.isfinite(u))

        def evaluate(x: Any) -> _Point:
            x = jax.tree.map(lambda a, p: a.astype(p.dtype), x, params)
            return point(x, *value_and_grads(x))

        now = point(params, value, updates)
        m = state.trace
        average = state.average.average
        r = r._replace(evaluations=r.evaluations + 1)

        # The first point.
        first = (r.updates == 0) & now.finite & (now.n > 0)
        smoothness, probes = jax.lax.cond(
            first, lambda: _first_smoothness(now, evaluate), lambda: (r.smoothness, jnp.zeros((), jnp.int32))
        )
        r = r._replace(
            smoothness=smoothness,
            evaluations=r.evaluations + probes,
            curvature_squares=jnp.where(first, smoothness**2, r.curvature_squares),
            norm_squares=jnp.where(first, smoothness**2, r.norm_squares),
            curvature_weight=jnp.where(first, 1.0, r.curvature_weight),
            alpha=jnp.where(first, now.n, r.alpha),
        )

        # 1. The guard on the loss.
        progress = r.first_loss - r.mean_loss
        limit = jnp.maximum(4 * r.loss_deviation, 0.5 * progress)
        alarm = (r.updates >= 10) & (~jnp.isfinite(now.loss) | (now.loss - r.mean_loss > limit))
        there = jax.lax.cond(alarm, lambda: evaluate(average), lambda: now)
        limit = jnp.maximum(2 * r.loss_deviation, 0.25 * progress)
        back = alarm & there.finite & (~jnp.isfinite(now.loss) | (now.loss - there.loss > limit))
        now = _select(back, there, now)
        m = jax.tree.map(lambda v: jnp.where(back, 0, v), m)
        r = r._replace(
            penalty=jnp.where(back, 2 * r.penalty, r.penalty),
            longest=jnp.where(back, r.longest / 2, r.longest),
            since=jnp.where(back, 0, r.since) + 1,
            step_size=jnp.where(back, 0.0, r.step_size),
            momentum_weight=jnp.where(back, 0.0, r.momentum_weight),
            rollbacks=r.rollbacks + back,
            evaluations=r.evaluations + alarm,
        )

        # 2. The look-back.
        usual = now.finite & (jnp.sqrt(now.n) <= settings.jump * r.largest_gradient)
        due = (r.since >= settings.interval) | (r.updates <= settings.warm) | r.capped | ~usual
        looks = (r.step_size > 0) & due
        scale = 1 - r.step_size * weight_decay
        factor = r.step_size / jnp.where(r.momentum_weight > 0, r.momentum_weight, 1.0)

        def step_back() -> _Point:
            return evaluate(jax.tree.map(lambda x, v: (x.astype(v.dtype) + factor * v) / scale, now.x, m))

        before = jax.lax.cond(looks, step_back, lambda: now)
        looked = looks & before.finite
        s = jax.tree.map(lambda a, b, v: a.astype(v.dtype) - b.astype(v.dtype), now.x, before.x, m)
        y = jax.tree.map(jnp.subtract, now.g, before.g)
        ss, ys, yy, qs = (a.astype(kind) for a in (_dot(s, s), _dot(y, s), _dot(y, y), _dot(before.g, s)))
        moved = looked & (ss > 0)
        over = jnp.where(moved, ss, 1.0)
        curvature = jnp.where(now.finite, ys / over, 4 * r.smoothness)
        bad = moved & (~now.finite | ((curvature * ss > settings.rejection * jnp.abs(qs)) & (curvature > r.smoothness)))
        good = moved & ~bad
        kept = jnp.where(r.updates <= settings.warm, settings.warm_memory, settings.memory**settings.interval)
        lowered = jnp.minimum(curvature, settings.lesson * r.smoothness)
        squares = kept * r.curvature_squares + curvature**2
        norms = kept * r.norm_squares + yy / over
        weight = kept * r.curvature_weight + 1
        measured = jnp.sqrt(jnp.maximum(squares, 1e-6 * norms) / weight)
        measured = jnp.where(measured > 0, measured, r.smoothness)
        pick = lambda a, b, c: jnp.where(bad, a, jnp.where(good, b, c))  # noqa: E731
        r = r._replace(
            since=jnp.where(looked, 0, r.since),
            longest=jnp.where(bad, jnp.minimum(r.longest, jnp.sqrt(ss) / 2), r.longest),
            curvature_squares=pick(lowered**2, squares, r.curvature_squares),
            norm_squares=pick(lowered**2, norms, r.norm_squares),
            curvature_weight=pick(1.0, weight, r.curvature_weight),
            smoothness=pick(lowered, measured, r.smoothness),
            rejections=r.rejections + bad,
            evaluations=r.evaluations + looks,
        )
        now = _select(bad, before, now)

        # 3. The step.
        start = r.updates == 0
        go = now.finite & (r.alpha > 0)
        error = jnp.abs(now.loss - r.mean_loss)
        deviation = jnp.where(
            r.loss_deviation == 0,
            error,
            r.loss_deviation + 0.1 * (jnp.minimum(error, 4 * r.loss_deviation) - r.loss_deviation),
        )
        mean = jnp.where(start, now.loss, r.mean_loss + 0.1 * (now.loss - r.mean_loss))
        top = jnp.where(start, now.loss, jnp.where(r.updates < 10, jnp.maximum(r.first_loss, mean), r.first_loss))
        m_new = jax.tree.map(lambda v, g: v + (1 - momentum) * (g - v), m, now.g)
        weight = momentum * r.momentum_weight + (1 - momentum)
        length = jnp.sqrt(_dot(m_new, m_new).astype(kind)) / weight
        t = r.updates.astype(kind)
        late = r.late_loss + 9 / (t + 9) * (now.loss - r.late_loss)
        later = r.later_half_loss + 3 / (t + 3) * (now.loss - r.later_half_loss)
        ahead = top > late
        falling = jnp.where(ahead, jnp.clip((later - late) / jnp.where(ahead, top - late, 1.0) / 0.15, 0.0, 1.0), 0.0)
        alpha = settings.kappa * r.alpha
        gain = jnp.maximum(alpha + r.signal, settings.floor * jnp.sqrt(r.signal_squares))
        charge = settings.charge * (1 - settings.waiver * falling)
        cost = alpha + jnp.maximum(r.signal, 0) / settings.largest + charge * jnp.maximum(r.noise, 0)
        eta = gain / ((r.smoothness + weight_decay) * cost) / r.penalty
        longest = jnp.where(start, settings.probe * eta * length / settings.growth, r.longest)
        capped = eta * length > settings.growth * longest
        eta = jnp.where(capped, settings.growth * longest / length, eta)
        new = r._replace(
            updates=r.updates + 1,
            signal=r.signal + now.u,
            noise=r.noise + (now.n - now.u),
            signal_squares=r.signal_squares + now.u**2,
            momentum_weight=weight,
            penalty=jnp.maximum(1.0, settings.decay * r.penalty),
            longest=jnp.maximum(longest, eta * length),
            largest_gradient=jnp.maximum(jnp.sqrt(now.n), 0.95 * r.largest_gradient),
            mean_loss=mean,
            loss_deviation=jnp.where(start, 0.0, deviation),
            first_loss=top,
            late_loss=late,
            later_half_loss=later,
            step_size=eta,
            capped=capped,
        )
        moved_to = jax.tree.map(
            lambda x, v: (x.astype(v.dtype) * (1 - eta * weight_decay) - eta / weight * v).astype(x.dtype), now.x, m_new
        )
        share = jnp.minimum(1.0, (averaging + 1) / (new.updates.astype(kind) + averaging))
        averaged = jax.tree.map(lambda a, x: a + (share * (x.astype(a.dtype) - a)).astype(a.dtype), average, now.x)
        r = _select(go, new, r._replace(skipped=r.skipped + ~now.finite))
        x = _select(go, moved_to, params)
        return (
            jax.tree.map(jnp.subtract, x, params),
            SGDOLFreeState(r, _select(go, m_new, m), PolynomialAverageState(_select(go, averaged, average))),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _first_smoothness(now: _Point, evaluate: Callable[[Any], _Point]) -> tuple[jax.Array, jax.Array]:
    """M along the first gradient, by probes that get longer or shorter until one tells; and how many there were."""
    norm = jnp.sqrt(now.n)
    size = jnp.sqrt(_dot(now.x, now.x).astype(now.n.dtype))
    length = jnp.where(size > 0, size / 64, jnp.where(now.loss != 0, jnp.abs(now.loss) / norm / 8, 1.0))

    def probe(carry: _Probe) -> _Probe:
        length = carry.length
        there = evaluate(
            jax.tree.map(lambda x, g: x.astype(g.dtype) - (length / norm).astype(g.dtype) * g, now.x, now.g)
        )
        y = jax.tree.map(jnp.subtract, there.g, now.g)
        change = jnp.sqrt(_dot(y, y).astype(norm.dtype)) / norm
        told = there.finite & (change >= PROBED[0]) & (change <= PROBED[1])
        share = jnp.where(told, change, jnp.where(there.finite, jnp.maximum(change, PROBED[0]), 1.0))
        factor = jnp.where(change > 0, jnp.clip(AIM / jnp.where(change > 0, change, 1.0), 1 / 64, 64.0), 64.0)
        longer = length * jnp.where(there.finite, factor, 1 / 64)
        return _Probe(longer, share * norm / length, told, carry.count + 1)

    start = _Probe(length, jnp.zeros_like(length), jnp.zeros((), bool), jnp.zeros((), jnp.int32))
    done = jax.lax.while_loop(lambda c: ~c.told & (c.count < PROBES), probe, start)
    return done.smoothness, done.count


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


def _dot(a: Any, b: Any) -> jax.Array:
    return sum(jnp.sum(x * y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))  # type: ignore[return-value]


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _wide(leaf: Any) -> Any:
    return jnp.result_type(leaf, jnp.float32)
