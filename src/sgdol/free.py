r"""SGDOL without M: every decision, as functions of a state and numbers.

The optimizer without a smoothness constant (:class:`sgdol.SGDOLFree`) measures M while it trains. From time to time it
evaluates the batch of the current step at the point before the last step as well: with s the step and y the change of
the batch's gradient along it, r = <y, s>/||s||^2 is a curvature of the objective along the steps that are really made,
and M is a root mean square of r. A step that the curvature condemns is taken back; a loss that jumps sends the run
back to its average. Lengths of points are taken in the metric D, lengths of gradients in D^-1 (:mod:`sgdol.metrics`).

This module decides; front ends own the vectors and evaluate gradients. Nothing here branches: PyTorch calls it with
Python's numbers, optax with traced arrays. Everything is a ratio of measured quantities, and only norms come in, no
squares of them: multiplying the objective or the parameters by a constant changes nothing but the scale, also where
squares would leave the range of the numbers. ``docs/explanation/without_smoothness.md`` has the whole algorithm on one
page, :mod:`sgdol.reference_free` the same as slow and obvious code.

>>> state = begin(State(), smoothness=2.0, norm=1.0)  # M at the first point, and ||g_1||
>>> state = choose_step(track(state, loss=1.0), direction_norm=1.0)
>>> state.step_size  # a tenth of 1/M
0.05
>>> state = observe(state, norm=1.0, squares=0.5**0.5, k=2)  # two equal gradients: all signal, no noise
>>> round(state.signal, 12), round(state.noise, 12)
(1.0, 0.0)
"""

from __future__ import annotations

from sgdol._free_state import Number, Settings, State
from sgdol._numbers import clip, hypot, isfinite, maximum, minimum, negate, ratio, sqrt, where

__all__ = [
    "Settings",
    "State",
    "alarm",
    "begin",
    "choose_step",
    "clipping",
    "confirms",
    "judge_first",
    "look_back",
    "observe",
    "roll_back",
    "track",
    "wants_look_back",
]

DEFAULTS = Settings()


# The first point ------------------------------------------------------------------------------------------------------


def begin(state: State, smoothness: Number, norm: Number) -> State:
    """The first point: M along the first gradient, and ||g_1||."""
    return state._replace(
        smoothness=smoothness,
        first_smoothness=smoothness,
        first_norm=norm,
    )


# The guard on the loss ------------------------------------------------------------------------------------------------


def alarm(state: State, loss: Number, settings: Settings = DEFAULTS) -> Number:
    """Whether the loss of this batch is so high that the point itself may have gone wrong.

    The penalty of a rollback raises the limit until it has faded, by its square: a second one needs a better reason.
    """
    progress = state.first_loss - state.mean_loss
    limit = maximum(settings.alarm_deviations * state.loss_deviation, settings.alarm_progress * progress)
    return (state.updates >= settings.settled) & _above(loss, state.mean_loss, state.penalty**2 * limit)


def confirms(state: State, loss: Number, loss_at_average: Number, settings: Settings = DEFAULTS) -> Number:
    """Whether it is the point and not the batch: the same batch is fine at the average."""
    progress = state.first_loss - state.mean_loss
    limit = maximum(settings.confirm_deviations * state.loss_deviation, settings.confirm_progress * progress)
    limit = maximum(limit, loss_at_average - state.mean_loss)  # the batch's own share of the jump
    return isfinite(loss_at_average) & _above(loss, loss_at_average, limit)


def _above(loss: Number, other: Number, limit: Number) -> Number:
    return negate(isfinite(loss)) | (loss - other > limit)


