r"""Every sentence of the paper that asserts a fact, as a check with a verdict or a line that says why there is none.

Each check quotes its sentence, measures one or more numbers in the results of a run, and compares them with thresholds
that were fixed before the run. A sentence that fails is reported as failing. A check is one function under the
decorator :func:`claim`, in the module of its place in the paper; to add one, write it there.

Two thresholds serve most of the sentences:

* a run *converges* if its decade ratio (see :mod:`sgdol.paper.measures`) is at most, and *stalls* if it is at least
  :math:`10^{-1/4} = 0.56`. A run that oscillates around a value has 1; one whose squared gradient falls as
  :math:`1/\sqrt t` has 0.32; the threshold is their geometric mean;
* two methods are *comparable* if their running means at the horizon differ by a factor of two at most, which is little
  on the figures' logarithmic axes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sgdol.paper.claims import appendix, method, section7, setting, theorems
from sgdol.paper.claims._check import Check, Measured, checks_of, claim
from sgdol.paper.files import write_atomically
from sgdol.paper.measures import Reader
from sgdol.paper.verdict import Claim, Part

__all__ = [
    "CHECKS",
    "UNCHECKED",
    "Check",
    "Measured",
    "check_claims",
    "claim",
    "read_claims",
    "write_claims",
]

CHECKS: tuple[Check, ...] = tuple(
    check for module in (theorems, method, setting, section7, appendix) for check in checks_of(module)
)
"""Every check: the theorems, then the sentences in the order of the paper."""

UNCHECKED: tuple[tuple[str, str], ...] = (
    (
        "it requires a carefully hand-picked stepsize for fast convergence, which is notoriously tedious and"
        " time-consuming to tune (abstract, section 1, and what they say of SGD and of adaptive methods in general)",
        "the reason for the paper, not a result of it",
    ),
    (
        "this results in a SGD algorithm with self-tuned stepsizes that guarantees convergence rates that are"
        " automatically adaptive to the level of noise. (abstract; sections 1, 5 and 8 say the same in other words)",
        "a summary of Theorem 4, which is checked",
    ),
    (
        "The optimal convergence rate was also obtained by Ward et al. using AdaGrad global stepsizes […] their results"
        " cannot recover linear rates of convergence (section 2, and what it says of other papers)",
        "about other papers; nothing here depends on it",
    ),
    (
        "we avoid a computational overhead exponential in the dimension of the space d that a discretization would"
        " incur. (section 2)",
        "arithmetic: a grid of m step sizes in each of d coordinates has m^d points, and FTRL keeps 2d numbers",
    ),
    (
        "it is well-known that we obtain the following convergence rate […] we need a stepsize of the form"
        " O(min(√(f(x_1) − f*)/(σ√T), 1/M)) (section 4)",
        "a result of Ghadimi and Lan (2013); the formula has lost its 1/√M, see the claim on SGD GL",
    ),
    (
        "the variance can change over time. For example, it may decrease over time if f(x) = E[f_j(x)] and each f_j has"
        " zero gradient at the local optimum we are converging to. (section 4)",
        "a remark on what may be; docs/explanation/convexity.md has the rate for noise that vanishes with the gradient",
    ),
    (
        "the assumption of the independence of η_t from the stochasticity of the current step is essential according to"
        " Li and Orabona. (section 4)",
        "about another paper; that Theorem 1 fails when one gradient is used twice is a test of this library",
    ),
    (
        "we could even use an optimistic FTRL algorithm that achieves even smaller regret (section 5)",
        "a bound of Mohri and Yang (2016) for losses that are well predicted; not a claim about these losses",
    ),
    (
        "Note that this assumption [H2'] is not actually stronger than (H2) because we can define σ_t² = Σ_i σ_{t,i}².",
        "a definition",
    ),
    (
        "future work will focus on extending their use to other scenarios […] privacy […] convexity […] eliminate the"
        " need of knowing M (section 8)",
        "plans; see private.md, convexity.md and unknown_smoothness.md in docs/explanation",
    ),
    (
        "SGD is widely known to enjoy good empirical properties, but our learning rate schedule is very unique",
        "an opinion and the reason for the experiments",
    ),
    (
        "In each column, the top plot shows E[‖∇f(x_k)‖²] vs. number of iterations, whereas the bottom one is the"
        " per-round stepsizes on each case. […] The x-axis in all figures, and the y-axis in the top three are"
        " logarithmic. (and the like of Figures 2 and 3)",
        "how the figures are drawn: they are drawn so, and the tests look at their axes",
    ),
    (
        "Note that we adopt the scheme of using a single learning rate for all dimensions in SGDOL and AdaGrad thus"
        " the suffix ‘Global’.",
        "a definition of names",
    ),
    (
        "We stress the fact that in the real-world setting this kind of stepsize cannot be used.",
        "about what a user can know, not about the experiments",
    ),
    (
        "Note that here we don't know f* so we don't report the curve of the optimality gap.",
        "about what is known, not about the experiments",
    ),
)
"""The sentences that state nothing which a run could confirm or refute, and why."""


def check_claims(
    read: Reader,
    checks: Sequence[Check] = CHECKS,
    *,
    theorems: bool = True,
    progress: Callable[[str], None] | None = None,
) -> list[Claim]:
    """Check everything that the results allow; what they lack is reported as not measured.

    Args:
        read: reads an opened results folder.
        checks: what to check.
        theorems: whether to measure the theorems too, which need no results and take a few seconds.
        progress: called with the id of each check before it starts.
    """
    claims = []
    for check in checks:
        if check.kind == "theorem" and not theorems:
            continue
        if progress:
            progress(check.id)
        claims.append(check(read))
    return claims


def write_claims(claims: Iterable[Claim], path: str | os.PathLike[str]) -> Path:
    """Write claims.json: a list of records with stable ids."""
    target = Path(path)
    text = json.dumps([claim.record() for claim in claims], indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(target, f"{text}\n".encode())
    return target


def read_claims(path: str | os.PathLike[str]) -> list[Claim]:
    """The claims of a claims.json."""

    def number(value: Any) -> float | None:
        return None if value is None else float(value)

    return [
        Claim(
            **{key: record[key] for key in ("id", "sentence", "where", "check", "reason", "note", "kind")},
            figures=tuple(record["figures"]),
            parts=tuple(
                Part(
                    part["what"],
                    number(part["measured"]),
                    part["relation"],
                    float(part["threshold"]),
                    number(part["spread"]),
                    float(part["slack"]),
                    part["main"],
                )
                for part in record["parts"]
            ),
        )
        for record in json.loads(Path(path).read_text(encoding="utf-8"))
    ]
