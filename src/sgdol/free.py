r"""SGDOL without M: every decision, on plain numbers.

The optimizer without a smoothness constant (:class:`sgdol.SGDOLFree`) measures M while it trains. From time to time it
evaluates the batch of the current step at the point before the last step as well: with s the step and y the change of
the batch's gradient along it, r = <y, s>/||s||^2 is a curvature of the objective along the steps that are really made,
and M is the root mean square of r. A step that the curvature condemns is taken back; a loss that jumps sends the run
back to its average. Everything is a ratio of measured quantities: there is no unit in here, so multiplying the
objective or the parameters by a constant changes nothing but the scale.

This module decides; front ends own the vectors and evaluate gradients. ``docs/without_smoothness.md`` has the whole
algorithm on one page, :mod:`sgdol.reference_free` the same as slow and obvious code.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

__all__ = ["Rule", "Settings", "next_probe"]


class Settings(NamedTuple):
    """The constants of the algorithm. All are pure numbers; none is meant to be tuned per problem."""

    interval: int = 10
    """Look back at least this often, in steps."""
    memory: float = 0.999
    """How much of a curvature is left after one more step."""
    warm: int = 5
    """The first so many steps are all looked back at..."""
    warm_memory: float = 0.8
    """...and what is left of a curvature after one of them."""
    largest: float = 4.0
    """The step size without noise, in units of 1/M."""
    charge: float = 1.0
    """What noise costs: without signal the step size falls as 1/(charge M noise)."""
    waiver: float = 0.5
    """What share of that cost is waived while the loss falls."""
    kappa: float = 4.0
    """alpha in units of the first squared gradient."""
    floor: float = 0.5
    """The signal is at least this many of its own standard errors."""
    probe: float = 0.1
    """The first step, in units of what M at the first point would allow."""
    growth: float = 2.0
    """A step is at most so much longer than the longest so far."""
    jump: float = 3.0
    """A gradient so much longer than the recent ones is a reason to look back."""
    rejection: float = 4.0
    """A step is taken back if its curvature term exceeds so many times its linear term..."""
    lesson: float = 2.0
    """...and raises M so many times at most."""
    decay: float = 0.95
    """What is left of a penalty after one more step."""


@dataclass
class Rule:
    """What has been learned so far, and what follows from it. All fields are numbers: see :meth:`as_dict`."""

    updates: int = 0
    """How many steps were made."""
    signal: float = 0.0
    """The sum of u."""
    noise: float = 0.0
    """The sum of n - u."""
    signal_squares: float = 0.0
    """The sum of u^2."""
    alpha: float = 0.0
    """||g_1||^2, the unit of squared gradients."""
    momentum_weight: float = 0.0
    """How much weight the gradients so far have in the momentum."""
    recent_signal: float = 0.0
    recent_noise: float = 0.0
    """u and n - u over about the last hundred steps, for diagnostics."""
    curvature_squares: float = 0.0
    """The weighted sum of r^2..."""
    curvature_weight: float = 0.0
    """...and of the weights."""
    norm_squares: float = 0.0
    """The same sum for ||y||^2/||s||^2, which is at least r^2."""
    smoothness: float = 0.0
    """M."""
    since: int = 0
    """Steps since the last look-back."""
    penalty: float = 1.0
    """What the step size is divided by after a rollback."""
    longest: float = 0.0
    """The longest step so far, or what is left of it after a rejection."""
    largest_gradient: float = 0.0
    """A slowly falling maximum of ||g||."""
    mean_loss: float = 0.0
    """A running mean of the batch losses..."""
    loss_deviation: float = 0.0
    """...of their distance to it..."""
    first_loss: float = 0.0
    """...and where it stood at first."""
    late_loss: float = 0.0
    """The mean of the batch losses over about the last tenth of the run..."""
    later_half_loss: float = 0.0
    """...and over about its later half."""
    step_size: float = 0.0
    """Eta of the last step; 0 if there is none to look back at."""
    capped: bool = False
    """Whether the last step would have been longer but for the limit on its growth."""
    rejections: int = 0
    """Steps that were taken back."""
    rollbacks: int = 0
    """Returns to the average."""
    skipped: int = 0
    """Batches that are not finite anywhere."""
    evaluations: int = 0
    """Calls of the closure."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, as numbers that can be saved."""
        return asdict(self)

    # 1. The guard on the loss --------------------------------------------------------------------------------------

    def alarm(self, loss: float) -> bool:
        """Whether the loss of this batch is so high that the point itself may have gone wrong."""
        if self.updates < 10:
            return False
        return not math.isfinite(loss) or loss - self.mean_loss > max(4 * self.loss_deviation, 0.5 * self._progress())

    def confirms(self, loss: float, loss_at_average: float) -> bool:
        """Whether it is the point and not the batch: the same batch is fine at the average."""
        if not math.isfinite(loss_at_average):
            return False
        return not math.isfinite(loss) or loss - loss_at_average > max(2 * self.loss_deviation, 0.25 * self._progress())

    def roll_back(self) -> None:
        """The point is the average now, and there is no last step to look back at."""
        self.penalty *= 2
        self.longest /= 2
        self.since = 0
        self.step_size = 0.0
        self.momentum_weight = 0.0
        self.rollbacks += 1

    def track(self, loss: float) -> None:
        """Learn what losses are usual."""
        self.late_loss += 9 / (self.updates + 9) * (loss - self.late_loss)
        self.later_half_loss += 3 / (self.updates + 3) * (loss - self.later_half_loss)
        if self.updates == 0:
            self.mean_loss = self.first_loss = loss
            return
        error = abs(loss - self.mean_loss)
        if self.loss_deviation == 0:
            self.loss_deviation = error
        else:
            self.loss_deviation += 0.1 * (min(error, 4 * self.loss_deviation) - self.loss_deviation)
        self.mean_loss += 0.1 * (loss - self.mean_loss)
        if self.updates < 10:
            self.first_loss = max(self.first_loss, self.mean_loss)

    def _progress(self) -> float:
        return self.first_loss - self.mean_loss

    def _falling(self) -> float:
        """From 0, the loss stands still or rises, to 1: it falls at least as a straight line from its start would.

        The two means are on average a tenth and a quarter of the run old, so that on a straight line they are 0.15 of
        the whole progress apart.
        """
        progress = self.first_loss - self.late_loss
        if not progress > 0:
            return 0.0
        return min(max((self.later_half_loss - self.late_loss) / progress / 0.15, 0.0), 1.0)

    # 2. The look-back ----------------------------------------------------------------------------------------------

    def wants_look_back(self, gradient_norm: float, settings: Settings) -> bool:
        """Whether to evaluate this batch at the point before the last step as well. Counts the step."""
        self.since += 1
        return self.step_size > 0 and (
            self.since >= settings.interval
            or self.updates <= settings.warm
            or self.capped
            or not gradient_norm <= settings.jump * self.largest_gradient  # also where it is not a number
        )

    def look_back(self, ys: float, yy: float, ss: float, qs: float, settings: Settings) -> bool:
        """Learn from a look-back, and tell whether the step is to be taken back.

        Args:
            ys: <y, s>, the change of the batch's gradient along the step s; not finite if the gradient is not.
            yy: ||y||^2.
            ss: ||s||^2.
            qs: <q, s>, q the batch's gradient before the step.
            settings: the constants.
        """
        self.since = 0
        if ss == 0:
            return False
        finite = math.isfinite(ys) and math.isfinite(yy)
        r = ys / ss if finite else 4 * self.smoothness
        if not finite or (r * ss > settings.rejection * abs(qs) and r > self.smoothness):
            self.rejections += 1
            self.longest = min(self.longest, math.sqrt(ss) / 2)
            self.smoothness = min(r, settings.lesson * self.smoothness)
            self.curvature_squares = self.smoothness**2
            self.norm_squares = self.curvature_squares
            self.curvature_weight = 1.0
            return True
        kept = settings.warm_memory if self.updates <= settings.warm else settings.memory**settings.interval
        self.curvature_squares = kept * self.curvature_squares + r * r
        self.norm_squares = kept * self.norm_squares + yy / ss
        self.curvature_weight = kept * self.curvature_weight + 1
        squares = max(self.curvature_squares, 1e-6 * self.norm_squares)
        if squares > 0:
            self.smoothness = math.sqrt(squares / self.curvature_weight)
        return False

    # 3. The step ---------------------------------------------------------------------------------------------------

    def begin(self, smoothness: float, squared_norm: float) -> None:
        """The first point: M along the first gradient, and ||g_1||^2."""
        self.smoothness = smoothness
        self.curvature_squares = self.norm_squares = smoothness**2
        self.curvature_weight = 1.0
        self.alpha = squared_norm

    def choose_step_size(self, direction_norm: float, smoothness_of_decay: float, settings: Settings) -> float:
        """Eta for a direction of this length, from the sums before this step."""
        m = self.smoothness + smoothness_of_decay
        alpha = settings.kappa * self.alpha
        gain = max(alpha + self.signal, settings.floor * math.sqrt(self.signal_squares))
        charge = settings.charge * (1 - settings.waiver * self._falling())
        cost = alpha + max(self.signal, 0.0) / settings.largest + charge * max(self.noise, 0.0)
        eta = gain / (m * cost) / self.penalty
        self.penalty = max(1.0, settings.decay * self.penalty)
        if self.updates == 0:
            self.longest = settings.probe * eta * direction_norm / settings.growth
        limit = settings.growth * self.longest
        self.capped = eta * direction_norm > limit
        if self.capped:
            eta = limit / direction_norm
        self.longest = max(self.longest, eta * direction_norm)
        self.step_size = eta
        return eta

    def observe(self, u: float, n: float) -> None:
        """Learn the signal and the noise of the gradients that the step was made with."""
        self.updates += 1
        self.signal += u
        self.noise += n - u
        self.signal_squares += u * u
        self.recent_signal += 0.01 * (u - self.recent_signal)
        self.recent_noise += 0.01 * (n - u - self.recent_noise)
        self.largest_gradient = max(math.sqrt(n), 0.95 * self.largest_gradient)


PROBED = (1 / 32, 1 / 2)
"""A probe that changes the gradient by a share in this range measures a curvature: less drowns in rounding, more is
not local."""

AIM = 1 / 8
"""The share that the next probe aims at."""


def next_probe(length: float, change: float) -> float | None:
    """How long the next probe along the first gradient should be, None if the last one tells the curvature.

    Args:
        length: how long the last probe was.
        change: ||y||/||g||, by how much it changed the gradient; not finite if the point was too far out.
    """
    if PROBED[0] <= change <= PROBED[1]:
        return None
    if not math.isfinite(change):
        return length / 64
    return length * min(max(AIM / change, 1 / 64), 64.0) if change > 0 else length * 64
