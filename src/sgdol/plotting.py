"""A figure of what the optimizer learned: ``sgdol.plot``. matplotlib is imported when it is called."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sgdol._extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot"]

PREFIX = "sgdol/"
"""What trackers put in front of the names."""

LOOKS: tuple[tuple[str, Any], ...] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (5, 1.5))),
    ("#009E73", (0, (5, 1.5, 1, 1.5))),
    ("#CC79A7", (0, (1, 1.2))),
    ("#E69F00", (0, (8, 2))),
    ("#56B4E9", (0, (3, 1.2, 1, 1.2, 1, 1.2))),
)
"""Okabe and Ito's colours, which colour-blind readers tell apart, and dashes for black-and-white print."""

PANELS = ("step_size", "signal_to_noise", "noise_scale", "skipped")
"""What is drawn of SGDOL..."""
FREE_PANELS = ("loss", "step_size", "smoothness", "signal_to_noise", "noise_scale", "events")
"""...and of SGDOLFree, whose history has M."""
EVENTS = {
    "look_backs": "look-backs",
    "rejections": "rejections",
    "rollbacks": "rollbacks",
    "skipped": "skipped batches",
}
"""Counts that share a panel, and what they are called. Look-backs are all evaluations beyond one per batch."""
LOGARITHMIC = ("step_size", "smoothness", "signal_to_noise", "noise_scale")
COUNTS = ("skipped", "events")
RECORDED = {*PANELS, *FREE_PANELS, *EVENTS, "evaluations", "updates"}

NO_SIGNAL, NO_NOISE = "no signal measured", "no noise measured"
CERTAIN = 1e9
"""A signal-to-noise ratio from here on, and a noise scale below its inverse, say that no noise was seen at all."""

TITLES = {
    "loss": "loss of a batch, running mean",
    "smoothness": "measured smoothness",
    "events": "events so far",
    "step_size": "step size",
    "signal_to_noise": "signal-to-noise ratio of the direction",
    "noise_scale": "gradient noise scale",
    "skipped": "skipped updates",
}
UNITS = {
    "loss": "loss",
    "smoothness": "M",
    "events": "count",
    "step_size": "$\\eta$",
    "signal_to_noise": "$\\sum u \\;/\\, \\sum (n - u)$",
    "noise_scale": "gradients",
    "skipped": "updates",
}

Curve = list[tuple[float, float]]


