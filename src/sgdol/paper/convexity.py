r"""Does convexity help? The experiments of docs/explanation/convexity.md, on problems that satisfy its assumptions.

``run(out)`` measures how fast :math:`f - f^\star` falls at the last iterate and at the average of the iterates, on
convex problems whose M is known, and writes ``convexity.csv``, ``convexity-curves.csv`` and a figure; ``section(out)``
is what a report says of it. Every method takes the same samples per step: SGDOL sees them as two halves, the others
their mean.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray
from optax import contrib

from sgdol.jax import sgdol
from sgdol.learners import FTRL, Floored
from sgdol.paper.convex_problems import Convex, double_precision, huber, problems
from sgdol.paper.methods import adagrad_global

__all__ = ["HEADER", "METHODS", "PROSE", "Curve", "Rule", "measure", "run", "slope", "table"]

Array = NDArray[np.float64]


# Methods --------------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A method: from a problem's data and a rate to an optax transformation, the rates to try, what it sees."""

    make: Callable[[Any, Any], optax.GradientTransformation]
    rates: tuple[float, ...] = (1.0,)
    halves: bool = False
    """Whether it is given both gradients; the others are given their mean."""


GRID = tuple(10.0 ** (e / 2) for e in range(-7, 4))
METHODS: dict[str, Rule] = {
    "SGDOL": Rule(
        lambda data, r: sgdol(r / data["smoothness"], momentum=0.0, learner=FTRL(), record=False), halves=True
    ),
    "SGDOL, floored": Rule(
        lambda data, r: sgdol(r / (2 * data["smoothness"]), momentum=0.0, learner=Floored(floor=1.0), record=False),
        halves=True,
    ),
    "AdaGrad-Norm, tuned": Rule(lambda data, r: adagrad_global(r * 3 * data["distance"]), GRID),
    "DoG": Rule(lambda data, r: contrib.dog(r)),
    "SGD, best constant": Rule(lambda data, r: optax.sgd(r / data["smoothness"]), GRID),
    "SGD, best c/√t": Rule(
        lambda data, r: optax.sgd(lambda count: r / (data["smoothness"] * jnp.sqrt(count + 1.0))),
        tuple(3 * r for r in GRID),
    ),
}
BEST_OF_THE_SURROGATE = Rule(lambda data, r: optax.sgd(r * data["best"]))
"""On the hard instance, the largest step that can be the surrogate's best in hindsight."""

POINTS = 40


class Curve(NamedTuple):
    """How f - f* falls, shape (repeats, times)."""

    times: NDArray[np.int64]
    last: Array
    average: Array
    rate: float


@functools.cache
def _program(
    value: Callable[[Any, Any], Any], gradients: Callable[[Any, Any, Any], Any], rule: Rule
) -> Callable[[Any, Any, Any, Any], Any]:
    """From data, rates, keys and the spans between two records to f - f*, shape (rates, repeats, times, 2)."""

    def one(data: Any, rate: Any, key: Any, spans: Any) -> Any:
        optimizer = optax.with_extra_args_support(rule.make(data, rate))
        x = data["x1"]

        def step(t: Any, carry: Any) -> Any:
            x, mean, state = carry
            grads = gradients(data, x, jax.random.fold_in(key, t))
            updates, state = optimizer.update(grads if rule.halves else jnp.mean(grads, axis=0), state, x)
            x = x + updates
            return x, mean + (x - mean) / (t + 2.0), state  # t counts from 0: the mean of x_1, ..., x_{t+2}

        def to_next(carry: Any, span: Any) -> tuple[Any, Any]:
            carry = jax.lax.fori_loop(span[0], span[1], step, carry)
            return carry, jnp.stack([value(data, carry[0]), value(data, carry[1])]) - data["minimum"]

        return jax.lax.scan(to_next, (x, x, optimizer.init(x)), spans)[1]

    lanes = jax.vmap(one, in_axes=(None, 0, None, None))
    return jax.jit(jax.vmap(lanes, in_axes=(None, None, 0, None), out_axes=1))