def roll_back(state: State, y_along: Number, y_norm: Number, s_norm: Number, settings: Settings = DEFAULTS) -> State:
    """The point is the average now, and there is no last step to look back at.

    Until the next look-back M is the curvature of the way that is taken back, if that is larger, and at most
    ``settings.lesson`` times what it was. The arguments are those of :func:`look_back`, for s the way from the average.
    """
    r, _ = _curvature(state, y_along, y_norm, s_norm, settings)
    return state._replace(
        smoothness=clip(r, state.smoothness, settings.lesson * state.smoothness),
        penalty=minimum(settings.penalty * state.penalty, settings.largest_penalty),
        longest=settings.retreat * state.longest,
        since=0,
        step_size=0.0,
        momentum_weight=0.0,
        rollbacks=state.rollbacks + 1,
    )


def track(state: State, loss: Number, settings: Settings = DEFAULTS) -> State:
    """Learn what losses are usual."""
    t, start = state.updates, state.updates == 0
    error = abs(loss - state.mean_loss)
    moved = settings.loss_rate * (minimum(error, settings.surprise * state.loss_deviation) - state.loss_deviation)
    deviation = where(state.loss_deviation > 0, state.loss_deviation + moved, error)
    mean = where(start, loss, state.mean_loss + settings.loss_rate * (loss - state.mean_loss))
    top = where(t < settings.settled, maximum(state.first_loss, mean), state.first_loss)
    late, later = settings.late, settings.later_half
    return state._replace(
        mean_loss=mean,
        loss_deviation=where(start, 0.0, deviation),
        first_loss=where(start, loss, top),
        late_loss=state.late_loss + late / (t + late) * (loss - state.late_loss),
        later_half_loss=state.later_half_loss + later / (t + later) * (loss - state.later_half_loss),
    )


def _falling(state: State, settings: Settings) -> Number:
    """From 0, the loss stands still or rises, to 1: it falls at least as a straight line from its start would.

    The two means are on average a tenth and a quarter of the run old: on a straight line they are that share of the
    whole progress apart.
    """
    apart = 1 / (settings.later_half + 1) - 1 / (settings.late + 1)
    progress = state.first_loss - state.late_loss
    return clip(ratio(state.later_half_loss - state.late_loss, progress, 0.0) / apart, 0.0, 1.0)


# The first gradient ---------------------------------------------------------------------------------------------------


def judge_first(state: State, norm: Number, settings: Settings = DEFAULTS) -> State:
    """In the second step: shorten a first gradient that was ``settings.jump`` times as long as the second.

    A first batch that is an outlier would otherwise rule the metric, alpha, M and the clip for hundreds of steps.
    Front ends multiply what they have learned from gradients by :attr:`State.past`, which is 1 in all other steps.

    Args:
        state: what has been learned.
        norm: ||g||, not finite if the batch's loss or gradient is not.
        settings: the constants.

    >>> judge_first(State(updates=1, first_norm=8.0, smoothness=2.0), norm=1.0).past
    0.125
    """
    outlier = (state.updates == 1) & (norm > 0) & (settings.jump * norm < state.first_norm)
    past = where(outlier, ratio(norm, state.first_norm, 1.0), 1.0)
    return state._replace(
        past=past,
        first_norm=past * state.first_norm,
        smoothness=past * state.smoothness,
        first_smoothness=past * state.first_smoothness,
        largest_gradient=past * state.largest_gradient,
        usual_gradient=past * state.usual_gradient,
    )


# The look-back --------------------------------------------------------------------------------------------------------


def wants_look_back(state: State, norm: Number, settings: Settings = DEFAULTS) -> tuple[State, Number]:
    """Whether to evaluate this batch at the point before the last step as well. Counts the step.

    Args:
        state: what has been learned.
        norm: ||g||, not finite if the batch's loss or gradient is not.
        settings: the constants.
    """
    since = state.since + 1
    usual = norm <= settings.jump * state.largest_gradient  # not where it is not a number
    interval = clip(state.updates / settings.interval_part, 1.0, float(settings.interval))
    due = (since >= interval) | (state.updates <= settings.warm) | state.capped | negate(usual)
    return state._replace(since=since), (state.step_size > 0) & due


