"""Problems that both the reference of SGDOLFree and the optimizer can evaluate, and the two compared on them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loops import closure_of, flat
from torch import nn

from sgdol import SGDOLFree
from sgdol.reference_free import Run, sgdol_free

D = 6
SHAPES = [(3,), (1, 2), ()]
SIZES = [3, 2, 1]
START = np.array([0.5, -0.4, 0.3, -0.2, 0.1, 0.6])
CURVATURES = torch.tensor(np.logspace(0, 2, D))


def noisy(value: Callable, level: float, seed: int = 0) -> Callable:
    """A maker of loss(x, batch, part): a function of a flat vector, and a slope that is another in each part."""

    def make(k: int = 2) -> Callable:
        shifts = torch.tensor(level * np.random.default_rng(seed).normal(size=(2000, k, D)))
        return lambda x, t, part: value(x, t) + (shifts[t, part] * x).sum()

    return make


def quadratic(x, t):
    """Ill-conditioned."""
    return (CURVATURES * x * x).sum() / 2


def rosenbrock(x, t):
    """Curvature rises two hundredfold along the way."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def ledge(x, t):
    """A slope with next to no curvature that ends at a steep wall: steps into it are rejected."""
    return (x * x).sum() / 200 - x.sum() + 300 * (x - 3).clamp(min=0).square().sum()


def cliff(k: int = 2):
    """A quadratic that from the 30th batch on is a hundred times as steep, and a wall: the guard has to act."""
    gentle = noisy(quadratic, 0.5)(k)
    return lambda x, t, part: gentle(x, t, part) if t < 30 else 40 * gentle(x, t, part) + torch.exp(10 * x.abs()).sum()


def burst(k: int = 2):
    """Every ninth batch has three hundred times the noise, the fifth first: its gradient is clipped."""
    gentle, wild = noisy(quadratic, 0.5)(k), noisy(quadratic, 150)(k)
    return lambda x, t, part: (wild if t % 9 == 4 else gentle)(x, t, part)


def outlier(k: int = 2):
    """The first batch counts a hundred times: its gradient is shortened once the second is known."""
    usual = noisy(quadratic, 0.5)(k)
    return lambda x, t, part: (1.0 if t else 100.0) * usual(x, t, part)


PROBLEMS = {
    "quadratic": noisy(quadratic, 0.5),
    "rosenbrock": noisy(rosenbrock, 0.2),
    "cliff": cliff,
    "ledge": noisy(ledge, 0.05),
    "burst": burst,
    "outlier": outlier,
}
STEPS = {"ledge": 16, "cliff": 40}
"""After it has bounced off the wall, roundings grow."""


def oracle_of(loss: Callable, k: int = 2) -> Callable:
    def oracle(t, x):
        losses, gradients = [], []
        for part in range(k):
            z = torch.tensor(x, requires_grad=True)
            value = loss(z, t, part)
            value.backward()
            losses.append(float(value.detach()))
            gradients.append(z.grad.numpy())
        return sum(losses) / k, np.array(gradients)

    return oracle


def parameters(x: Any = START) -> list[nn.Parameter]:
    parts = np.split(np.asarray(x, dtype=np.float64), np.cumsum(SIZES)[:-1])
    return [nn.Parameter(torch.tensor(v).reshape(s)) for v, s in zip(parts, SHAPES, strict=True)]


def joined(params) -> torch.Tensor:
    """All parameters end to end, through which gradients flow."""
    return torch.cat([p.reshape(-1) for p in params])


def problem_closure(opt, params, loss, t, k=2, scale_f=1.0, scale_x=1.0, after=lambda: None):
    return closure_of(opt, lambda: (scale_f * loss(joined(params) / scale_x, t, i) / k for i in range(k)), after)


class Trained(NamedTuple):
    iterates: np.ndarray
    average: np.ndarray
    step_sizes: np.ndarray
    calls: int
    opt: SGDOLFree
    params: list[nn.Parameter]

    def agrees_with(self, expected: Run, rtol: float = 1e-12) -> None:
        """Every iterate, the average, the smoothness in the end, and how often what happened."""
        np.testing.assert_allclose(self.iterates, expected.iterates, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(self.average, expected.averages[-1], rtol=rtol, atol=rtol)
        report = self.opt.diagnostics()
        assert report["smoothness"] == pytest.approx(expected.smoothness[-1], rel=10 * rtol)
        for name in ("evaluations", "rejections", "rollbacks", "skipped"):
            assert report[name] == getattr(expected, name), name


def train(
    problem: str | Callable,
    steps: int | None = None,
    *,
    k: int = 2,
    start: np.ndarray = START,
    scale_f: float = 1.0,
    scale_x: float = 1.0,
    rates: Callable[[int], Sequence[float]] | None = None,
    step: Callable | None = None,
    **options: Any,
) -> Trained:
    """Train on a problem, or on one of one's own.

    Args:
        problem: a name, or a function that makes the loss.
        steps: how many; those of the problem if None.
        k: how many parts a batch has.
        start: where to begin.
        scale_f: a, the loss is a f(x / b).
        scale_x: b.
        rates: lr of each of the three parameters at each step; each is then a group.
        step: one step of the loop, step(opt, params, loss, t), in place of a closure.
        options: those of the optimizer.
    """
    steps = steps or STEPS.get(problem, 60)
    loss, params, calls = PROBLEMS.get(problem, problem)(k), parameters(scale_x * start), []
    given = params if rates is None else [{"params": [p], "lr": r} for p, r in zip(params, rates(0), strict=True)]
    opt = SGDOLFree(given, **options)
    iterates, step_sizes = [flat(params).numpy().copy()], []
    for t in range(steps):
        for group, rate in zip(opt.param_groups, rates(t) if rates else (), strict=rates is not None):
            group["lr"] = rate
        if step is None:
            opt.step(problem_closure(opt, params, loss, t, k, scale_f, scale_x, lambda: calls.append(t)))  # noqa: B023
        else:
            step(opt, params, loss, t)
        iterates.append(flat(params).numpy().copy())
        step_sizes.append([group["step_size"] for group in opt.param_groups])
    with opt.averaged():
        average = flat(params).numpy().copy()
    return Trained(np.array(iterates), average, np.array(step_sizes), len(calls), opt, params)


def reference(problem: str | Callable, steps: int | None = None, *, k: int = 2, start=START, **options: Any) -> Run:
    """The same by the reference."""
    loss = PROBLEMS.get(problem, problem)(k)
    return sgdol_free(oracle_of(loss, k), start, steps or STEPS.get(problem, 60), tensors=SIZES, **options)
