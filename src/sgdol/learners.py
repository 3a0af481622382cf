r"""Online learners that choose the step size by playing against the surrogate losses.

All of them work in units of the multiplier :math:`s = M \eta`, in which the surrogate loss, times :math:`M`, is

.. math:: M \ell_t = \tfrac12 n_t s^2 - u_t s, \qquad s \in [0, 2],

so that a learner does not depend on the base rate 1/M, which a schedule may change. A learner is a small immutable
object with three methods, ``initial``, ``predict`` and ``observe``. Its state is a named tuple of arrays with one entry
per block of coordinates that shares a step size (a scalar for a global step size). ``alpha`` is passed at each call,
because its default, kappa times the first squared gradient, is not known before training starts.

A learner with ``hindsight = True`` also gets, at step t, the product of the present gradient with the last direction,
:math:`v_{t-1} = \langle \bar g_t, d_{t-1}\rangle`, as the keyword ``last`` of ``observe`` (0 at the first step): the
slope of the objective along the last direction, at the end of the last step.

>>> learner, state = FTRL(), FTRL().initial(0.0)
>>> for u, n in [(1.0, 4.0), (0.5, 4.0)]:
...     s = learner.predict(state, alpha=2.0)
...     state = learner.observe(state, s, u, n, alpha=2.0)
>>> learner.predict(state, alpha=2.0)  # (2 + 1.5) / (2 + 8)
0.35
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from sgdol._numbers import clip, maximum, ratio

__all__ = [
    "FTRL",
    "LARGEST_MULTIPLIER",
    "PAPER",
    "Floored",
    "Learner",
    "MeasuredCurvature",
    "OnlineGradientDescent",
    "OptimisticFTRL",
    "suggested_kappa",
    "uses_hindsight",
]

Array = Any
State = Any

LARGEST_MULTIPLIER = 2.0
"""The paper restricts eta to [0, 2/M]: beyond 2/M the surrogate promises no decrease."""


@runtime_checkable
class Learner(Protocol):
    """The protocol of a learner of multipliers."""

    def initial(self, zero: Array) -> State:
        """The state before any loss; ``zero`` is a zero of the shape and type that the state's entries take."""
        ...

    def predict(self, state: State, alpha: Array) -> Array:
        """The multiplier s_t, from the losses before step t alone."""
        ...

    def observe(self, state: State, multiplier: Array, u: Array, n: Array, alpha: Array) -> State:
        """The state after the loss (u_t, n_t), for which ``multiplier`` was played."""
        ...


class Sums(NamedTuple):
    """The state of FTRL: all that the closed form needs."""

    u_sum: Array
    n_sum: Array


class HintedSums(NamedTuple):
    """The state of optimistic FTRL: the sums, and the last loss as the hint for the next."""

    u_sum: Array
    n_sum: Array
    u_last: Array
    n_last: Array


class FlooredSums(NamedTuple):
    """The state of the floored leader: the sums, and how many losses there were."""

    u_sum: Array
    n_sum: Array
    losses: Array


class Descent(NamedTuple):
    """The state of online gradient descent."""

    multiplier: Array
    n_sum: Array


class Measured(NamedTuple):
    """The state of the learner that measures curvature: sums, and the last loss until hindsight completes it."""

    u_sum: Array
    h_sum: Array
    u_last: Array
    multiplier_last: Array


def uses_hindsight(learner: Learner) -> bool:
    """True if the learner's ``observe`` needs ``last=``, the product of the new gradient and the last direction."""
    return bool(getattr(learner, "hindsight", False))


def suggested_kappa(learner: Learner) -> float:
    """The default of kappa, which is alpha in units of the first squared gradient: 10 with hindsight, else 1."""
    return 10.0 if uses_hindsight(learner) else 1.0


def _clip(multiplier: Array) -> Array:
    return clip(multiplier, 0.0, LARGEST_MULTIPLIER)


