"""The sections of the report behind the claims and the figures, in their order.

To add one, write a function from a :class:`~sgdol.paper.report.sections.Page` to a
:class:`~sgdol.paper.report.sections.Section`, or to None where there is nothing to show, and name it in
:data:`SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sgdol.paper import convexity
from sgdol.paper.experiments import EXPERIMENTS
from sgdol.paper.measures import Reader
from sgdol.paper.methods import methods
from sgdol.paper.report.readings import READINGS
from sgdol.paper.report.sections import Cell, Page, Picture, Section, Table
from sgdol.paper.report.words import number

__all__ = ["SECTIONS"]


def results(page: Page) -> Section | None:
    """Every run at its horizon."""
    if not page.summary:
        return None
    return Section(
        "summary",
        "All results at the horizon",
        (
            "Means over the repeats ± one standard deviation. The smallest mean squared gradient at each level of"
            " noise is marked, among the runs that did not diverge or end above where they started."
            " Click on a heading to sort. The same table is in summary.csv.",
        ),
        tables=(_summary(page),),
    )


def rates(page: Page) -> Section | None:
    """The learning rates and the search for them."""
    rows, rules = [], {}
    for experiment, method in dict.fromkeys((e, m) for e, _, m in page.read.available):
        tuning = page.read.tuning(experiment, method)
        if tuning is None:
            continue
        tried = tuning["rate"].values
        second = {k.removeprefix("chosen_"): v for k, v in tuning.attrs.items() if k.startswith("chosen_")}
        rules[experiment] = f"{tuning.attrs.get('criterion', '')}, T = {int(tuning.attrs['horizon']):,}"
        chosen = float(tuning.attrs["chosen"])
        rows.append(
            (
                experiment,
                method,
                Cell(number(chosen) + "".join(f", {k} = {number(v)}" for k, v in second.items()), chosen),
                f"{number(float(tried.min()))} to {number(float(tried.max()))}",
                len(set(tried.tolist())),
            )
        )
    if not rows:
        return None
    return Section(
        "rates",
        "Learning rates",
        (
            "Each method's rate was chosen on the noiseless problem and used unchanged under noise. SGDOL's M is the"
            " reciprocal of SGD's rate, and α = 10; neither was tuned.",
            *(f"{experiment}: {rule}." for experiment, rule in rules.items()),
        ),
        pictures=(
            Picture("tuning", "The search", "Each point is a run without noise; the ring marks the chosen rate."),
        ),
        tables=(
            Table(
                ("experiment", "method", "rate", "grid", "rates tried"),
                rows,
                numeric=(2, 3, 4),
                name="learning rates",
                sortable=True,
            ),
        ),
    )


def evaluations(page: Page) -> Section:
    """The main runs by what they cost."""
    return Section(
        "evaluations",
        "By gradient evaluations",
        ("Each iteration of SGDOL takes two stochastic gradients. The other methods take one.",),
        pictures=(
            Picture(
                "evaluations", "By gradient evaluations", "The runs of Figures 1 and 2 against the number of gradients."
            ),
        ),
    )


def coordinate(page: Page) -> Section:
    """The variant of section 6."""
    return Section(
        "coordinate",
        "SGDOL with one step size for each coordinate",
        (
            "Section 6 of the paper describes this variant; its experiments leave it out. A coordinate whose feature"
            " never occurs keeps the step size 1/M, so an unweighted mean of the step sizes is misleading.",
        ),
        pictures=(
            Picture(
                "coordinate",
                "One step size for each coordinate",
                "SGDOL Coordinate against SGDOL Global and AdaGrad Coordinate.",
            ),
        ),
        tables=(_summary(page, ("SGDOL Global", "SGDOL Coordinate", "AdaGrad Coordinate")),),
    )


def convex(page: Page) -> Section | None:
    """The paper's question whether convexity helps, where ``sgdol convexity`` was run."""
    rows = convexity.table(page.folder)
    if not rows:
        return None
    return Section(
        "convexity",
        "Does convexity help?",
        (convexity.PROSE,),
        pictures=(Picture("convexity", "f - f* on convex problems", "Averages solid, last iterates dotted."),),
        tables=(Table(convexity.HEADER, rows, numeric=(2, 3, 4, 5), name="convex problems"),),
    )


def readings(page: Page) -> Section:
    """What the paper leaves open."""
    return Section(
        "readings",
        "How the paper was read",
        ("The paper leaves these open. Where another reading changes a result, an option offers it.",),
        tables=(Table(("the paper says", "read as"), READINGS, name="readings"),),
    )


SECTIONS: tuple[Callable[[Page], Section | None], ...] = (
    results,
    rates,
    evaluations,
    coordinate,
    convex,
    readings,
)
"""What makes the sections, in their order on the page."""


def _summary(page: Page, only: Collection[str] | None = None) -> Table:
    rows = [row for row in page.summary if only is None or row["method"] in only]
    best = _best(page.read, rows)
    head = ("experiment", "noise", "method", "rate", "mean ‖∇f‖²", "f(x_T)", "step size", "diverged", "T")
    return Table(
        head,
        [_summary_row(row, _key(row) in best) for row in rows],
        numeric=(3, 4, 5, 6, 7, 8),
        name="results at the horizon",
        sortable=True,
        wide=True,
    )


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["experiment"], row["noise"], row["method"]


def _best(read: Reader, rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, str, str]]:
    """The rows with the smallest mean squared gradient of their experiment and noise."""
    lowest: dict[tuple[str, str], tuple[float, tuple[str, str, str]]] = {}
    for row in rows:
        curve = read.curve(*_key(row))
        if int(row["diverged"]) or curve is None or curve.fled is not None:
            continue
        found = (float(row["mean_squared_gradient"]), _key(row))
        panel = found[1][:2]
        lowest[panel] = min(lowest.get(panel, found), found)
    return {key for _, key in lowest.values()}


def _summary_row(row: Mapping[str, Any], best: bool) -> tuple[Cell | str, ...]:
    diverged, repeats = int(row["diverged"]), int(row["repeats"])
    noises = EXPERIMENTS[row["experiment"]].noises
    told_m = "alpha" in methods()[row["method"]].known
    rate = _float(row["smoothness"] if told_m else row["learning_rate"])
    gradient, objective, step = (_float(row[name]) for name in ("mean_squared_gradient", "objective", "step_size"))
    return (
        row["experiment"],
        Cell(row["noise"], noises.index(row["noise"])),
        row["method"],
        Cell(f"M = {number(rate)}" if told_m else number(rate), 1 / rate if told_m and rate else rate),
        Cell(f"{number(gradient)} ± {number(_float(row['mean_squared_gradient_std']), 2)}", gradient, "best" * best),
        Cell(f"{number(objective)} ± {number(_float(row['objective_std']), 2)}", objective),
        Cell(number(step), step),
        Cell(f"{diverged} of {repeats}", diverged, bad=diverged > 0),
        Cell(f"{int(row['horizon']):,}", int(row["horizon"])),
    )


def _float(value: Any) -> float | None:
    return None if value is None or value == "" else float(value)
