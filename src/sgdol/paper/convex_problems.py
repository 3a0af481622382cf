r"""Convex problems with known constants: logistic and softmax regression on the adult data, least squares, Huber.

Each has a smoothness M that holds everywhere and a minimum that is known, by Newton's method where there is no formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgdol import convexity
from sgdol.paper.data import ATTRIBUTES, balanced_adult, load_a9a

__all__ = ["Convex", "double_precision", "huber", "least_squares", "problems", "softmax"]

Array = NDArray[np.float64]


def double_precision() -> Any:
    """A context in which jax computes in float64."""
    return jax.enable_x64(True)


@dataclass(frozen=True, eq=False)
class Convex:
    """A convex problem; what is a number or an array of it stands in ``data``, so that like ones share a program."""

    name: str
    data: dict[str, Any]
    """x1, smoothness (M), minimum (f*), distance (||x_1 - x*||, the unit of AdaGrad-Norm's rates), and its own."""
    value: Callable[[Any, Any], Any]
    """(data, x) -> f(x)."""
    gradients: Callable[[Any, Any, Any], Any]
    """(data, x, key) -> two independent stochastic gradients, shape (2, d)."""
    horizon: int


BATCH = 8
"""The minibatch of each of the two gradients on the adult data."""


def _logits(data: Any, x: Any, rows: Any) -> Any:
    weights = x.reshape(-1, data["features"].shape[1])
    scores = data["features"][rows] @ weights.T
    return jnp.concatenate([jnp.zeros((*scores.shape[:-1], 1)), scores], axis=-1)


def _softmax_value(data: Any, x: Any) -> Any:
    logits = _logits(data, x, slice(None))
    chosen = jnp.sum(logits * data["targets"], axis=1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen) + data["ridge"] / 2 * x @ x


def _softmax_gradient(data: Any, x: Any, rows: Any) -> Any:
    slopes = jax.nn.softmax(_logits(data, x, rows)) - data["targets"][rows]
    return (slopes[:, 1:].T @ data["features"][rows]).reshape(-1) / len(rows) + data["ridge"] * x


def _softmax_gradients(data: Any, x: Any, key: Any) -> Any:
    rows = jax.random.randint(key, (2, BATCH), 0, data["features"].shape[0])
    return jax.vmap(lambda some: _softmax_gradient(data, x, some))(rows)


def softmax(name: str, features: Array, labels: NDArray[np.int64], *, ridge: float, horizon: int) -> Convex:
    r"""Softmax regression with an l2 penalty (logistic, for two classes), the first class's logit fixed at 0.

    The Hessian of the softmax is at most 1/2, and 1/4 for two classes, so
    :math:`M = \frac12 \lambda_{\max}(A^\top A/m) + \mathrm{ridge}`. Minibatches are drawn with replacement.

    >>> problem = softmax("two", np.eye(2), np.array([0, 1]), ridge=0.1, horizon=10)
    >>> round(problem.data["smoothness"], 6), bool(problem.data["minimum"] < np.log(2))
    (0.225, True)
    """
    classes = int(labels.max()) + 1
    bound = 0.25 if classes == 2 else 0.5
    solution = _newton(features, labels, classes, ridge)
    data = {
        "x1": np.zeros_like(solution),
        "smoothness": float(bound * np.linalg.eigvalsh(features.T @ features / len(labels))[-1] + ridge),
        "distance": float(np.linalg.norm(solution)),
        "features": features,
        "targets": np.eye(classes)[labels],
        "ridge": ridge,
    }
    with double_precision():
        data["minimum"] = float(_softmax_value(data, jnp.asarray(solution)))
        residual = float(jnp.linalg.norm(_softmax_gradient(data, jnp.asarray(solution), np.arange(len(labels)))))
    if residual > 1e-7:
        raise RuntimeError(f"Newton's method did not find the minimum of {name}: the gradient there is {residual:g}")
    return Convex(name, data, _softmax_value, _softmax_gradients, horizon)


def _newton(features: Array, labels: NDArray[np.int64], classes: int, ridge: float) -> Array:
    """The minimiser, by Newton's method with halved steps, in numpy."""
    samples, width = features.shape
    targets = np.eye(classes)[labels]
    w = np.zeros((classes - 1, width))

    def parts(w: Array) -> tuple[float, Array]:
        logits = np.column_stack([np.zeros(samples), features @ w.T])
        top = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - top).sum(axis=1, keepdims=True)
        loss = np.mean(top + np.log(total)) - np.mean((logits * targets).sum(1)) + ridge / 2 * np.sum(w**2)
        return float(loss), np.exp(logits - top) / total

    for _ in range(30):
        loss, p = parts(w)
        gradient = (p - targets)[:, 1:].T @ features / samples + ridge * w
        if np.linalg.norm(gradient) < 1e-10:
            break
        blocks = [
            [(features * (p[:, a] * ((a == b) - p[:, b]))[:, None]).T @ features / samples for b in range(1, classes)]
            for a in range(1, classes)
        ]
        hessian = np.block(blocks) + ridge * np.eye(w.size)
        step = np.linalg.solve(hessian, gradient.reshape(-1)).reshape(w.shape)
        scale = 1.0
        while parts(w - scale * step)[0] > loss and scale > 1e-6:
            scale /= 2
        w = w - scale * step
    return w.reshape(-1)


