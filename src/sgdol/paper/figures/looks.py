"""How things are drawn: a look for every method, wherever it is drawn, and one style for all figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D

from sgdol.paper.methods import methods

__all__ = ["LOOKS", "QUANTITIES", "STYLE", "Look", "handle", "legend_label", "short"]


@dataclass(frozen=True)
class Look:
    """How a method is drawn, wherever it is drawn."""

    colour: str
    dashes: Any
    marker: str
    width: float = 1.4


LOOKS = {
    "SGDOL Global": Look("#D55E00", "-", "o", 2.2),
    "SGDOL Coordinate": Look("#E69F00", (0, (6, 1.5)), "s", 2.0),
    "SGD": Look("#0072B2", (0, (5, 2)), "^"),
    "SGD GL": Look("#56B4E9", (0, (5, 1.5, 1, 1.5)), "v"),
    "AdaGrad Global": Look("#009E73", (0, (3, 1.2, 1, 1.2, 1, 1.2)), "D"),
    "AdaGrad Coordinate": Look("#009E73", (0, (7, 2)), "D"),
    "Adam": Look("#CC79A7", (0, (1, 1.2)), "X"),
    "RMSProp": Look("#E69F00", (0, (1, 1.2)), "P"),
    "AdaDelta": Look("#0072B2", (0, (4, 1.5, 1, 1.5)), "v"),
    "AMSGrad": Look("#CC79A7", (0, (3, 1.2, 1, 1.2, 1, 1.2)), "X"),
    "Hypergradient": Look("#000000", (0, (5, 2)), "s"),
}
"""Okabe and Ito's palette; no two methods of one figure share a colour, and no two at all share all three."""

QUANTITIES = {
    "mean_squared_gradient": "$\\mathrm{E}\\;\\|\\nabla f(x_k)\\|^2$",
    "objective": "optimality gap  $f(x_t) - f^\\star$",
    "step_size": "step size  $\\eta_t$",
}

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "mathtext.fontset": "dejavusans",
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "savefig.dpi": 200,
    # Text stays text in SVG, and its identifiers do not depend on the moment.
    "svg.fonttype": "path",
    "svg.hashsalt": "sgdol",
}


def short(value: float) -> str:
    """A rate as a reader would write it.

    >>> short(0.001), short(20.0), short(1.25e-05), short(1234567.0)
    ('0.001', '20', '1.25e-5', '1.23e6')
    """
    text = f"{value:.3g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        if -3 <= int(exponent) <= 4:
            return f"{float(text):.0f}"
        return f"{mantissa}e{int(exponent)}"
    return text


def legend_label(method: str, attrs: dict[str, Any]) -> str:
    """The method with what it was run with, as the paper's legends have it."""
    known = methods()[method].known
    if "alpha" in known:
        return f"{method} (M = {short(float(attrs['smoothness']))}, α = {short(float(attrs['alpha']))})"
    if known:
        return method
    return f"{method} ({short(float(attrs['learning_rate']))})"


def handle(method: str, label: str) -> Line2D:
    """The method's entry in a legend."""
    look = LOOKS[method]
    return Line2D(
        [], [], color=look.colour, linestyle=look.dashes, linewidth=look.width, marker=look.marker, markersize=4,
        markeredgewidth=0, label=label,
    )  # fmt: skip
