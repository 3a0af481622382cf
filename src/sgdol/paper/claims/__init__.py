r"""Every factual sentence of the paper's section 7 and appendix, and its theorems, as a check with a verdict.

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

from sgdol.paper.claims import appendix, section7, setting, theorems
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
    check for module in (theorems, setting, section7, appendix) for check in checks_of(module)
)
"""Every check: the theorems, then the sentences in the order of the paper."""

UNCHECKED: tuple[tuple[str, str], ...] = (
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
