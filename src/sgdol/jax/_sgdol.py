r"""SGDOL as an optax gradient transformation (Zhuang, Cutkosky and Orabona, ICML 2019).

The way is one way: independent gradients -> (d, u, n) by :mod:`sgdol.surrogate` -> multiplier s by a learner of
:mod:`sgdol.learners` -> update -lr s d. Blocks of coordinates that share a step size are a list of arrays: one scalar
(``"global"``), one scalar per leaf (``"tensor"``) or one array per leaf (``"coordinate"``), and everything after the
statistics is the same for the three.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from sgdol import surrogate
from sgdol.learners import FTRL, Learner

__all__ = ["GRANULARITIES", "Granularity", "ScaleBySGDOLState", "scale_by_sgdol", "sgdol"]

Granularity = Literal["global", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)


class ScaleBySGDOLState(NamedTuple):
    """Everything that SGDOL remembers between two calls of ``update``."""

    count: jax.Array  # type: ignore[assignment]  # optax's word for it; a tuple's method of that name is hidden
    """How many updates were made; a call that only holds a gradient is none."""
    pending: jax.Array
    """Whether a gradient is held and waits for its partner."""
    held: Any
    """The held gradient, of the shape of the parameters; zeros when nothing is pending."""
    learner: tuple[Any, ...]
    """The learner's state, for each block."""
    alpha: tuple[jax.Array, ...]
    """alpha of each block; 0 as long as its default, the first squared direction, has not been seen."""
    multiplier: tuple[jax.Array, ...]
    """s_t = M eta_t of the last update, for each block; before the first, the multiplier that it will use."""
    trace: Any
    """The momentum m_t, of the shape of the parameters; empty without momentum."""