@dataclass(frozen=True)
class FTRL:
    r"""Follow the regularized leader (Algorithm 2) with a quadratic regulariser, in closed form.

    .. math:: s_t = \mathrm{clip}\!\left(
        \frac{\kappa \alpha c + \sum_{j<t} u_j}{\kappa \alpha + \sum_{j<t} n_j}, 0, 2\right)

    minimises :math:`\frac{\kappa \alpha}{2} (s - c)^2 + \sum_{j<t} (\frac12 n_j s^2 - u_j s)` over [0, 2]. The defaults
    are the paper's regulariser of Theorem 4. ``strength=0`` is follow the leader.

    Args:
        strength: kappa, at least 0: how strongly the multiplier is kept at ``center``, in units of alpha.
        center: c, in [0, 2]: where the multiplier starts.

    >>> learner = FTRL(strength=10.0)
    >>> learner.predict(Sums(u_sum=-5.0, n_sum=10.0), alpha=1.0)
    0.25
    """

    strength: float = 1.0
    center: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.strength < float("inf"):
            raise ValueError(f"strength must be finite and at least 0, got {self.strength!r}")
        if not 0 <= self.center <= LARGEST_MULTIPLIER:
            raise ValueError(f"center must be in [0, {LARGEST_MULTIPLIER:g}], got {self.center!r}")

    def initial(self, zero: Array) -> Sums:
        """No losses yet."""
        return Sums(zero, zero)

    def predict(self, state: Sums, alpha: Array) -> Array:
        """The minimiser of the regulariser and the losses so far."""
        return self._leader(state.u_sum, state.n_sum, alpha)

    def observe(self, state: Sums, multiplier: Array, u: Array, n: Array, alpha: Array) -> Sums:
        """Add the loss to the sums."""
        return Sums(state.u_sum + u, state.n_sum + n)

    def _leader(self, u_sum: Array, n_sum: Array, alpha: Array) -> Array:
        weight = self.strength * alpha
        return _clip(ratio(weight * self.center + u_sum, weight + n_sum, otherwise=self.center))


PAPER: Mapping[str, Any] = MappingProxyType({"alpha": 10.0, "estimator": "paper", "momentum": 0.0, "learner": FTRL()})
"""The paper's own settings, as options of either front end: ``SGDOL(params, smoothness=M, **sgdol.PAPER)``."""


@dataclass(frozen=True)
class OptimisticFTRL(FTRL):
    r"""FTRL that bets on the next loss being like the last (Mohri and Yang 2016, named in section 5 of the paper).

    .. math:: s_t = \mathrm{clip}\!\left(
        \frac{\kappa \alpha c + \sum_{j<t} u_j + u_{t-1}}{\kappa \alpha + \sum_{j<t} n_j + n_{t-1}}, 0, 2\right)

    The hint is the last loss, so the multiplier still does not see the current gradients.

    >>> learner = OptimisticFTRL()
    >>> learner.predict(HintedSums(u_sum=1.0, n_sum=2.0, u_last=1.0, n_last=1.0), alpha=1.0)
    0.75
    """

    def initial(self, zero: Array) -> HintedSums:  # type: ignore[override]
        """No losses and no hint yet."""
        return HintedSums(zero, zero, zero, zero)

    def predict(self, state: HintedSums, alpha: Array) -> Array:  # type: ignore[override]
        """The minimiser of the regulariser, the losses so far and the last one again."""
        return self._leader(state.u_sum + state.u_last, state.n_sum + state.n_last, alpha)

    def observe(  # type: ignore[override]
        self, state: HintedSums, multiplier: Array, u: Array, n: Array, alpha: Array
    ) -> HintedSums:
        """Add the loss to the sums and keep it as the hint."""
        return HintedSums(state.u_sum + u, state.n_sum + n, u, n)


@dataclass(frozen=True)
class Floored(FTRL):
    r"""FTRL whose multiplier is at least :math:`c/\sqrt t`, for convex objectives (docs/explanation/convexity.md).

    .. math:: s_t = \max\left(s_t^{\mathrm{FTRL}}, \frac{c}{\sqrt t}\right)

    In expectation the floor adds at most :math:`c^2 L^2 (1 + \ln T)/(2M)` to the regret, which leaves the rate of
    Theorem 4 as it is up to that logarithm, and with it the average of the iterates on a convex objective has
    :math:`E f - f^\star = O(\ln T/\sqrt T)`, which FTRL alone does not have (:func:`sgdol.convexity.floored_rate`).

    Args:
        strength: kappa, as in :class:`FTRL`.
        center: c of :class:`FTRL`.
        floor: c, in [0, 2].

    >>> learner = Floored(floor=1.0)
    >>> learner.predict(FlooredSums(u_sum=-5.0, n_sum=10.0, losses=3.0), alpha=1.0)  # the fourth step
    0.5
    """

    floor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= LARGEST_MULTIPLIER:
            raise ValueError(f"floor must be in [0, {LARGEST_MULTIPLIER:g}], got {self.floor!r}")

    def initial(self, zero: Array) -> FlooredSums:  # type: ignore[override]
        """No losses yet."""
        return FlooredSums(zero, zero, zero)

    def predict(self, state: FlooredSums, alpha: Array) -> Array:  # type: ignore[override]
        """The leader, or the floor where that is larger."""
        leader = self._leader(state.u_sum, state.n_sum, alpha)
        floor = self.floor / (state.losses + 1) ** 0.5
        return maximum(leader, floor)

    def observe(  # type: ignore[override]
        self, state: FlooredSums, multiplier: Array, u: Array, n: Array, alpha: Array
    ) -> FlooredSums:
        """Add the loss to the sums and count it."""
        return FlooredSums(state.u_sum + u, state.n_sum + n, state.losses + 1)


