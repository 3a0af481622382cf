r"""SGDOL without M, with a proof: the two algorithms of docs/explanation/unknown_smoothness.md, in numpy and float64.

Nothing here is shared with the fast code or with :mod:`sgdol.theory`, on purpose: each function is an algorithm as the
page prints it, from top to bottom. :func:`run_with_test` is one run that doubles its guess of M when a test of the
descent lemma rejects it. :func:`grid_and_selection` makes a run for each guess and selects by fresh gradients.

The oracle is a function: each call draws a fresh stochastic gradient at the point that it is given, of norm at most L.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, log1p, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["GridRun", "RunWithTest", "grid_and_selection", "run_with_test"]

Vector = NDArray[np.float64]
Oracle = Callable[[Vector], Vector]


class RunWithTest(NamedTuple):
    """What :func:`run_with_test` leaves."""

    iterates: Vector
    """x_1, ..., x_T: the points at which gradients were taken, over all guesses."""
    guesses: Vector
    """The guess of M in each step."""
    step_sizes: Vector
    """eta_1, ..., eta_T."""
    statistics: Vector
    """Z after each step: the test's statistic, 0 at the start of each guess."""
    output: int
    """Index of the uniformly random iterate that the algorithm returns."""


def run_with_test(
    oracle: Oracle,
    x1: ArrayLike,
    horizon: int,
    *,
    guess: float,
    alpha: float,
    lipschitz: float | None = None,
    test: Literal["three", "two", "symmetric"] = "three",
    back: bool = True,
    factor: float | None = None,
    level: float | None = None,
    seed: int = 0,
) -> RunWithTest:
    r"""One run that tests its guess :math:`\hat M` of the smoothness, and doubles it when the test rejects it.

    In each step, with :math:`M' = c\hat M`, the sums U and N over the steps since the last rejection, g and g' two
    gradients at x, tau uniform in [0, 1] and g'' a gradient at :math:`x + \tau s`:

    .. math:: \eta = \frac{1}{M'} \mathrm{clip}\left(\frac{\alpha + U}{\alpha + N}, 0, 2\right), \qquad
        s = -\eta g, \qquad X = \eta\langle g, g' - g''\rangle, \qquad u = \langle g, g'\rangle, \qquad n = \|g\|^2.

    Given g, X has the mean :math:`f(x + s) - f(x) - \langle\nabla f(x), s\rangle`, at most :math:`\frac M2\eta^2 n`.

    * ``test="three"``: :math:`Z = \sum (X - \hat M\eta^2 n)`; the guess is rejected if :math:`Z > 4L^2\ln T/\hat M`.
    * ``test="two"``: the same Z and threshold. A fair coin decides which of g' and g'' is drawn, and what is drawn
      counts twice: :math:`u = 2\langle g, g'\rangle` and :math:`X = \eta u`, or u = 0 and
      :math:`X = -2\eta\langle g, g''\rangle`.
    * ``test="symmetric"``: :math:`Z = \sum (X - \hat M\tau\eta^2 n)`, :math:`Q = \sum (|X| + \hat M\tau\eta^2n)^2`,
      :math:`\rho = (\alpha/M')^2`; rejected if :math:`Z > \sqrt{(Q + \rho)(2\ln T + \ln(1 + Q/\rho))}`.

    Args:
        oracle: returns a fresh stochastic gradient at the given point.
        x1: the first point.
        horizon: T, over all guesses.
        guess: m_0, the first guess.
        alpha: the regulariser's alpha.
        lipschitz: L; needed by the tests ``"three"`` and ``"two"``.
        test: how a guess is tested.
        back: whether to return to x_1 after a rejection.
        factor: c; None for 2, or 4 with ``test="symmetric"``.
        level: what stands for ln T in the test; None for ln T.
        seed: of tau, the coins and the output.

    >>> rng = np.random.default_rng(1)
    >>> def oracle(x):  # f = 10 (1 - cos x): M = 10, L = 11
    ...     return 10 * np.sin(x) + rng.choice([-1.0, 1.0], size=1)
    >>> run = run_with_test(oracle, [2.0], 2000, guess=0.1, alpha=10.0, lipschitz=11.0)
    >>> float(run.guesses[0]), bool(run.guesses[-1] < 20)
    (0.1, True)
    """
    if test not in ("three", "two", "symmetric"):
        raise ValueError(f"test must be 'three', 'two' or 'symmetric', got {test!r}")
    if test != "symmetric" and lipschitz is None:
        raise ValueError(f"lipschitz must be given for test={test!r}, got None")
    rng = np.random.default_rng(seed)
    c = factor if factor is not None else (4.0 if test == "symmetric" else 2.0)
    ln_T = log(horizon) if level is None else level
    start = np.array(x1, dtype=np.float64)
    x, M = start, float(guess)
    U = N = Z = Q = 0.0
    iterates, guesses, step_sizes, statistics = [], [], [], []
    for _ in range(horizon):
        eta = min(max((alpha + U) / (alpha + N), 0.0), 2.0) / (c * M)
        g = oracle(x)
        n = float(g @ g)
        s = -eta * g
        tau = rng.random()
        if test == "two":
            # One gradient more, here or there, that counts twice: in expectation both are there.
            if rng.random() < 0.5:
                u = 2 * float(g @ oracle(x))
                X = eta * u
            else:
                u = 0.0
                X = -2 * eta * float(g @ oracle(x + tau * s))
        else:
            u = float(g @ oracle(x))
            X = eta * (u - float(g @ oracle(x + tau * s)))
        if test == "symmetric":
            Z += X - M * tau * eta**2 * n
            Q += (abs(X) + M * tau * eta**2 * n) ** 2
            rho = (alpha / (c * M)) ** 2
            threshold = sqrt((Q + rho) * (2 * ln_T + log1p(Q / rho)))
        else:
            assert lipschitz is not None
            Z += X - M * eta**2 * n
            threshold = 4 * lipschitz**2 * ln_T / M
        iterates.append(x)
        guesses.append(M)
        step_sizes.append(eta)
        statistics.append(Z)
        U, N = U + u, N + n
        x = x + s
        if threshold < Z:
            M *= 2
            U = N = Z = Q = 0.0
            if back:
                x = start
    output = int(rng.integers(horizon))
    return RunWithTest(np.array(iterates), np.array(guesses), np.array(step_sizes), np.array(statistics), output)


