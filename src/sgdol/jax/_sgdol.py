r"""SGDOL as an optax gradient transformation (Zhuang, Cutkosky and Orabona, ICML 2019).

The way is one way, and ``Core.update`` in ``_core`` is its text: independent gradients (``_sources``) -> metric
(``_metric``) and momentum -> (d, u, n) of every block (``_blocks``) -> multiplier s by a learner -> the update
-lr s d/(1 - beta).
"""

from __future__ import annotations

from typing import Any

import optax

from sgdol.jax import _averaging
from sgdol.jax._core import Core, ScaleBySGDOLState
from sgdol.jax._options import Options, Scaling, takes

__all__ = ["scale_by_sgdol", "sgdol"]


@takes(Options)
def sgdol(options: Options) -> optax.GradientTransformationExtraArgs:  # noqa: D417  # the fields are described
    r"""SGD with momentum that learns its step size online.

    .. math:: x_{t+1} = x_t - \eta_t d_t, \qquad \eta_t = \frac{\mathrm{lr}}{1 - \beta} s_t, \qquad
        \frac{\mathrm{lr}}{1 - \beta} = \frac1M.

    By default it is ``optax.sgd(lr, momentum)`` with a multiplier s <= 1, which falls if the curvature measured along
    the steps shows that they are too long (:class:`sgdol.learners.MeasuredCurvature`; there is no convergence proof for
    it). The paper's algorithm, which has one, is ``sgdol(smoothness=M, **sgdol.PAPER)``:

    .. math:: s_t = \mathrm{clip}\!\left(
        \frac{\alpha + \sum_{j<t} u_j}{\alpha + \sum_{j<t} n_j}, 0, 2\right).

    See :func:`scale_by_sgdol` for how ``update`` gets its independent gradients and for the other arguments.

    Args:
        learning_rate: the rate of ``optax.sgd`` with the same momentum. The step size starts there and never exceeds it
            (with the paper's learner it may double). A number, an array or a schedule, which is a function of the
            number of calls of ``update``, those that only hold a gradient included.
        smoothness: M, instead of ``learning_rate``, which is then (1 - momentum)/M; give one of the two.
        alpha: how strongly the step size is kept at the learning rate at first, in units of a squared gradient norm, in
            each block; None for kappa times the first squared gradient.
        kappa: see alpha; positive; None for 10 with a learner that uses hindsight, else 1.
        estimator: ``"symmetric"`` or ``"paper"`` (Algorithm 1 to the letter).
        granularity: ``"global"``, ``"group"``, ``"tensor"`` or ``"coordinate"``.
        momentum: beta, in [0, 1); None for none. d_t is the average of the gradients with these weights, (1 - beta)
            times the trace of ``optax.sgd``.
        bias_correction: whether the direction is m_t / (1 - beta^t) or m_t; None for m_t with a learner that uses
            hindsight: a first step of full length is too long for a rate at the limit.
        statistics: with momentum, whether (u, n) are those of the ``"direction"`` or of the ``"gradient"``.
        epoch: how many updates a shuffled epoch has, if batches are drawn without replacement from few samples: u is
            then corrected for it. None with replacement, or where data are plenty.
        weight_decay: decoupled: :math:`x \leftarrow x - \eta_t (d_t + \mathrm{weight\_decay} \cdot x)`; None for none.
        averaging: the power a of a polynomial average of the iterates, for :func:`sgdol.jax.averaged_params`; 8 is a
            good one; None for no average. It follows params + updates as they leave this transformation, so in a
            chain nothing that changes updates may come after it.
        learner: the online learner of the step size; None for :class:`sgdol.learners.MeasuredCurvature`.
        metric: the norm in which steps and gradients are measured: ``"euclidean"``, the paper's; ``"rms"``;
            ``"adagrad"``; ``"kronecker"``; or an object of :mod:`sgdol.metrics`.
        param_labels: which group each parameter is in.
        axis_name: of the devices under ``shard_map`` or ``pmap``, each of which has gradients of its own.
        record: keep the sums for :func:`sgdol.jax.diagnostics`, a few numbers.

    >>> import jax.numpy as jnp
    >>> from sgdol.learners import FTRL
    >>> optimizer = sgdol(smoothness=4.0, alpha=1.0, momentum=None, learner=FTRL())
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
    core = Core(options.scaling)
    learning_rate: Any = options.learning_rate
    averaging = options.averaging
    rates = optax.scale_by_learning_rate(learning_rate)

    def rate(state: Any) -> Any:
        return learning_rate(state.count) if callable(learning_rate) else learning_rate

    def init(params: Any) -> tuple[Any, ...]:
        after = rates.init(params)
        average = () if averaging is None else (_averaging.start(params),)
        return (core.init(params, rate(after)), after, *average)

    def update(
        updates: Any, state: tuple[Any, ...], params: Any = None, *, others: Any = None, **extra: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        del extra
        if averaging is not None and params is None:
            raise ValueError("averaging needs the parameters: call update(grads, state, params)")
        if len(state) != (2 if averaging is None else 3):
            words = ("with", "without") if averaging is None else ("without", "with")
            raise ValueError(
                f"state was made {words[0]} averaging and this optimizer is {words[1]}: make a new state by its "
                "init(params)"
            )
        scaled, new = core.update(updates, state[0], params, others, rate(state[1]))
        updates, after = rates.update(scaled, state[1], params)
        if averaging is None:
            return updates, (new, after)
        moved = new.count > state[0].count
        return updates, (new, after, _averaging.follow(state[2], params, updates, averaging, new.count, moved))

    return optax.GradientTransformationExtraArgs(init, update)


@takes(Scaling)
def scale_by_sgdol(options: Scaling) -> optax.GradientTransformationExtraArgs:  # noqa: D417  # likewise
    r"""Turn independent gradients at one point into :math:`s_t d_t/(1 - \beta)`, direction times learned multiplier.

    The direction d_t is an average with momentum beta, so :math:`d_t/(1 - \beta)` is the trace of ``optax.sgd``:
    ``optax.chain(scale_by_sgdol(), optax.scale_by_learning_rate(lr))`` is ``sgdol(lr)``.

    ``update`` takes the independent gradients in one of three ways:

    1. ``update(grads, state)``: calls alternate. The first holds its gradient and returns zeros, so that the parameters
       stay where they are; the second completes the pair. Two batches make one update, Algorithm 1's own protocol.
    2. ``update(grads, state, others=grads2)``: the pair in one call.
    3. ``update(stacked, state)``: k >= 2 gradients stacked along a new first axis of *every* leaf, which therefore has
       exactly one axis more than the parameter has, as :func:`sgdol.jax.microbatch_grads` makes them.

    The gradients of a pair must come from different samples: equal ones turn SGDOL into SGD at its rate, and
    ``identical`` in :func:`sgdol.jax.diagnostics` counts them. After way 2 or 3 moved the parameters, a gradient that
    was held before is out of date and is dropped. If any gradient of an update is not finite, the update is zero, the
    sums stay as they were, and a held gradient is dropped. Very large and very small gradients are
    safe: sums are kept in units of a power of two that is taken from the first gradient.

    **Data parallel.** With ``axis_name``, inside ``shard_map`` or ``pmap``, each device gives ``update`` its *own*
    gradients in any of the three ways, not yet averaged, and k is their number over all devices: one gradient on
    each of two or more devices is enough for an update. What is communicated is the mean of the gradients and one
    number per block. All devices return the same updates and the same state. With ``estimator="paper"`` the devices'
    gradients are averaged first and count as one.

    **Wrappers.** ``optax.MultiSteps`` hands over the mean of its mini-steps as one gradient: calls alternate between
    such means, and ``others`` is the last mini-step's alone; it cannot accumulate stacked gradients. Where only a part
    of the parameters is optimized (``optax.masked``, ``optax.partition``), ``others`` may have all of them.
    ``optax.inject_hyperparams`` takes callables for schedules: name ``param_labels`` in its ``static_args`` if it is
    one.

    Args:
        alpha: the regulariser's alpha in every block, positive; None for kappa times the first non-zero squared
            gradient, of which each block gets its even share by size.
        kappa: see alpha; positive; None for 10 with a learner that uses hindsight, else 1.
        estimator: ``"symmetric"``: d is the mean and u the mean of the cross products. ``"paper"``: d = ``grads`` (or
            the first of the stack) and u = <grads, others>.
        granularity: what shares a step size: ``"global"``, everything; ``"group"``, the parameters with the same label;
            ``"tensor"``, each leaf; ``"coordinate"``, nothing (section 6 of the paper).
        momentum: beta, in [0, 1): the direction is D^-1 m_t / w_t, m_t = beta m_{t-1} + (1 - beta) gbar_t.
        bias_correction: whether w_t = 1 - beta^t, or 1; None for 1 with a learner that uses hindsight.
        statistics: with momentum, ``"direction"``: (u, n) of the momentum direction, with its unbiased signal
            (:func:`sgdol.surrogate.momentum_signal`); ``"gradient"``: those of the gradients, which shows noise that
            the momentum hides.
        epoch: B updates in an epoch of batches without replacement: (n - u)/B is added to products of its gradients.
        weight_decay: decoupled, scaled by the learned multiplier; needs ``params`` in ``update``. It decays nothing
            while a gradient is held. ``optax.chain(optax.add_decayed_weights(c), sgdol(...))`` is an l2 penalty
            instead, part of the objective and of the statistics, for ways 1 and 3.
        learner: an online learner of multipliers (:class:`sgdol.learners.Learner`); None for MeasuredCurvature. One
            that uses hindsight is told <gbar_t, d_{t-1}> of each block; unless Euclid's momentum tells it, that takes
            one more vector of memory.
        metric: a name or an object of :mod:`sgdol.metrics`: its D, a positive definite operator made of past mean
            gradients, is in every product of two gradients, u = mean of <g_i, D^-1 g_j> and n = <gbar, D^-1 gbar>, and
            d = D^-1 gbar. What it remembers is in float32 or wider. ``granularity="coordinate"`` needs a diagonal D.
            With ``axis_name``, D is the same on all devices, and their gradients stay the independent ones.
        param_labels: for ``"group"``, as in ``optax.partition``: a tree of labels that is a prefix of the parameters'
            tree, or a function of a tree like the parameters that returns one.
        axis_name: one name, or several, of the devices.
        record: keep the sums for :func:`sgdol.jax.diagnostics`.
    """
    core = Core(options)

    def update(
        updates: Any, state: ScaleBySGDOLState, params: Any = None, *, others: Any = None, **extra: Any
    ) -> tuple[Any, ScaleBySGDOLState]:
        del extra
        return core.update(updates, state, params, others)

    return optax.GradientTransformationExtraArgs(core.init, update)
