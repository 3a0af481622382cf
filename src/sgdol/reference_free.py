r"""SGDOL without M, from top to bottom in one function: numpy, float64, slow and obvious. This is the truth.

Nothing here is shared with the fast code, on purpose: whoever doubts an optimizer of this library can compare it with
these lines and with ``docs/explanation/without_smoothness.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Run", "sgdol_free"]

Vector = NDArray[np.float64]
Oracle = Callable[[int, Vector], tuple[float, Vector]]
MetricFunction = Callable[[Sequence[Vector], Vector, NDArray[np.intp]], ArrayLike | tuple[ArrayLike, float]]
"""D from the (clipped) mean gradients of the steps before, the present one and the number of each coordinate's tensor:
a positive definite matrix, or the diagonal of one. With a number beside it, that is the mean of the past <g, D^-1 g>
that gradients are clipped by; without it, each past gradient counts in the norm of its own step."""


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
    clipped: int
    """How many gradients were shortened."""


def sgdol_free(
    oracle: Oracle,
    x1: ArrayLike,
    horizon: int,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    averaging: float = 8.0,
    metric: Literal["rms", "euclidean"] | MetricFunction = "rms",
    tensors: Sequence[int] | None = None,
    counts: ArrayLike | None = None,
    rates: Callable[[int], Vector] | None = None,
    max_norm: float = inf,
) -> Run:
    r"""SGDOL without a smoothness constant.

    Args:
        oracle: ``oracle(t, x)`` returns the loss of batch t at x, and the k >= 2 gradients of its parts, stacked.
        x1: the first point.
        horizon: T, how many batches there are.
        momentum: beta.
        weight_decay: in units of the root mean square of the direction, as AdamW's.
        averaging: a of the polynomial average.
        metric: ``"rms"``, the diagonal D of the roots of mean squared gradients; ``"euclidean"``, D = 1; or a function
            that makes D (:data:`MetricFunction`).
        tensors: how many coordinates each tensor has, in order; None if there is one tensor.
        counts: how much the square of each of the k gradients counts at each coordinate, which sums to k over them:
            ranks that have pieces of D measure their own gradient there only. None for 1. D is diagonal, otherwise.
        rates: ``rates(t)`` are the multipliers lambda >= 0 of the coordinates in batch t, the same in each tensor; None
            for 1. Their ratios rho = lambda/max(lambda) change the metric to D/rho, in which everything is measured
            and learned; the largest multiplies the step that was learned. Needs ``"rms"`` or ``"euclidean"``.
        max_norm: the user shortens gradients to this length, in Euclid's norm, before each step. Curvatures are
            measured of gradients as they were, and a point that a step goes back to has one that nobody shortened.

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
    sizes = [len(x)] if tensors is None else list(tensors)
    tensor_of = np.repeat(np.arange(len(sizes)), sizes)
    past: list[Vector] = []
    seen = seen_weight = 0.0
    before = average = x.copy()
    m, weight = np.zeros_like(x), 0.0
    v, w = np.zeros_like(x), 0.0
    t = 0
    S = N = V = 0.0
    penalty = 1.0
    since = 0
    multiplied = 1.0
    eta = M = M1 = Q = Y = W = alpha = smax = G = mu = F0 = sd = late = later = 0.0
    capped, looks = False, 0
    evaluations = rejections = rollbacks = skipped = clipped = 0
    iterates, averages, step_sizes, smoothness = [x.copy()], [], [], []

    for batch in range(horizon):
        fx, parts = oracle(batch, x)
        evaluations += 1
        made = False
        finite = isfinite(fx) and bool(np.isfinite(parts).all())
        g = _mean(parts)
        given = max_norm / float(np.linalg.norm(g)) if finite and np.linalg.norm(g) > max_norm else 1.0

        # The metric: D of past gradients; at the first point, where there are none, a constant in each tensor.
        usual = seen / seen_weight if t else 0.0
        D = np.ones_like(x)
        if callable(metric) and (finite or t):
            made_of_past = metric(past, g, tensor_of)
            if isinstance(made_of_past, tuple):
                made_of_past, usual = made_of_past
            D = np.asarray(made_of_past, dtype=np.float64)
        elif metric == "rms" and (finite or t):
            mean = v / w if t else g**2
            D = (v + 0.01 * _tensor_means(mean, sizes)) / (w + 0.01) if t else _tensor_means(mean, sizes)
            D = np.sqrt(D + 1e-4 * mean.mean())
            D = D / sqrt(np.mean(D**2)) if np.any(D) else np.ones_like(x)
        lambdas = np.ones_like(x) if rates is None else np.asarray(rates(batch), dtype=np.float64)
        factor = float(lambdas.max())
        with np.errstate(divide="ignore"):
            D = D if rates is None or factor == 0 else D / (lambdas / factor)  # infinite where nothing is to move
        if metric == "rms" and t:
            usual = np.sum(v / D) / w  # the mean of n, had this metric always been there

        # The first point: one more call to check the closure, then probes along the gradient for a first M.
        if t == 0 and finite and np.any(g):
            evaluations += 1
            norm = _norm(g, _solve(D, g))
            length = _norm(x, _times(D, x)) / 64 or abs(fx) / norm / 8 or 1.0
            short: list[tuple[float, float]] = []
            long: list[tuple[float, float]] = []
            for _ in range(8):
                fp, probed = oracle(batch, x - length / norm * _solve(D, g))
                evaluations += 1
                fine = isfinite(fp) and np.isfinite(probed).all()
                y = _mean(probed) - g
                change = _norm(y, _solve(D, y)) / norm if fine else inf
                if 1 / 32 <= change <= 1 / 2:
                    M = change * norm / length
                    break
                (short if change < 1 / 32 else long).append((length, change))
                M = norm / 32 / max(short)[0] if short else (change if fine else 1.0) * norm / length
                if short and long:
                    length = sqrt(max(short)[0] * min(long)[0])
                elif not fine:
                    length /= 64
                else:
                    length *= 64 if change == 0 else min(max(1 / 8 / change, 1 / 64), 64)
            M1 = M
            alpha = norm**2

        # 1. The guard on the loss.
        if t >= 10 and (not isfinite(fx) or fx - mu > penalty**2 * max(4 * sd, 0.5 * (F0 - mu))):
            fs, there = oracle(batch, average)
            evaluations += 1
            fine = isfinite(fs) and np.isfinite(there).all()
            if fine and (not isfinite(fx) or fx - fs > max(2 * sd, 0.25 * (F0 - mu), fs - mu)):
                y, s = _mean(parts) - _mean(there), x - average
                ss = _norm(s, _times(D, s)) ** 2
                r = (float(y @ s) / ss if ss > 0 else 0.0) if finite else 4 * M
                M = min(max(r, M), 2 * M)
                x, fx, parts, finite, given = average.copy(), fs, there, True, 1.0
                m, weight, eta, since = np.zeros_like(x), 0.0, 0.0, 0
                penalty = min(2 * penalty, 8.0)
                smax /= 2
                rollbacks += 1

        # The second gradient tells whether the first was an outlier.
        g = _mean(parts)
        norm = _norm(g, _solve(D, g)) if finite else inf
        if t == 1 and 0 < 3 * norm < sqrt(alpha):
            f = norm / sqrt(alpha)
            m, G, M, M1 = f * m, f * G, f * M, f * M1
            past, v, seen, alpha = [f * p for p in past], f**2 * v, f**2 * seen, f**2 * alpha
            S, N, V = f**2 * S, f**2 * N, f**4 * V

        # 2. The look-back.
        since += 1
        unusual = norm > 3 * G
        if eta > 0 and (since >= min(24, max(1, t / 6)) or t <= 5 or capped or unusual):
            fp, there = oracle(batch, before)
            evaluations += 1
            if isfinite(fp) and np.isfinite(there).all():
                since = 0
                q, s = _mean(there), x - before
                ss = _norm(s, _times(D, s)) ** 2
                if ss > 0:
                    y = g - q
                    r = float(y @ s) / ss if finite else 4 * M
                    count = sqrt(t + 1)
                    share = count * min(1.0, (4 * M / r) ** 2) if r != 0 else count
                    if not finite or (y @ s > 4 * abs(q @ s) and r > M):
                        x, fx, parts, finite, given = before, fp, there, True, 1.0
                        smax = min(smax, sqrt(ss) / multiplied / 2)
                        M = min(r, 2 * M)
                        Q = Y = count * M**2
                        W = count
                        M1 = 0.0
                        rejections += 1
                    else:
                        Q, Y, W = Q + share * r**2, Y + share * _norm(y, _solve(D, y)) ** 2 / ss, W + count
                        looks += 1
                        counted = M1 if looks < 12 else 0.0
                        found = sqrt((max(Q, 1e-6 * Y) + counted**2) / (W + (counted > 0)))
                        slowly = min(M, max(M / 2, 36 / looks * abs(r))) if counted < M1 else 0.0
                        M1 = M1 if slowly > found else counted
                        M = max(found, slowly) if found > 0 else M

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
            u, n = _signal(parts, D, counts), _norm(g, _solve(D, g)) ** 2
            longest = 3 * G if t < 20 else 2 * sqrt(usual)
            kappa = min(given, longest / sqrt(n)) if longest > 0 and n > 0 else given
            clipped += kappa < 1
            g = kappa * g
            m = beta * m + (1 - beta) * g
            weight = beta * weight + (1 - beta)
            length = _norm(m, _solve(D, m)) / weight
            falling = min(max((later - late) / (F0 - late) / 0.15, 0.0), 1.0) if late < F0 else 0.0
            gain = max(4 * alpha + S, 0.5 * sqrt(V))
            largest = 1 if t < 20 else 4
            cost = 4 * alpha + max(S, 0) / largest + (1 - 0.5 * falling) * max(N, 0)
            eta = gain / (M * cost) / penalty
            penalty = max(1.0, 0.95 * penalty)
            if t == 0:
                smax = 0.1 * eta * length / 2
            capped = eta * length > 2 * smax
            if capped:
                eta = 2 * smax / length
            smax = max(smax, eta * length)
            average = average + min(1.0, (a + 1) / (t + 1 + a)) * (x - average)
            before = x
            d = _solve(D, m) / weight
            x = x - factor * eta * (d + weight_decay * sqrt(np.mean(d**2)) * (lambdas / (factor or 1.0)) * x)
            multiplied = factor
            G = max(sqrt(n) * (kappa / given if t < 20 else 1), 0.95 * G)
            u, n = kappa**2 / given * u, kappa**2 * n  # what the user has shortened is shorter in the direction only
            S += u
            N += n - u
            V += u**2
            v, w = 0.99 * v + g**2, 0.99 * w + 1
            seen, seen_weight = 0.99 * seen + n, 0.99 * seen_weight + 1
            past.append(g)
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
        clipped,
    )


