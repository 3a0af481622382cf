r"""SGDOL without M, from top to bottom in one function: numpy, float64, slow and obvious. This is the truth.

Nothing here is shared with the fast code, on purpose: whoever doubts an optimizer of this library can compare it with
these lines and with ``docs/without_smoothness.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Run", "sgdol_free"]

Vector = NDArray[np.float64]
Oracle = Callable[[int, Vector], tuple[float, Vector]]


class Run(NamedTuple):
    """What a run leaves."""

    iterates: Vector
    """x_1, ..., x_{T+1}, along the first axis: where each step ended."""
    averages: Vector
    """The averages of the points that steps started from, so of none that was taken back; the last is to be used."""
    step_sizes: Vector
    """eta_1, ..., eta_T; 0 where a batch was skipped."""
    smoothness: Vector
    """M in each step."""
    evaluations: int
    rejections: int
    rollbacks: int
    skipped: int


def sgdol_free(
    oracle: Oracle,
    x1: ArrayLike,
    horizon: int,
    *,
    momentum: float = 0.9,
    averaging: float = 8.0,
    weight_decay: float = 0.0,
) -> Run:
    r"""SGDOL without a smoothness constant.

    Args:
        oracle: ``oracle(t, x)`` returns the loss of batch t at x, and the k >= 2 gradients of its parts, stacked.
        x1: the first point.
        horizon: T, how many batches there are.
        momentum: beta.
        averaging: a of the polynomial average.
        weight_decay: decoupled.

    >>> rng = np.random.default_rng(0)
    >>> noise = rng.normal(size=(200, 2, 2))
    >>> H = np.array([1.0, 10.0])
    >>> def oracle(t, x):
    ...     return H @ x**2 / 2 + noise[t].mean(axis=0) @ x, H * x + noise[t]
    >>> run = sgdol_free(oracle, [3.0, -1.0], 200)
    >>> bool(1 < run.smoothness[-1] < 20), bool(np.linalg.norm(run.averages[-1]) < 0.2)
    (True, True)
    """
    beta, a = momentum, averaging
    x = np.array(x1, dtype=np.float64)
    average = x.copy()
    m, weight = np.zeros_like(x), 0.0
    t = 0
    S = N = V = 0.0
    penalty = 1.0
    since = 0
    eta = M = Q = Y = W = alpha = smax = G = mu = F0 = sd = late = later = 0.0
    capped = False
    evaluations = rejections = rollbacks = skipped = 0
    iterates, averages, step_sizes, smoothness = [x.copy()], [], [], []

    for batch in range(horizon):
        fx, parts = oracle(batch, x)
        evaluations += 1
        made = False
        finite = isfinite(fx) and bool(np.isfinite(parts).all())

        # The first point: one more call to check the closure, then probes along the gradient for a first M.
        if t == 0 and finite and np.any(_mean(parts)):
            g = _mean(parts)
            evaluations += 1
            length = _norm(x) / 64 or abs(fx) / _norm(g) / 8 or 1.0
            for _ in range(8):
                fp, probed = oracle(batch, x - length / _norm(g) * g)
                evaluations += 1
                fine = isfinite(fp) and np.isfinite(probed).all()
                change = _norm(_mean(probed) - g) / _norm(g) if fine else inf
                if 1 / 32 <= change <= 1 / 2:
                    M = change * _norm(g) / length
                    break
                M = (max(change, 1 / 32) if fine else 1.0) * _norm(g) / length
                length *= 1 / 64 if not fine else 64 if change == 0 else min(max(1 / 8 / change, 1 / 64), 64)
            Q = Y = M**2
            W = 1.0
            alpha = _dot(g, g)

        # 1. The guard on the loss.
        if t >= 10 and (not isfinite(fx) or fx - mu > max(4 * sd, 0.5 * (F0 - mu))):
            fs, there = oracle(batch, average)
            evaluations += 1
            fine = isfinite(fs) and np.isfinite(there).all()
            if fine and (not isfinite(fx) or fx - fs > max(2 * sd, 0.25 * (F0 - mu))):
                x, fx, parts, finite = average.copy(), fs, there, True
                m, weight, eta, since = np.zeros_like(x), 0.0, 0.0, 0
                penalty *= 2
                smax /= 2
                rollbacks += 1

        # 2. The look-back.
        g = _mean(parts)
        since += 1
        unusual = not finite or _norm(g) > 3 * G
        if eta > 0 and (since >= 10 or t <= 5 or capped or unusual):
            before = (x + eta * m / weight) / (1 - eta * weight_decay)
            fp, there = oracle(batch, before)
            evaluations += 1
            if isfinite(fp) and np.isfinite(there).all():
                since = 0
                q, s = _mean(there), x - before
                if _dot(s, s) > 0:
                    y = g - q
                    r = _dot(y, s) / _dot(s, s) if finite else 4 * M
                    if not finite or (r * _dot(s, s) > 4 * abs(_dot(q, s)) and r > M):
                        x, fx, parts, finite = before, fp, there, True
                        smax = min(smax, _norm(s) / 2)
                        M = min(r, 2 * M)
                        Q = Y = M**2
                        W = 1.0
                        rejections += 1
                    else:
                        kept = 0.8 if t <= 5 else 0.999**10
                        Q, Y, W = kept * Q + r * r, kept * Y + _dot(y, y) / _dot(s, s), kept * W + 1
                        M = sqrt(max(Q, 1e-6 * Y) / W)

        # 3. The step.
        if finite and alpha > 0:
            late += 9 / (t + 9) * (fx - late)
            later += 3 / (t + 3) * (fx - later)
            if t == 0:
                mu = F0 = fx
            else:
                error = abs(fx - mu)
                sd = error if sd == 0 else sd + 0.1 * (min(error, 4 * sd) - sd)
                mu += 0.1 * (fx - mu)
                if t < 10:
                    F0 = max(F0, mu)
            g = _mean(parts)
            m = beta * m + (1 - beta) * g
            weight = beta * weight + (1 - beta)
            d = m / weight
            falling = min(max((later - late) / (F0 - late) / 0.15, 0.0), 1.0) if late < F0 else 0.0
            gain = max(4 * alpha + S, 0.5 * sqrt(V))
            cost = 4 * alpha + max(S, 0) / 4 + (1 - 0.5 * falling) * max(N, 0)
            eta = gain / ((M + weight_decay) * cost) / penalty
            penalty = max(1.0, 0.95 * penalty)
            if t == 0:
                smax = 0.1 * eta * _norm(d) / 2
            capped = eta * _norm(d) > 2 * smax
            if capped:
                eta = 2 * smax / _norm(d)
            smax = max(smax, eta * _norm(d))
            average = average + min(1.0, (a + 1) / (t + 1 + a)) * (x - average)
            x = x - eta * (d + weight_decay * x)
            u = _signal(parts)
            S += u
            N += _dot(g, g) - u
            V += u * u
            G = max(_norm(g), 0.95 * G)
            t += 1
            made = True
        elif not finite:
            skipped += 1
        iterates.append(x.copy())
        averages.append(average.copy())
        step_sizes.append(eta if made else 0.0)
        smoothness.append(M)
    return Run(
        np.array(iterates),
        np.array(averages),
        np.array(step_sizes),
        np.array(smoothness),
        evaluations,
        rejections,
        rollbacks,
        skipped,
    )


def _mean(parts: Vector) -> Vector:
    return np.asarray(sum(parts) / len(parts))


def _signal(parts: Vector) -> float:
    """The mean of <g_i, g_j> over i != j."""
    k = len(parts)
    return sum(_dot(parts[i], parts[j]) for i in range(k) for j in range(k) if i != j) / (k * (k - 1))


def _dot(a: Vector, b: Vector) -> float:
    return float(a @ b)


def _norm(v: Vector) -> float:
    return float(np.linalg.norm(v))