def _quadratic_value(data: Any, x: Any) -> Any:
    return 0.5 * x @ (data["spectrum"] * x)


def _additive(data: Any, x: Any, key: Any) -> Any:
    signs = jax.random.rademacher(key, (2, x.shape[0]), dtype=x.dtype)
    return data["spectrum"] * x + data["noise"] / x.shape[0] ** 0.5 * signs


def _multiplicative(data: Any, x: Any, key: Any) -> Any:
    rows = data["rows"][jax.random.randint(key, (2, 4), 0, data["rows"].shape[0])]
    return jnp.einsum("kbd,kb->kd", rows, rows @ x) / 4


def least_squares(
    condition: float, *, multiplicative: bool, dimension: int = 20, noise: float = 1.0, horizon: int, seed: int = 0
) -> Convex:
    r"""Least squares :math:`f(x) = \frac12 x^\top H x`, the spectrum of H log-spaced from 1 down to 1/condition.

    Multiplicative noise: four rows of an interpolating system, :math:`a_i a_i^\top x` each, so that all noise vanishes
    at the minimum. Additive noise: :math:`\pm \mathrm{noise}/\sqrt d` on every coordinate.

    >>> least_squares(10.0, multiplicative=False, horizon=10).data["smoothness"]
    1.0
    """
    rng = np.random.default_rng(seed)
    spectrum = np.logspace(0, -np.log10(condition), dimension)
    data = {
        "x1": 3 * rng.choice([-1.0, 1.0], size=dimension) / np.sqrt(dimension),
        "smoothness": 1.0,
        "minimum": 0.0,
        "distance": 3.0,
        "spectrum": spectrum,
    }
    if multiplicative:
        data["rows"] = np.linalg.qr(rng.normal(size=(200, dimension)))[0] * np.sqrt(200 * spectrum)
    else:
        data["noise"] = noise
    kind = "multiplicative" if multiplicative else "additive"
    gradients = _multiplicative if multiplicative else _additive
    return Convex(f"least squares, {kind}, condition {condition:g}", data, _quadratic_value, gradients, horizon)


def _huber_value(data: Any, x: Any) -> Any:
    size, slope = jnp.abs(x[0]), data["slope"]
    return jnp.where(size > slope, slope * size - slope**2 / 2, size**2 / 2)


def _huber_gradients(data: Any, x: Any, key: Any) -> Any:
    slope = jnp.zeros_like(x).at[0].set(jnp.clip(x[0], -data["slope"], data["slope"]))
    return slope + data["noise"] / x.shape[0] ** 0.5 * jax.random.rademacher(key, (2, x.shape[0]), dtype=x.dtype)


def huber(horizon: int, dimension: int = 32) -> Convex:
    """The hard instance of :func:`sgdol.convexity.hard_instance` for that horizon: M = D = v = 1, noise in all of d.

    f depends on the first coordinate alone; v is the variance of the direction, half that of one of two gradients.
    """
    hard = convexity.hard_instance(smoothness=1.0, distance=1.0, variance=1.0, horizon=horizon)
    data = {
        "x1": np.eye(dimension)[0],
        "smoothness": 1.0,
        "minimum": 0.0,
        "distance": 1.0,
        "slope": hard.slope,
        "best": hard.largest_step,
        "noise": 2**0.5,
    }
    return Convex(f"Huber, T = {horizon}", data, _huber_value, _huber_gradients, horizon)


def _income(people: int, horizon: int) -> Convex:
    whole = balanced_adult()
    some = np.random.default_rng(0).choice(len(whole.labels), people, replace=False)
    labels = (whole.labels[some] > 0).astype(np.int64)
    return softmax("logistic, adult", whole.features[some], labels, ridge=1e-3, horizon=horizon)


def _marital_status(people: int, horizon: int) -> Convex:
    """An attribute with seven values as the class, the other thirteen as features."""
    a9a, _ = load_a9a()
    widths = [attribute.width for attribute in ATTRIBUTES]
    which = [attribute.name for attribute in ATTRIBUTES].index("marital-status")
    columns = slice(sum(widths[:which]), sum(widths[: which + 1]))
    rows = np.random.default_rng(1).choice(len(a9a), people, replace=False)
    _, labels = np.unique(a9a[rows, columns].argmax(axis=1), return_inverse=True)
    others = np.delete(a9a[rows], np.r_[columns], axis=1).astype(np.float64)
    features = np.column_stack([others, np.ones(people)])
    return softmax("softmax, adult's marital status", features, labels, ridge=1e-3, horizon=horizon)


def problems(horizon: int = 20_000, people: int = 2000, only: str = "") -> list[Convex]:
    """All of them but the hard instance, or those whose names have ``only`` in them; the adult ones run half as long.

    >>> [problem.name for problem in problems(only="additive, condition 10")]
    ['least squares, additive, condition 10', 'least squares, additive, condition 100']
    """
    found = []
    if only in "logistic, adult":
        found.append(_income(people, max(horizon // 2, 10)))
    if only in "softmax, adult's marital status":
        found.append(_marital_status(people, max(horizon // 2, 10)))
    found += [least_squares(c, multiplicative=m, horizon=horizon) for m in (False, True) for c in (1.0, 10.0, 100.0)]
    return [problem for problem in found if only in problem.name]