def _mean(parts: Vector) -> Vector:
    return np.asarray(sum(parts) / len(parts))


def _signal(parts: Vector, D: Vector, counts: ArrayLike | None) -> float:
    """The mean of <g_i, D^-1 g_j> over i != j."""
    k = len(parts)
    if counts is not None:
        total = np.sum(parts, axis=0)
        return float(total @ (total / D) - np.sum(np.asarray(counts) * parts**2 / D)) / (k * (k - 1))
    return sum(float(parts[i] @ _solve(D, parts[j])) for i in range(k) for j in range(k) if i != j) / (k * (k - 1))


def _norm(a: Vector, b: Vector) -> float:
    """The root of <a, b>: of a gradient g and D^-1 g, or of a step s and D s."""
    return sqrt(max(float(a @ b), 0.0))


def _solve(D: Vector, g: Vector) -> Vector:
    """D^-1 g, of a matrix D or of its diagonal."""
    return np.asarray(np.linalg.solve(D, g) if D.ndim == 2 else g / D, dtype=np.float64)


def _times(D: Vector, s: Vector) -> Vector:
    """D s, likewise; of what is not to move it is 0."""
    return D @ s if D.ndim == 2 else np.where(np.isinf(D), 0.0, D) * s


def _tensor_means(values: Vector, sizes: list[int]) -> Vector:
    """Each tensor's mean, at each of its coordinates."""
    pieces = np.split(values, np.cumsum(sizes)[:-1])
    return np.concatenate([np.full(len(piece), piece.mean()) for piece in pieces])