def look_back(
    state: State, y_along: Number, y_norm: Number, s_norm: Number, q_along: Number, settings: Settings = DEFAULTS
) -> tuple[State, Number]:
    """Learn from a look-back, and tell whether the step is to be taken back.

    Args:
        state: what has been learned.
        y_along: <y, s>/||s||, y the change of the batch's gradient along the step s; not finite if the batch is not.
        y_norm: ||y||.
        s_norm: ||s||; of a step of length 0 nothing is learned.
        q_along: <q, s>/||s||, q the batch's gradient before the step.
        settings: the constants.
    """
    moved = s_norm > 0
    r, finite = _curvature(state, y_along, y_norm, s_norm, settings)
    too_much = (y_along > settings.rejection * abs(q_along)) & (r > state.smoothness)
    rejected = moved & (negate(finite) | too_much)
    weight = (state.updates + 1.0) ** settings.memory
    total = state.curvature_weight + weight
    old, new = sqrt(state.curvature_weight / total), sqrt(weight / total)
    # The curvature of a batch that is unlike the others would otherwise stay in the mean for ever.
    new = new * minimum(ratio(settings.unknown * state.smoothness, abs(r), 1.0), 1.0)
    curvature = hypot(old * state.curvature, new * r)
    stiffness = hypot(old * state.stiffness, new * ratio(where(finite, y_norm, 0.0), s_norm, 0.0))
    look_backs = state.look_backs + 1
    counted = where(look_backs < settings.first_look_backs, state.first_smoothness, 0.0)
    everything = total + where(counted > 0, 1.0, 0.0)
    mean = sqrt(total / everything) * maximum(curvature, settings.stiffness * stiffness)
    mean = hypot(mean, counted / sqrt(everything))
    # Then M comes down to the mean. Curvature may grow with the steps: M stays where the latest is not well below it.
    slowly = maximum(settings.fall * state.smoothness, settings.margin / look_backs * abs(r))
    slowly = where(state.first_smoothness > counted, minimum(state.smoothness, slowly), 0.0)
    first = where(slowly > mean, state.first_smoothness, counted)
    mean = where(mean > 0, maximum(mean, slowly), state.smoothness)
    lesson = minimum(r, settings.lesson * state.smoothness)
    shorter = minimum(state.longest, settings.retreat * ratio(s_norm, state.multiplier, 0.0))
    learned = moved & negate(rejected)
    new_state = state._replace(
        since=0,
        smoothness=where(rejected, lesson, where(learned, mean, state.smoothness)),
        first_smoothness=where(rejected, 0.0, where(learned, first, state.first_smoothness)),
        look_backs=where(learned, look_backs, state.look_backs),
        curvature=where(rejected, lesson, where(learned, curvature, state.curvature)),
        stiffness=where(rejected, lesson, where(learned, stiffness, state.stiffness)),
        curvature_weight=where(rejected, weight, where(learned, total, state.curvature_weight)),
        longest=where(rejected, shorter, state.longest),
        rejections=state.rejections + rejected,
    )
    return new_state, rejected


def _curvature(
    state: State, y_along: Number, y_norm: Number, s_norm: Number, settings: Settings
) -> tuple[Number, Number]:
    """The curvature r = <y, s>/||s||^2, and whether y is finite."""
    finite = isfinite(y_along) & isfinite(y_norm)
    measured = ratio(where(finite, y_along, 0.0), s_norm, 0.0)
    return where(finite, measured, settings.unknown * state.smoothness), finite


# The step -------------------------------------------------------------------------------------------------------------