def measure(problem: Convex, rule: Rule, repeats: int, seed: int) -> Curve:
    """All repeats and rates side by side; the rate whose average is best at the horizon is kept."""
    times = np.geomspace(1, problem.horizon, POINTS).round().astype(np.int64)
    ends = times - 1  # x_t is there after t - 1 steps
    spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    with double_precision():
        data = jax.tree.map(jnp.asarray, problem.data)
        keys = jax.random.split(jax.random.key(seed), repeats)
        program = _program(problem.value, problem.gradients, rule)
        found = np.asarray(program(data, jnp.asarray(rule.rates), keys, jnp.asarray(spans)))
    final = np.nan_to_num(found[:, :, -1, 1].mean(axis=1), nan=np.inf)
    best = int(final.argmin())
    return Curve(times, found[best, :, :, 0], found[best, :, :, 1], float(rule.rates[best]))


def slope(times: Any, gaps: Array, decades: float = 1.5) -> tuple[float, float]:
    """The slope of log gap over log t in the last decades: its mean over the repeats and its standard deviation.

    >>> t = np.geomspace(1, 1e4, 30)
    >>> [round(v, 6) + 0.0 for v in slope(t, np.stack([t**-0.5, 3 * t**-0.5]))]
    [-0.5, 0.0]
    """
    late = np.asarray(times) >= times[-1] / 10**decades
    logs = np.log(np.maximum(gaps[:, late], 1e-300))
    fits = np.polyfit(np.log(np.asarray(times)[late]), logs.T, 1)[0]
    return float(fits.mean()), float(fits.std())


HORIZONS = (300, 1000, 3000, 10_000, 30_000)
HARD = "Huber, made for its horizon"


def _hard(rules: dict[str, Rule], repeats: int, seed: int, horizons: tuple[int, ...]) -> dict[str, Curve]:
    """On the hard instance, the gap at the end as a function of the horizon that the instance is made for."""
    found = {}
    for name, rule in {**rules, "SGD, the surrogate's best step": BEST_OF_THE_SURROGATE}.items():
        curves = [measure(huber(horizon), rule, repeats, seed) for horizon in horizons]
        last = np.stack([curve.last[:, -1] for curve in curves], axis=1)
        average = np.stack([curve.average[:, -1] for curve in curves], axis=1)
        found[name] = Curve(np.array(horizons), last, average, curves[-1].rate)
    return found


def _slope_of_means(horizons: NDArray[np.int64], gaps: Array) -> tuple[float, float]:
    """The slope of the means over the repeats, whose single ends are noisy, and its jackknife standard error."""
    repeats = len(gaps)

    def fit(some: Array) -> float:
        return float(np.polyfit(np.log(horizons), np.log(some.mean(axis=0)), 1)[0])

    left_out = np.array([fit(np.delete(gaps, i, axis=0)) for i in range(repeats)])
    return fit(gaps), float(np.sqrt((repeats - 1) * left_out.var()))


FIELDS = ("problem", "method", "iterate", "gap", "gap_std", "slope", "slope_std", "rate")


def run(
    out: Path,
    *,
    horizon: int = 20_000,
    repeats: int = 6,
    seed: int = 0,
    people: int = 2000,
    hard_horizons: tuple[int, ...] = HORIZONS,
    methods: Sequence[str] = tuple(METHODS),
    only: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Measure everything and write ``convexity.csv``, ``convexity-curves.csv`` and the figure into ``out``.

    Args:
        out: the folder.
        horizon: T of least squares; the adult problems run half as long.
        repeats: how many runs with samples of their own; eight times as many on the hard instance, which is small.
        seed: of the samples.
        people: how many of the adult data's.
        hard_horizons: for which the hard instance is made.
        methods: which of :data:`METHODS`.
        only: a part of the names of the problems to measure; the hard instance is measured in any case.
        progress: told what is being measured.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, Curve]] = {}
    rules = {name: METHODS[name] for name in methods}
    for problem in problems(horizon, people, only):
        progress(problem.name)
        curves[problem.name] = {name: measure(problem, rule, repeats, seed) for name, rule in rules.items()}
    progress("the hard instance")
    curves[HARD] = _hard(rules, 8 * repeats, seed, hard_horizons)
    for name, found in curves.items():
        fit = _slope_of_means if name == HARD else slope
        for method, curve in found.items():
            for iterate, gaps in (("last", curve.last), ("average", curve.average)):
                values = (name, method, iterate, float(gaps[:, -1].mean()), float(gaps[:, -1].std()))
                rows.append(dict(zip(FIELDS, (*values, *fit(curve.times, gaps), curve.rate), strict=True)))
    _write(out / "convexity.csv", FIELDS, rows)
    _write(
        out / "convexity-curves.csv",
        ("problem", "method", "t", "last", "average"),
        [
            {"problem": p, "method": m, "t": int(t), "last": float(a), "average": float(b)}
            for p, found in curves.items()
            for m, c in found.items()
            for t, a, b in zip(c.times, c.last.mean(0), c.average.mean(0), strict=True)
        ],
    )
    _draw(curves, out / "convexity.png")
    return rows