def sgdol(
    learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    smoothness: float | jax.Array | None = None,
    alpha: float | jax.Array | None = None,
    estimator: surrogate.Estimator = "symmetric",
    granularity: Granularity = "global",
    momentum: float | jax.Array = 0.0,
    weight_decay: float | jax.Array = 0.0,
    learner: Learner | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic gradient descent whose step size is learned online.

    .. math:: x_{t+1} = x_t - \eta_t d_t, \qquad \eta_t = \mathrm{lr} \cdot \mathrm{clip}\!\left(
        \frac{\alpha + \sum_{j<t} u_j}{\alpha + \sum_{j<t} n_j}, 0, 2\right)

    See :func:`scale_by_sgdol` for how ``update`` gets its independent gradients and for the other arguments.

    Args:
        learning_rate: the base rate 1/M: half of the largest step size. A number, an array or a schedule.
        smoothness: M, instead of ``learning_rate``; give one of the two.
        alpha: how strongly to hold on to the base rate, in units of a squared gradient norm; None for the first
            squared direction.
        estimator: ``"symmetric"`` or ``"paper"`` (Algorithm 1 to the letter).
        granularity: ``"global"``, ``"tensor"`` or ``"coordinate"``.
        momentum: beta, in [0, 1).
        weight_decay: lambda of an l2 penalty lambda/2 ||x||^2 that is part of the objective; at least 0.
        learner: the online learner of the step size; None for FTRL, the paper's.

    >>> import jax.numpy as jnp
    >>> optimizer = sgdol(smoothness=4.0, alpha=1.0)
    >>> state = optimizer.init(jnp.zeros(1))
    >>> updates, state = optimizer.update(jnp.array([2.0]), state)  # the first gradient is held
    >>> bool(updates[0] == 0), bool(state[0].pending)
    (True, True)
    >>> updates, state = optimizer.update(jnp.array([4.0]), state)  # the second completes the pair
    >>> updates.tolist()
    [-0.75]
    >>> updates, state = optimizer.update(jnp.array([2.0]), state, others=jnp.array([4.0]))  # both in one call
    >>> round(float(updates[0]), 6)  # -1/4 * (1 + 8) / (1 + 9) * 3
    -0.675
    """
    if (learning_rate is None) == (smoothness is None):
        given = "neither" if learning_rate is None else f"{learning_rate!r} and {smoothness!r}"
        raise ValueError(f"give learning_rate or smoothness (1 / learning_rate), exactly one of the two, got {given}")
    if smoothness is not None:
        _check("smoothness", smoothness, lambda m: m > 0, "positive and finite")
        rate: optax.ScalarOrSchedule = 1.0 / smoothness
    else:
        if not callable(learning_rate):
            _check("learning_rate", learning_rate, lambda rate: rate > 0, "positive and finite")
        rate = learning_rate
    return optax.chain(
        scale_by_sgdol(
            alpha=alpha,
            estimator=estimator,
            granularity=granularity,
            momentum=momentum,
            weight_decay=weight_decay,
            learner=learner,
        ),
        optax.scale_by_learning_rate(rate),
    )


def scale_by_sgdol(
    *,
    alpha: float | jax.Array | None = None,
    estimator: surrogate.Estimator = "symmetric",
    granularity: Granularity = "global",
    momentum: float | jax.Array = 0.0,
    weight_decay: float | jax.Array = 0.0,
    learner: Learner | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Turn independent gradients at one point into :math:`s_t d_t`, direction times learned multiplier.

    ``update`` takes them in any of three ways:

    1. ``update(grads, state)``: calls alternate. The first holds its gradient and returns zeros, so that the parameters
       stay where they are; the second completes the pair. Two batches make one update, Algorithm 1's own protocol.
    2. ``update(grads, state, others=grads2)``: the pair in one call.
    3. ``update(stacked, state)``: k >= 2 gradients stacked along a new first axis of *every* leaf, which therefore has
       exactly one axis more than the parameter has, as :func:`sgdol.jax.microbatch_grads` makes them.

    The gradients of a pair must come from different samples: equal ones turn SGDOL into SGD with the step size 1/M.
    After way 2 or 3 moved the parameters, a gradient that was held before is out of date and is dropped.
    A gradient that is not finite is not counted: the update is zero and the sums stay as they were.

    Args:
        alpha: the regulariser's alpha in every block, positive; None for the first non-zero squared direction, of which
            each block gets its even share by size.
        estimator: ``"symmetric"``: d is the mean and u the mean of the cross products. ``"paper"``: d = ``grads`` (or
            the first of the stack) and u = <grads, others>.
        granularity: what shares a step size: ``"global"``, everything; ``"tensor"``, each leaf; ``"coordinate"``,
            nothing. For one step size per group of parameters, give each its own transformation with
            ``optax.multi_transform``.
        momentum: beta, in [0, 1): d is the bias-corrected exponential mean of the directions, and u its unbiased signal
            (:func:`sgdol.surrogate.momentum_signal`).
        weight_decay: lambda of an l2 penalty; needs ``params`` in ``update``.
        learner: an online learner of multipliers (:class:`sgdol.learners.Learner`); None for FTRL.
    """
    if alpha is not None:
        _check("alpha", alpha, lambda a: a > 0, "positive and finite, or None")
    _check("momentum", momentum, lambda beta: 0 <= beta < 1, "in [0, 1)")
    _check("weight_decay", weight_decay, lambda decay: decay >= 0, "finite and at least 0")
    if estimator not in surrogate.ESTIMATORS:
        raise ValueError(f"estimator must be one of {surrogate.ESTIMATORS}, got {estimator!r}")
    if granularity not in GRANULARITIES:
        hint = '; for "group", give each group its own sgdol with optax.multi_transform' * (granularity == "group")
        raise ValueError(f"granularity must be one of {GRANULARITIES}, got {granularity!r}{hint}")
    if learner is not None and not isinstance(learner, Learner):
        raise TypeError(f"learner must have initial, predict and observe (sgdol.learners), got {learner!r}")
    player: Learner = FTRL() if learner is None else learner
    with_momentum = not _is_number(momentum) or momentum != 0
    with_decay = not _is_number(weight_decay) or weight_decay != 0

    def init(params: Any) -> ScaleBySGDOLState:
        leaves = jax.tree.leaves(params)
        for leaf in leaves:
            if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
                raise TypeError("complex parameters need optax.contrib.split_real_and_imaginary around this optimizer")
        zeros = _zeros(leaves)
        states = tuple(player.initial(zero) for zero in zeros)
        alphas = tuple(zero if alpha is None else zero + alpha for zero in zeros)
        return ScaleBySGDOLState(
            count=jnp.zeros((), jnp.int32),
            pending=jnp.zeros((), bool),
            held=optax.tree.zeros_like(params),
            learner=states,
            alpha=alphas,
            multiplier=tuple(player.predict(s, a) for s, a in zip(states, alphas, strict=True)),
            trace=jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_wide(p)), params) if with_momentum else (),
        )

    def update(
        updates: Any, state: ScaleBySGDOLState, params: Any = None, *, others: Any = None, **extra: Any
    ) -> tuple[Any, ScaleBySGDOLState]:
        del extra
        if not jax.tree.leaves(state.held):  # a mask can leave nothing
            return updates, state
        stacked = _is_stacked(updates, state.held)
        if others is not None:
            if stacked or _is_stacked(others, state.held, "others"):
                raise ValueError("others completes one gradient: give either others or stacked gradients, not both")
            gradients = jax.tree.map(lambda a, b: jnp.stack([a, b]), updates, others)
        elif stacked:
            gradients = updates
        else:
            gradients = jax.tree.map(lambda a, b: jnp.stack([a, b]), state.held, updates)
        if with_decay:
            if params is None:
                raise ValueError("weight_decay needs the parameters: call update(grads, state, params)")
            gradients = jax.tree.map(lambda g, p: g + (weight_decay * p).astype(g.dtype), gradients, params)

        scaled, completed = complete(gradients, state)
        if others is not None or stacked:
            return scaled, completed
        arrived = _all_finite(updates)
        complete_now = state.pending & arrived
        hold_now = ~state.pending & arrived
        new = _select(complete_now, completed, state)
        return (
            _select(complete_now, scaled, optax.tree.zeros_like(scaled)),
            new._replace(
                pending=jnp.where(arrived, ~state.pending, state.pending),
                held=_select(hold_now, updates, new.held),
            ),
        )

    def complete(gradients: Any, state: ScaleBySGDOLState) -> tuple[Any, ScaleBySGDOLState]:
        """One update from the k gradients stacked in every leaf."""
        leaves, tree = jax.tree.flatten(gradients)
        wide = [leaf.astype(_wide(leaf)) for leaf in leaves]
        blocks: Literal["coordinate"] | None = "coordinate" if granularity == "coordinate" else None
        each = [surrogate.statistics(leaf, estimator=estimator, blocks=blocks) for leaf in wide]
        directions, us, ns = ([s.direction for s in each], [s.u for s in each], [s.n for s in each])
        trace = state.trace
        if with_momentum:
            correction = [1 - momentum ** (state.count.astype(d.dtype) + 1) for d in directions]
            before = jax.tree.leaves(state.trace)
            crosses = [m * g if blocks else jnp.sum(m * g) for m, g in zip(before, directions, strict=True)]
            us = [
                surrogate.momentum_signal(cross, u, momentum, c)
                for cross, u, c in zip(crosses, us, correction, strict=True)
            ]
            after = [momentum * m + (1 - momentum) * g for m, g in zip(before, directions, strict=True)]
            directions = [m / c for m, c in zip(after, correction, strict=True)]
            ns = [d * d if blocks else jnp.sum(d * d) for d in directions]
            trace = jax.tree.unflatten(tree, after)
        if granularity == "global":
            us, ns = [sum(us)], [sum(ns)]
        zeros = _zeros(directions)
        us = [u.astype(zero.dtype) for u, zero in zip(us, zeros, strict=True)]
        ns = [n.astype(zero.dtype) for n, zero in zip(ns, zeros, strict=True)]

        multipliers = [player.predict(s, a) for s, a in zip(state.learner, state.alpha, strict=True)]
        alphas = state.alpha if alpha is not None else _share(state.alpha, ns, [d.size for d in directions])
        new = ScaleBySGDOLState(
            count=optax.safe_increment(state.count),
            pending=jnp.zeros((), bool),
            held=optax.tree.zeros_like(state.held),
            learner=tuple(
                player.observe(s, m, u, n, a)
                for s, m, u, n, a in zip(state.learner, multipliers, us, ns, alphas, strict=True)
            ),
            alpha=tuple(alphas),
            multiplier=tuple(multipliers),
            trace=trace,
        )
        factors = multipliers * len(leaves) if granularity == "global" else multipliers
        scaled = [(m * d).astype(leaf.dtype) for m, d, leaf in zip(factors, directions, leaves, strict=True)]
        # Squares of a finite gradient may overflow, and one infinite sum would end the learning for ever.
        finite = jnp.isfinite(sum(jnp.sum(u) for u in us) + sum(jnp.sum(n) for n in ns))
        unchanged = state._replace(pending=new.pending, held=new.held)
        updates = jax.tree.unflatten(tree, [jnp.where(finite, leaf, jnp.zeros_like(leaf)) for leaf in scaled])
        return updates, _select(finite, new, unchanged)

    def _zeros(leaves: list[Any]) -> list[jax.Array]:
        """A zero for each block, in a type that sums can be kept in."""
        if granularity == "global":
            return [jnp.zeros((), jnp.result_type(jnp.float32, *(_wide(leaf) for leaf in leaves)))]
        return [jnp.zeros(() if granularity == "tensor" else jnp.shape(leaf), _wide(leaf)) for leaf in leaves]

    return optax.GradientTransformationExtraArgs(init, update)