def choose_step(state: State, direction_norm: Number, settings: Settings = DEFAULTS, multiplier: Number = 1.0) -> State:
    """Eta for a direction of this length, from the sums before this step.

    Args:
        state: what has been learned.
        direction_norm: ||d||, a gradient's length.
        settings: the constants.
        multiplier: what the user has the step multiplied by: it changes nothing that is learned.
    """
    gain = maximum(settings.kappa + state.signal, settings.floor * state.signal_root)
    charge = settings.charge * (1 - settings.waiver * _falling(state, settings))
    largest = where(state.updates < settings.young, settings.largest_young, settings.largest)
    cost = settings.kappa + maximum(state.signal, 0.0) / largest + charge * maximum(state.noise, 0.0)
    eta = ratio(gain / cost, state.smoothness, 0.0) / state.penalty
    wanted = eta * direction_norm
    longest = where(state.updates == 0, settings.first_step * wanted / settings.growth, state.longest)
    limit = settings.growth * longest
    capped = wanted > limit
    eta = where(capped, ratio(limit, direction_norm, 0.0), eta)
    return state._replace(
        step_size=eta,
        multiplier=multiplier,
        capped=capped,
        longest=maximum(longest, eta * direction_norm),
        penalty=maximum(settings.decay * state.penalty, 1.0),
    )


def clipping(state: State, norm: Number, usual: Number | None = None, settings: Settings = DEFAULTS) -> Number:
    """What the gradient is multiplied by before the step is made and anything is learned from it: 1 as a rule.

    A single batch, ten times as long as the others, would otherwise turn the momentum and make a step of its own.

    Args:
        state: what has been learned.
        norm: ||g||.
        usual: the root mean square of past ||g|| in the norm of this step; None for :attr:`State.usual_gradient`,
            which is that if the norm is always the same. Not asked in the first steps.
        settings: the constants.

    >>> clipping(State(updates=100), norm=8.0, usual=1.0), clipping(State(updates=100), norm=1.9, usual=1.0)
    (0.25, 1.0)
    """
    usual = state.usual_gradient if usual is None else usual
    # Gradients grow quickly where a run starts on a plateau, and the metric has to follow them.
    longest = where(state.updates < settings.young, settings.jump * state.largest_gradient, settings.clip * usual)
    return where(longest > 0, minimum(ratio(longest, norm, 1.0), 1.0), 1.0)


def observe(
    state: State,
    norm: Number,
    squares: Number,
    k: int,
    clipped: Number = 1.0,
    settings: Settings = DEFAULTS,
    *,
    given: Number = 1.0,
) -> State:
    r"""Learn the signal and the noise of the gradients that the step was made with.

    Args:
        state: what has been learned.
        norm: ||g||, g the sum of the contributions c_1, ..., c_k.
        squares: the root of ||c_1||^2 + ... + ||c_k||^2.
        k: how many contributions there are, at least 2: :math:`u = \frac{k}{k-1} (\|g\|^2 - \sum \|c_i\|^2)`.
        clipped: what :func:`clipping` has multiplied g by: u and n count as those of the shorter gradient, so that a
            single batch adds no more to the sums than others do.
        settings: the constants.
        given: what the user has multiplied g by besides, step after step: the direction is shorter by it and the
            gradient that it meets is not, so n is shortened twice and u once.
    """
    n, q = ratio(norm, state.first_norm, 0.0), ratio(squares, state.first_norm, 0.0)
    u = (n - q) * (n + q) * (k / (k - 1))
    noise = n * n - u
    signal = given * clipped * clipped * u
    length = given * clipped * n
    weight = settings.usual_decay * state.usual_weight + 1
    old, new = sqrt(settings.usual_decay * state.usual_weight / weight), sqrt(1 / weight)
    return state._replace(
        updates=state.updates + 1,
        signal=state.signal + signal,
        noise=state.noise + (length * length - signal),
        signal_root=hypot(state.signal_root, signal),
        recent_signal=state.recent_signal + settings.recent * (u - state.recent_signal),
        recent_noise=state.recent_noise + settings.recent * (noise - state.recent_noise),
        largest_gradient=maximum(
            settings.largest_decay * state.largest_gradient,
            where(state.updates < settings.young, clipped, 1.0) * norm,
        ),
        usual_gradient=hypot(old * state.usual_gradient, new * (given * clipped * norm)),
        usual_weight=weight,
    )
