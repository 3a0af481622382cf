"""The constants of the algorithm without M, and the state of one run (:mod:`sgdol.free`)."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Number", "Settings", "State"]

Number = Any
"""A Python number, or an array that holds one."""


class Settings(NamedTuple):
    """The constants of the algorithm. All are pure numbers; none is meant to be tuned per problem."""

    # The guard on the loss
    settled: int = 10
    """The guard is off in the first so many steps."""
    alarm_deviations: float = 4.0
    """The guard checks a batch whose loss is above its running mean by this many deviations and by
    ``alarm_progress``."""
    alarm_progress: float = 0.5
    """The share of the progress so far (first loss minus running mean) by which the loss must exceed its mean."""
    confirm_deviations: float = 2.0
    """A rollback needs a loss that is this many deviations, and ``confirm_progress``, above that at the average."""
    confirm_progress: float = 0.25
    """The share of the progress so far by which the loss must exceed the loss of the same batch at the average."""
    loss_rate: float = 0.1
    """The weight of a new loss in the running mean and in the deviation."""
    surprise: float = 4.0
    """A loss changes the deviation as if it were at most this many deviations from the mean."""
    penalty: float = 2.0
    """A rollback divides the step size by this."""
    largest_penalty: float = 8.0
    """Several rollbacks together divide the step size by at most this."""
    decay: float = 0.95
    """A penalty is multiplied by this in every step, until it is 1."""
    retreat: float = 0.5
    """After a rollback the longest step is multiplied by this; after a rejection it is this share of the rejected
    step."""

    # The look-back
    interval: int = 24
    """The largest number of steps between two look-backs."""
    interval_part: int = 6
    """In step t there are at most t divided by this many steps between two look-backs: curvature changes fastest at
    first."""
    warm: int = 5
    """There is a look-back in each of the first so many steps."""
    jump: float = 3.0
    """A gradient this many times as long as the recent ones causes a look-back. In the first ``young`` steps it is
    shortened to that. A first gradient this many times as long as the second is shortened to the second."""
    largest_decay: float = 0.95
    """The maximum of recent gradient norms is multiplied by this in every step."""
    rejection: float = 4.0
    """A step is rejected if its curvature term exceeds its linear term by this factor."""
    lesson: float = 2.0
    """A rejection, and a rollback until the next look-back, multiplies M by at most this."""
    unknown: float = 4.0
    """The curvature, in units of M, of a step to a point that is not finite; and the largest that counts in the
    mean."""
    memory: float = 0.5
    """A curvature measured in step t has the weight t to this power."""
    first_look_backs: int = 12
    """M of the first point counts in the mean until the look-back of this number; then M comes down to the mean."""
    fall: float = 0.5
    """On its way down a look-back multiplies M by at least this."""
    margin: float = 36.0
    """On its way down, look-back k does not let M fall below this many times the curvature that it measured, over k."""
    stiffness: float = 1e-3
    """M is at least this share of ||y||/||s||."""

    # The clip
    clip: float = 2.0
    """After the first ``young`` steps, a gradient longer than this many times the root mean square of past gradient
    norms is shortened to that."""
    usual_decay: float = 0.99
    """The decay of that root mean square, per step."""

    # The step
    kappa: float = 4.0
    """alpha in units of the first squared gradient."""
    largest: float = 4.0
    """The step size without noise, in units of 1/M, after the first ``young`` steps."""
    young: int = 20
    """In the first so many steps the step size without noise is ``largest_young`` instead of ``largest``."""
    largest_young: float = 1.0
    """The step size without noise in the first ``young`` steps, in units of 1/M."""
    charge: float = 1.0
    """c, the cost of noise: without signal the step size falls as 1/(c M noise)."""
    waiver: float = 0.5
    """The cost of noise is reduced by this share while the loss falls."""
    floor: float = 0.5
    """The sum of the signal counts as at least this many of its standard errors."""
    late: float = 9.0
    """The late mean of the losses weights step t as t to the power of this minus one."""
    later_half: float = 3.0
    """The mean of the losses over about the later half of the run weights step t as t to the power of this minus
    one."""
    first_step: float = 0.1
    """The length of the first step, in units of what M at the first point allows."""
    growth: float = 2.0
    """A step is at most this many times as long as the longest one so far."""
    recent: float = 0.01
    """The weight of a step in the moving averages of diagnostics."""


class State(NamedTuple):
    """What has been learned so far. All fields are numbers; squared gradients are in units of ||g_1||^2."""

    updates: Number = 0
    """The number of steps."""
    first_norm: Number = 0.0
    """||g_1||, the unit of gradients; 0 before the first step."""
    signal: Number = 0.0
    """The sum of u."""
    noise: Number = 0.0
    """The sum of n - u."""
    signal_root: Number = 0.0
    """The root of the sum of u^2."""
    recent_signal: Number = 0.0
    recent_noise: Number = 0.0
    """u and n - u over about the last hundred steps, for diagnostics."""
    momentum_weight: Number = 0.0
    """The sum of the weights of the gradients in the momentum."""
    smoothness: Number = 0.0
    """M, the measured smoothness."""
    first_smoothness: Number = 0.0
    """M of the first point, until M has come down to the mean of the curvatures measured later; then 0."""
    look_backs: Number = 0
    """The number of look-backs, without those that rejected a step."""
    curvature: Number = 0.0
    """The weighted root mean square of the curvatures r."""
    stiffness: Number = 0.0
    """The weighted root mean square of ||y||/||s||."""
    curvature_weight: Number = 0.0
    """The sum of the weights of ``curvature`` and ``stiffness``."""
    since: Number = 0
    """Steps since the last look-back."""
    penalty: Number = 1.0
    """The step size is divided by this, 1 unless there was a rollback."""
    longest: Number = 0.0
    """The longest step so far; a rejection and a rollback shorten it."""
    largest_gradient: Number = 0.0
    """A slowly falling maximum of ||g||."""
    usual_gradient: Number = 0.0
    """The root of a running mean of the clipped ||g||^2, each in the norm of its own step."""
    usual_weight: Number = 0.0
    """The sum of the weights of ``usual_gradient``."""
    past: Number = 1.0
    """What the gradients of earlier steps are multiplied by in this step: see :func:`judge_first`."""
    mean_loss: Number = 0.0
    """The running mean of the batch losses."""
    loss_deviation: Number = 0.0
    """The running mean of the distance of batch losses to ``mean_loss``."""
    first_loss: Number = 0.0
    """The largest ``mean_loss`` of the first steps."""
    late_loss: Number = 0.0
    """The mean of the batch losses over about the last tenth of the run."""
    later_half_loss: Number = 0.0
    """The mean of the batch losses over about the later half of the run."""
    step_size: Number = 0.0
    """Eta of the last step; 0 if there is no step to look back at."""
    multiplier: Number = 1.0
    """The user's multiplier of the last step."""
    capped: Number = False
    """True if the limit on its growth cut the last step short."""
    rejections: Number = 0
    """The number of rejected steps."""
    rollbacks: Number = 0
    """The number of rollbacks to the average."""
    skipped: Number = 0
    """The number of skipped batches, which were not finite."""
    evaluations: Number = 0
    """The number of evaluations of a batch."""


for public in (Settings, State):
    public.__module__ = "sgdol.free"  # where users find them, and where states that were saved say they are from