def plot(history: Any, *, axes: Sequence[Axes] | None = None, figure: Figure | None = None) -> Figure:
    """Draw what the optimizer learned.

    Of SGDOL, four panels: step sizes, signal-to-noise ratio, gradient noise scale and skipped updates. Of SGDOLFree,
    six: the loss, with a mark for every rejected step and every rollback; step sizes; the smoothness M; signal-to-noise
    ratio; noise scale; and how many look-backs, rejections, rollbacks and skipped batches there were.

    Step sizes, M, the ratio and the noise scale have logarithmic axes, and so has a positive loss that falls by more
    than a factor of ten. A value that is not positive and finite leaves a gap: a step size of 0, or a ratio whose
    estimated signal or noise is not positive (shaded). More than six parameter groups with different step sizes are
    drawn as their median and range. Nothing is written to disk, and matplotlib's global state is not changed. A
    notebook shows the figure; elsewhere call ``figure.savefig(...)``.

    Args:
        history: a :class:`sgdol.torch.Log` or a trainer's ``StepSizeMonitor``; its ``history``, a list of dicts; a dict
            of columns; or ``trainer.state.log_history`` of Hugging Face.
        axes: the four or six axes to draw into, in the order above, instead of new ones; an array of ``subplots`` will
            do.
        figure: the figure that gets new axes, instead of a new one. A subfigure will do.

    Returns:
        The figure.

    >>> history = [{"step": t, "step_size": 0.5 / t, "signal_to_noise": 1 / t, "noise_scale": 2 * t, "skipped": 0}
    ...            for t in range(1, 50)]
    >>> figure = plot(history)
    >>> [panel.get_title(loc="left") for panel in figure.axes][1:3]
    ['signal-to-noise ratio of the direction', 'gradient noise scale']
    """
    curves = _curves(history)
    if axes is not None and figure is not None:
        raise ValueError("give axes or figure, not both")
    names = FREE_PANELS if "smoothness" in curves else PANELS
    panels = _new_axes(figure, len(names) // 2) if axes is None else list(getattr(axes, "flat", axes))
    if len(panels) != len(names):
        raise ValueError(f"axes must be {len(names)}, for {', '.join(names)}; got {len(panels)}")
    for name, panel in zip(names, panels, strict=True):
        _draw(panel, name, _of_panel(curves, name))
    if names == FREE_PANELS:
        _mark_events(panels[0], curves)
    drawn: Any = panels[0].get_figure()
    return drawn


def _of_panel(curves: Mapping[str, Curve], name: str) -> dict[str, Curve]:
    if name == "events":
        return {title: curves[event] for event, title in EVENTS.items() if event in curves}
    return {label: curve for label, curve in curves.items() if label.split("/")[0] == name}


def _mark_events(panel: Axes, curves: Mapping[str, Curve]) -> None:
    """A mark at the lower edge for every record in which the count of an event has grown."""
    for event, marker, (colour, _) in (("rejections", "v", LOOKS[1]), ("rollbacks", "X", LOOKS[2])):
        curve = [(0.0, 0.0), *curves.get(event, [])]
        at = [x for (_, before), (x, now) in pairwise(curve) if now > before]
        if at:
            low = panel.get_xaxis_transform()
            panel.plot(at, [0.03] * len(at), marker, color=colour, markersize=5, transform=low, label=EVENTS[event])
    if panel.get_legend_handles_labels()[1]:
        panel.legend(fontsize=8, framealpha=0.85, edgecolor="none")


def _new_axes(figure: Figure | None, columns: int) -> list[Axes]:
    if figure is None:
        require("sgdol.plot", "plot", "matplotlib")
        from matplotlib.figure import Figure

        class Shown(Figure):
            """A figure that a notebook shows as it is, with or without pyplot."""

            def _repr_png_(self) -> bytes:
                file = io.BytesIO()
                self.savefig(file, format="png")
                return file.getvalue()

        figure = Shown(figsize=(3.0 + 3.0 * columns, 5.6), layout="constrained")
    grid = figure.subplots(2, columns, sharex=True)
    return list(grid.flat)


def _draw(panel: Axes, name: str, curves: Mapping[str, Curve]) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.set_title(TITLES[name], loc="left", fontsize=10)
    panel.set_ylabel(UNITS[name])
    panel.grid(visible=True, color="#d9d9d9", linewidth=0.5)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    place = panel.get_subplotspec()
    if place is None or place.is_last_row() or len(panel.get_shared_x_axes().get_siblings(panel)) == 1:
        panel.set_xlabel("step")
    drawn = {label: [(x, _shown(name, y)) for x, y in curve] for label, curve in curves.items()}
    values = [y for curve in drawn.values() for _, y in curve if math.isfinite(y)]
    if not values:
        known = [_unseen(name, y) or "nothing above zero" for c in curves.values() for _, y in c if not math.isnan(y)]
        message = known[-1] if known else "no value yet"
        panel.text(0.5, 0.5, message, transform=panel.transAxes, ha="center", va="center", color="#666666")
        return
    merged = drawn if name == "events" else _merged(drawn)
    if len(merged) > len(LOOKS):
        _draw_range(panel, merged)
    else:
        for (label, curve), (colour, dashes) in zip(merged.items(), LOOKS, strict=False):
            alone = _alone([y for _, y in curve])
            panel.plot(
                *zip(*curve, strict=True),
                label="_" if len(curves) == 1 else label,
                color=colour,
                linestyle=dashes,
                drawstyle="steps-post" if name in COUNTS else "default",
                marker="o" if alone else None,
                markersize=3,
                markevery=alone or None,
            )
    if name in ("signal_to_noise", "noise_scale"):
        for what, alpha in ((NO_SIGNAL, 0.12), (NO_NOISE, 0.05)):
            _mark_gaps(panel, [(x, _unseen(name, y) == what) for x, y in next(iter(curves.values()))], what, alpha)
    if name in LOGARITHMIC or (name == "loss" and min(values) > 0 and max(values) > 10 * min(values)):
        _scale(panel, values)
    elif name in COUNTS:
        top = max(1.0, *values)
        panel.set_ylim(-0.04 * top, (1.5 if name == "events" else 1.06) * top)  # events have a legend above them
        panel.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    handles, labels = panel.get_legend_handles_labels()
    entries = len(labels)
    if name == "events":
        labels = [f"{label}: {merged[label][-1][1]:,.0f}" for label in labels]  # in all
    if entries:
        outside = {"bbox_to_anchor": (1.0, 1.0)} if entries > 2 and name != "events" else {}
        where: dict[str, Any] = {"loc": "upper left", **outside} if outside or name == "events" else {}
        title = "parameter group" if name == "step_size" else None
        looks: dict[str, Any] = {
            "title": title,
            "fontsize": 8,
            "title_fontsize": 8,
            "framealpha": 0.85,
            "edgecolor": "none",
        }
        panel.legend(handles, labels, **looks, **where)


def _alone(values: Sequence[float]) -> list[int]:
    """Where a line has no neighbour to be drawn to, and so needs a dot."""
    padded = [math.nan, *values, math.nan]
    return [
        i for i, y in enumerate(values) if not math.isnan(y) and math.isnan(padded[i]) and math.isnan(padded[i + 2])
    ]


def _shown(name: str, value: float) -> float:
    hidden = name in LOGARITHMIC and (value <= 0 or _unseen(name, value) is not None)
    return value if math.isfinite(value) and not hidden else math.nan


def _unseen(name: str, value: float) -> str | None:
    """What could not be measured where a ratio of the two is at one of its ends."""
    if name == "signal_to_noise":
        return NO_SIGNAL if value <= 0 else NO_NOISE if value >= CERTAIN else None
    if name == "noise_scale":
        return NO_SIGNAL if value < 0 or value == math.inf else NO_NOISE if value <= 1 / CERTAIN else None
    return None


def _mark_gaps(panel: Axes, gaps: Sequence[tuple[float, bool]], label: str, alpha: float) -> None:
    """Say why there is no line instead of leaving a hole."""
    steps = [x for x, _ in gaps]
    holes: list[tuple[float, float]] = []
    for i, (_, gap) in enumerate(gaps):
        if gap:
            left, right = steps[max(i - 1, 0)], steps[min(i + 1, len(steps) - 1)]
            holes = [*holes[:-1], (holes[-1][0], right)] if holes and left <= holes[-1][1] else [*holes, (left, right)]
    for number, (left, right) in enumerate(holes):
        panel.axvspan(left, right, color="#000000", alpha=alpha, linewidth=0, label="_" if number else label)


def _draw_range(panel: Axes, curves: Mapping[str, Curve]) -> None:
    """The smallest, the median and the largest of many."""
    at: dict[float, list[float]] = {}
    for curve in curves.values():
        for x, y in curve:
            if math.isfinite(y):
                at.setdefault(x, []).append(y)
    steps = sorted(at)
    ordered = [sorted(at[x]) for x in steps]
    colour = LOOKS[0][0]
    panel.fill_between(steps, [v[0] for v in ordered], [v[-1] for v in ordered], color=colour, alpha=0.2, linewidth=0)
    panel.plot(steps, [v[len(v) // 2] for v in ordered], color=colour, label=f"median and range of {len(curves)}")


def _scale(panel: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis that has numbers on it also where it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log")
    if max(values) / min(values) < 100:
        middle, half = math.sqrt(max(values) * min(values)), max(1.15 * math.sqrt(max(values) / min(values)), 1.6)
        panel.set_ylim(middle / half, middle * half)
        digits = (1.0, 2.0, 5.0) if max(values) / min(values) > 5 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
        panel.yaxis.set_major_locator(LogLocator(subs=digits, numticks=20))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())


def _merged(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Groups that share one step size, as with ``granularity="global"``, drawn once."""
    labels: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for label, curve in curves.items():
        labels.setdefault(tuple(curve), []).append(label.partition("/")[2] or label)
    return {", ".join(names): list(curve) for curve, names in labels.items()}


def _curves(history: Any) -> dict[str, Curve]:
    """Each quantity as points (step, value), whatever form the history has; trackers have rows for other things."""
    rows = _rows(history)
    curves: dict[str, Curve] = {}
    for number, row in enumerate(rows, start=1):
        values = {str(name).removeprefix(PREFIX): value for name, value in row.items() if not _is_missing(value)}
        here = {name: _number(name, value) for name, value in values.items() if name.split("/")[0] in RECORDED}
        if {"evaluations", "updates"} <= here.keys():
            here["look_backs"] = here["evaluations"] - here["updates"] - here.get("skipped", 0.0)
        if "smoothness" not in here:
            here.pop("loss", None)  # a tracker's own
        if any(name.startswith("step_size") and not math.isnan(value) for name, value in here.items()):
            step = _number("step", values.get("step", number))
            for name, value in here.items():
                curves.setdefault(name, []).append((step, value))
    if not curves:
        seen = sorted({str(name) for row in rows for name in row})
        raise ValueError(
            f"history has no step_size: its names are {', '.join(seen) or 'none'}; record one with sgdol.torch.Log"
        )
    return curves


def _rows(history: Any) -> list[Mapping[Any, Any]]:
    found = getattr(history, "history", history)
    if isinstance(found, Mapping):
        columns = {name: list(column) for name, column in found.items() if _is_column(column)}
        if len(columns) != len(found) or len({len(column) for column in columns.values()}) > 1:
            raise ValueError("history as a dict needs columns of equal length, one for each name")
        found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if not isinstance(found, Iterable) or isinstance(found, str):
        raise TypeError(f"history must be a Log, a list of dicts or a dict of columns, got {type(history).__name__}")
    rows = list(found)
    for row in rows:
        if not isinstance(row, Mapping):
            raise TypeError(f"history must be a list of dicts, got one of {type(row).__name__}")
    if not rows:
        raise ValueError("history is empty: call the log after opt.step(), at least `every` times")
    return rows


def _is_column(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)  # as a CSV file has it


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"history must hold numbers, got {name}={value!r}") from None