def _write(path: Path, fields: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


COLOURS = {
    "SGDOL": "#D55E00",
    "SGDOL, floored": "#CC79A7",
    "AdaGrad-Norm, tuned": "#009E73",
    "DoG": "#000000",
    "SGD, best constant": "#0072B2",
    "SGD, best c/√t": "#56B4E9",
    "SGD, the surrogate's best step": "#E69F00",
}


def _draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots((len(curves) + 2) // 3, 3, figsize=(11, 10), layout="constrained", squeeze=False)
    handles: dict[str, Any] = {}
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (problem, found) in zip(axes.flat, curves.items(), strict=False):
        for name, curve in reversed(found.items()):  # the first on top
            look: dict[str, Any] = {"color": COLOURS[name], "linewidth": 2.0 if name.startswith("SGDOL") else 1.3}
            (handles[name],) = axis.loglog(curve.times, curve.average.mean(0), **look)
            axis.loglog(curve.times, curve.last.mean(0), **{**look, "linestyle": ":", "linewidth": 1})
        axis.set_title(problem, fontsize=10)
        axis.set_xlabel("T, for which the function is made" if problem == HARD else "t")
        axis.grid(visible=True, color="#e6e6e6", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        top = max(curve.last[:, 0].mean() for curve in found.values())
        axis.set_ylim(bottom=max(axis.get_ylim()[0], top * 1e-8), top=top * 10)
    for row in axes:
        row[0].set_ylabel("f - f*")
    shown = [name for name in COLOURS if name in handles]
    lines = [handles[name] for name in shown]
    styles: tuple[tuple[Any, str], ...] = (("-", "average of the iterates"), (":", "last iterate"))
    for style, label in styles:
        lines.append(plt.Line2D([], [], color="#555555", linestyle=style))
        shown.append(label)
    figure.legend(lines, shown, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)
    figure.savefig(path.with_suffix(".svg"))
    plt.close(figure)


# What a report says of it ---------------------------------------------------------------------------------------------


PROSE = (
    "The paper asks whether convexity helps. Proved in docs/explanation/convexity.md, for a convex objective: the "
    "surrogate also bounds the change of the distance to the minimum, so the iterates stay bounded. f - f* falls as "
    "T^(-1/4), and the step size that is best for the surrogate can do no better than T^(-1/3) in general. With a "
    "multiplier of at least c/√t, f - f* at the average of the iterates is O(ln T/√T). Measured here: f - f* at the "
    "horizon, mean over the repeats, and the slope of its logarithm over the last one and a half decades with its "
    "standard deviation. For the hard instance (Huber) the slope is taken over the horizons that it is made for."
)


EXPONENTIAL = -4.0
"""A slope below this is not that of a power of t that anybody proves: the last iterate under multiplicative noise."""


HEADER = ("problem", "method", "last: f - f*", "slope", "average: f - f*", "slope")


def table(out: Path) -> list[tuple[str, ...]]:
    """The rows of the table under :data:`HEADER`, from the file that :func:`run` wrote; none where it was not run."""
    if not (out / "convexity.csv").exists():
        return []
    with (out / "convexity.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(r["problem"], r["method"], r["iterate"]): r for r in rows}
    names = list(dict.fromkeys(r["problem"] for r in rows))
    cells_of_all: list[tuple[str, ...]] = []
    for problem in names:
        for method in dict.fromkeys(r["method"] for r in rows if r["problem"] == problem):
            cells = [problem, method]
            for iterate in ("last", "average"):
                row = found[problem, method, iterate]
                fitted = float(row["slope"])
                steep = f"{fitted:.2f} ± {float(row['slope_std']):.2f}" if fitted > EXPONENTIAL else "exponential"
                cells += [f"{float(row['gap']):.2g}", steep]
            cells_of_all.append(tuple(cells))
    return cells_of_all
