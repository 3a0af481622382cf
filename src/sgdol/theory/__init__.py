r"""The guarantees as numbers: regret, the paper's Theorems 2, 4, 6, 7 and 8, and what is proved here beyond them.

The proofs beyond the paper are in docs/explanation: theory.md (symmetric estimator, metric, momentum) and
unknown_smoothness.md (without M).

Theorems carry the numbers that the paper's counter gives them (the lemma takes number 5), and its slips are corrected:
Theorems 2 and 7 need :math:`\eta \le 2/M` for the regret bound that they are used with, and in Theorem 8
:math:`\sigma_t^2 = \sum_{i=1}^d \sigma_{t,i}^2`.

Symbols: M the smoothness (H4), ``gap`` the initial optimality gap :math:`f(x_1) - f^\star`, T the horizon, L a bound
on the norm of a stochastic gradient (H3), :math:`\sigma_t^2` the variance of one (H2), mu the constant of the
Polyak-Lojasiewicz condition (H5).

**In a metric** (:mod:`sgdol.metrics`). Let :math:`D_t > 0` be a diagonal that is known before step t, and let

.. math:: f(x + s) \le f(x) + \langle\nabla f(x), s\rangle + \frac M2 \|s\|_{D_t}^2 \quad\text{for all } x, s, t.

Then Theorems 2 and 4 and the symmetric rate hold word for word with every norm of a gradient taken in
:math:`D_t^{-1}`: M is the constant above, L bounds :math:`\|g\|_{D_t^{-1}}`, :math:`\sigma_t^2` is
:math:`E\|g - \nabla f\|^2_{D_t^{-1}}`, and what is bounded is the mean of :math:`\|\nabla f(x_t)\|^2_{D_t^{-1}}`.
*Proof.* The step is :math:`s = -\eta D_t^{-1} d`, so :math:`\|s\|_{D_t}^2 = \eta^2 n_t`, and
:math:`E_t \langle\nabla f, D_t^{-1} d\rangle = \|\nabla f\|^2_{D_t^{-1}} = E_t u_t`, because :math:`D_t` is fixed given
the past: :math:`E_t[f(x_{t+1}) - f(x_t)] \le E_t \ell_t(\eta_t)`, which is Theorem 1. What follows it in the paper uses
nothing of the norm but Cauchy-Schwarz. Sums telescope f and no distance, so that D may move up and down. Not covered
is the first step of each tensor in :class:`sgdol.metrics.RMS`: its D then sees the present gradient's mean square over
that tensor, unless there is only one tensor. :func:`in_metric` gives constants that serve for every such D with a
floor.
"""

from __future__ import annotations

from sgdol.theory._momentum import momentum_constant, momentum_rate, momentum_regret_bound, momentum_theorem
from sgdol.theory._paper import (
    CoordinateBounds,
    best_fixed_step_size,
    ftrl_regret_bound,
    regret,
    theorem_2,
    theorem_4,
    theorem_6,
    theorem_7,
    theorem_8,
)
from sgdol.theory._symmetric import MetricConstants, in_metric, moment_rate, symmetric_rate, symmetric_regret_bound
from sgdol.theory._unknown import doubling_high_probability, doubling_rate, grid_rate, wrong_guesses

__all__ = [
    "CoordinateBounds",
    "MetricConstants",
    "best_fixed_step_size",
    "doubling_high_probability",
    "doubling_rate",
    "ftrl_regret_bound",
    "grid_rate",
    "in_metric",
    "moment_rate",
    "momentum_constant",
    "momentum_rate",
    "momentum_regret_bound",
    "momentum_theorem",
    "regret",
    "symmetric_rate",
    "symmetric_regret_bound",
    "theorem_2",
    "theorem_4",
    "theorem_6",
    "theorem_7",
    "theorem_8",
    "wrong_guesses",
]
