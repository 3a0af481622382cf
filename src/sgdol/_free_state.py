"""What :mod:`sgdol.free` decides with: the constants of the algorithm without M, and what it has learned so far."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Number", "Settings", "State"]

Number = Any
"""A Python number, or an array that holds one."""


class Settings(NamedTuple):
    """The constants of the algorithm. All are pure numbers; none is meant to be tuned per problem."""

    # The guard on the loss
    settled: int = 10
    """The guard sleeps for so many steps."""
    alarm_deviations: float = 4.0
    """The loss is suspicious so many deviations above its mean..."""
    alarm_progress: float = 0.5
    """...and this share of the progress so far."""
    confirm_deviations: float = 2.0
    """The point is left if its loss is so many deviations above that of the average..."""
    confirm_progress: float = 0.25
    """...and this share of the progress so far."""
    loss_rate: float = 0.1
    """The weight of a new loss in the running mean and in the deviation."""
    surprise: float = 4.0
    """A loss counts for the deviation as at most so many of it."""
    penalty: float = 2.0
    """What a rollback divides the step size by."""
    decay: float = 0.95
    """What is left of a penalty after one more step."""
    retreat: float = 0.5
    """How long steps may be after a rollback or a rejection, in units of the longest before or of the rejected one."""

    # The look-back
    interval: int = 12
    """Look back at least this often, in steps..."""
    interval_part: int = 6
    """...and once in so small a part of the run so far, a sixth: curvature changes fastest when a run is young."""
    warm: int = 5
    """The first so many steps are all looked back at."""
    jump: float = 3.0
    """A gradient so much longer than the recent ones is a reason to look back."""
    largest_decay: float = 0.95
    """What is left of the largest recent gradient after one more step."""
    rejection: float = 4.0
    """A step is taken back if its curvature term exceeds so many times its linear term..."""
    lesson: float = 2.0
    """...and raises M so many times at most."""
    unknown: float = 4.0
    """The curvature, in units of M, of a step to where nothing is finite."""
    memory: float = 0.5
    """A curvature measured in step t counts as t to this power: old ones are outvoted, none is forgotten."""
    stiffness: float = 1e-3
    """M is at least this share of ||y||/||s||."""

    # The clip
    clip: float = 2.0
    """A gradient counts as at most so many times as long as past ones are in the root mean square..."""
    clip_from: int = 20
    """...as soon as there are so many."""
    usual_decay: float = 0.99
    """How much of a square is left in that mean after one more step."""

    # The step
    kappa: float = 4.0
    """alpha in units of the first squared gradient."""
    largest: float = 4.0
    """The step size without noise, in units of 1/M."""
    charge: float = 1.0
    """What noise costs: without signal the step size falls as 1/(charge M noise)."""
    waiver: float = 0.5
    """What share of that cost is waived while the loss falls."""
    floor: float = 0.5
    """The signal is at least this many of its own standard errors."""
    late: float = 9.0
    """The losses' late mean weights step t as t to the power of one less..."""
    later_half: float = 3.0
    """...and so does the mean over about the later half of the run."""
    first_step: float = 0.1
    """The first step, in units of what M at the first point would allow."""
    growth: float = 2.0
    """A step is at most so much longer than the longest so far."""
    recent: float = 0.01
    """The weight of a step in the signal and noise that diagnostics show."""


class State(NamedTuple):
    """What has been learned so far. All fields are numbers; squared gradients are in units of ||g_1||^2."""

    updates: Number = 0
    """How many steps were made."""
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
    """How much weight the gradients so far have in the momentum."""
    smoothness: Number = 0.0
    """M."""
    curvature: Number = 0.0
    """The weighted root mean square of r..."""
    stiffness: Number = 0.0
    """...of ||y||/||s||, which is at least that of r in size..."""
    curvature_weight: Number = 0.0
    """...and the sum of the weights."""
    since: Number = 0
    """Steps since the last look-back."""
    penalty: Number = 1.0
    """What the step size is divided by after a rollback."""
    longest: Number = 0.0
    """The longest step so far, or what is left of it after a rejection."""
    largest_gradient: Number = 0.0
    """A slowly falling maximum of ||g||."""
    usual_gradient: Number = 0.0
    """The root of a running mean of ||g||^2, clipped, each in the norm of its own step..."""
    usual_weight: Number = 0.0
    """...and the sum of its weights."""
    mean_loss: Number = 0.0
    """A running mean of the batch losses..."""
    loss_deviation: Number = 0.0
    """...of their distance to it..."""
    first_loss: Number = 0.0
    """...and where it stood at first."""
    late_loss: Number = 0.0
    """The mean of the batch losses over about the last tenth of the run..."""
    later_half_loss: Number = 0.0
    """...and over about its later half."""
    step_size: Number = 0.0
    """Eta of the last step; 0 if there is none to look back at."""
    capped: Number = False
    """Whether the last step would have been longer but for the limit on its growth."""
    rejections: Number = 0
    """Steps that were taken back."""
    rollbacks: Number = 0
    """Returns to the average."""
    skipped: Number = 0
    """Batches that are not finite anywhere."""
    evaluations: Number = 0
    """How often a batch was evaluated."""


for public in (Settings, State):
    public.__module__ = "sgdol.free"  # where users find them, and where states that were saved say they are from