@dataclass(frozen=True)
class OnlineGradientDescent:
    r"""Projected online gradient descent with the steps of strongly convex losses.

    .. math:: s_{t+1} = \mathrm{clip}\!\left(s_t - \frac{n_t s_t - u_t}{\alpha + \sum_{j \le t} n_j}, 0, 2\right)

    The losses are :math:`n_t`-strongly convex, for which steps of one over the accumulated strong convexity have
    logarithmic regret (Hazan, Agarwal and Kale 2007); ``alpha`` plays the part it has in FTRL. Unlike FTRL it forgets
    how far beyond a bound the losses pulled, so it leaves 0 and 2 faster.

    Args:
        start: the first multiplier, in [0, 2].

    >>> learner = OnlineGradientDescent()
    >>> learner.observe(learner.initial(0.0), 1.0, u=0.0, n=1.0, alpha=1.0)
    Descent(multiplier=0.5, n_sum=1.0)
    """

    start: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.start <= LARGEST_MULTIPLIER:
            raise ValueError(f"start must be in [0, {LARGEST_MULTIPLIER:g}], got {self.start!r}")

    def initial(self, zero: Array) -> Descent:
        """At the start, no losses yet."""
        return Descent(zero + self.start, zero)

    def predict(self, state: Descent, alpha: Array) -> Array:
        """The current iterate."""
        return state.multiplier

    def observe(self, state: Descent, multiplier: Array, u: Array, n: Array, alpha: Array) -> Descent:
        """One projected gradient step."""
        n_sum = state.n_sum + n
        return Descent(_clip(multiplier - ratio(n * multiplier - u, alpha + n_sum, otherwise=0.0)), n_sum)


@dataclass(frozen=True)
class MeasuredCurvature:
    r"""Keeps s = 1 until the curvature measured along the steps shows that they are too long. The default learner.

    The slope along :math:`d_t` is :math:`u_t` before the step and :math:`v_t = \langle \bar g_{t+1}, d_t\rangle` after
    it, both unbiased. Their difference measures the curvature :math:`h_t`:

    .. math:: h_t = \frac{u_t - v_t}{s_t}, \qquad s_t = \frac{A}{A + a \max(H - U/\tau, 0)}, \qquad
        A = \max(\alpha + U, 0), \quad U = \sum_{j<t-1} u_j, \quad H = \sum_{j<t-1} h_j.

    On a quadratic with Hessian P and base rate 1/M, :math:`h_t = d_t^\top P d_t/M`, and
    :math:`\frac1M \sum_t s_t (u_t - s_t h_t/2)` is the expected decrease of f: a run that converges has
    :math:`U/H \ge s/2`. So s stays at 1, and the optimizer is SGD at its rate, as long as :math:`H \le U/\tau`. If H
    exceeds that, s falls: the rate is too large, or noise keeps the weights from settling. The sums end at step t - 2,
    because :math:`h_{t-1}` contains the gradients of step t, on which :math:`s_t` must not depend. s is never larger
    than 1. There are theorems for quadratics only (docs/explanation/theory.md), because past curvature does not bound
    future curvature.

    Args:
        tolerance: tau in (0, 2]: s stays at 1 while U/H is at least tau.
        charge: a > 0: how fast s falls when the curvature exceeds that.

    >>> learner = MeasuredCurvature(tolerance=0.5, charge=1.0)
    >>> state = learner.observe(learner.initial(0.0), 1.0, u=2.0, n=4.0, alpha=2.0)
    >>> state = learner.observe(state, 1.0, u=9.0, n=9.0, alpha=2.0, last=-6.0)  # the first step went too far: h = 8
    >>> learner.predict(state, alpha=2.0)  # 4 / (4 + 8 - 4)
    0.5
    """

    tolerance: float = 0.6
    charge: float = 2.0

    hindsight: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.tolerance <= LARGEST_MULTIPLIER:
            raise ValueError(f"tolerance must be in (0, {LARGEST_MULTIPLIER:g}], got {self.tolerance!r}")
        if not 0 < self.charge < float("inf"):
            raise ValueError(f"charge must be positive and finite, got {self.charge!r}")

    def initial(self, zero: Array) -> Measured:
        """No losses yet."""
        return Measured(zero, zero, zero, zero)

    def predict(self, state: Measured, alpha: Array) -> Array:
        """From 0 to 1."""
        gain = maximum(alpha + state.u_sum, 0.0)
        excess = maximum(state.h_sum - state.u_sum / self.tolerance, 0.0)
        return ratio(gain, gain + self.charge * excess, otherwise=1.0)

    def observe(
        self, state: Measured, multiplier: Array, u: Array, n: Array, alpha: Array, last: Array = 0.0
    ) -> Measured:
        """Complete the last loss by hindsight, and keep this one until its turn."""
        h = ratio(state.u_last - last, state.multiplier_last, otherwise=0.0)  # of a step that was made
        return Measured(state.u_sum + state.u_last, state.h_sum + h, u, multiplier)