class GridRun(NamedTuple):
    """What :func:`grid_and_selection` leaves."""

    candidates: Vector
    """A uniformly random iterate of each run, along the first axis."""
    values: Vector
    """V_i, the estimate of the squared gradient norm at each candidate."""
    guesses: Vector
    """M_i = 2^i m_0."""
    selected: int
    """Index of the candidate with the smallest value, which the algorithm returns."""


def grid_and_selection(
    oracle: Oracle, x1: ArrayLike, horizon: int, *, guess: float, runs: int, alpha: float, seed: int = 0
) -> GridRun:
    r"""A run of SGDOL for each of K guesses, then the candidate whose estimated squared gradient norm is smallest.

    With :math:`N = \lfloor T/(2K) \rfloor`: run i makes N steps of Algorithm 1 with :math:`M_i = 2^i m_0` from x_1 and
    keeps a uniformly random iterate. N fresh pairs of gradients there give
    :math:`V_i = \frac1N \sum \langle g, g'\rangle`, whose mean is :math:`\|\nabla f\|^2`. Neither M nor L is used; T
    counts pairs of gradients.

    Args:
        oracle: returns a fresh stochastic gradient at the given point.
        x1: the first point of every run.
        horizon: T, at least 2K.
        guess: m_0.
        runs: K; the theorem asks for a last guess that is at least M.
        alpha: the regulariser's alpha.
        seed: of the random iterates.

    >>> rng = np.random.default_rng(1)
    >>> found = grid_and_selection(
    ...     lambda x: 10 * np.sin(x) + rng.choice([-1.0, 1.0], size=1), [2.0], 4000, guess=0.1, runs=9, alpha=10.0
    ... )
    >>> abs(float(10 * np.sin(found.candidates[found.selected, 0]))) < 2
    True
    """
    steps = horizon // (2 * runs)
    if steps < 1:
        raise ValueError(f"horizon must be at least 2 * runs = {2 * runs}, got {horizon!r}")
    rng = np.random.default_rng(seed)
    candidates, values = [], []
    for i in range(runs):
        M, U, N = guess * 2**i, 0.0, 0.0
        x = np.array(x1, dtype=np.float64)
        kept = int(rng.integers(steps))
        for t in range(steps):
            if t == kept:
                candidates.append(x)
            eta = min(max((alpha + U) / (alpha + N), 0.0), 2.0) / M
            g, other = oracle(x), oracle(x)
            U, N = U + float(g @ other), N + float(g @ g)
            x = x - eta * g
        total = sum(float(oracle(candidates[-1]) @ oracle(candidates[-1])) for _ in range(steps))
        values.append(total / steps)
    return GridRun(
        np.array(candidates), np.array(values), np.array([guess * 2**i for i in range(runs)]), int(np.argmin(values))
    )