def _share(alphas: tuple[jax.Array, ...], ns: list[jax.Array], sizes: list[int]) -> list[jax.Array]:
    """The default alpha: the first non-zero squared direction, to each block its even share by size."""
    total = sum(jnp.sum(n) for n in ns)
    unset = jnp.max(alphas[0]) == 0
    if len(ns) == 1 and ns[0].ndim == 0:
        shares = [jnp.ones(())]
    else:
        shares = [jnp.asarray(size if n.ndim == 0 else 1) / sum(sizes) for n, size in zip(ns, sizes, strict=True)]
    return [
        jnp.where(unset, jnp.broadcast_to((total * s).astype(a.dtype), a.shape), a)
        for a, s in zip(alphas, shares, strict=True)
    ]


def _is_stacked(gradients: Any, like: Any, name: str = "updates") -> bool:
    """Whether every leaf has one leading axis more than its parameter; an error for anything but all or none."""
    given: Any = jax.tree.structure(gradients)
    expected: Any = jax.tree.structure(like)
    if given != expected:
        raise ValueError(f"{name} must have the tree structure of the parameters, {expected}, got {given}")
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(like), strict=True)
    shapes = [(jnp.shape(gradient), jnp.shape(parameter)) for gradient, parameter in pairs]
    if all(g == p for g, p in shapes):
        return False
    counts = {g[0] for g, p in shapes if g[1:] == p and len(g) == len(p) + 1}
    if len(counts) == 1 and min(counts) >= 2 and all(g[1:] == p and len(g) == len(p) + 1 for g, p in shapes):
        return True
    raise ValueError(
        f"every leaf of {name} must have the shape of its parameter, or every leaf that shape after one new first axis "
        f"of the same length k >= 2; got (gradient, parameter) shapes {shapes}"
    )


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _all_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _wide(leaf: Any) -> Any:
    """The type to keep sums in: float32 or wider."""
    return jnp.result_type(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf), jnp.float32)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _check(name: str, value: Any, allowed: Any, words: str) -> None:
    """Refuse a bad number. Arrays are let through: under jit, vmap or inject_hyperparams their values are unknown."""
    if isinstance(value, jax.Array):
        return
    if not _is_number(value) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, {words}, got {value!r}")
    if not (math.isfinite(value) and allowed(value)):
        raise ValueError(f"{name} must be {words}, got {value!r}")
