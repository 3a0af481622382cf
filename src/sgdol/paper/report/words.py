"""Numbers, verdicts and commands in words, for the report, the terminal and a README."""

from __future__ import annotations

import math
import platform
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup, escape

import sgdol
from sgdol.paper.environment import installed
from sgdol.paper.verdict import KINDS, VERDICTS, Claim, Kind, Part, Verdict

__all__ = [
    "GROUPS",
    "Decision",
    "command",
    "counted",
    "decisions",
    "duration",
    "markdown",
    "maths",
    "measurement",
    "number",
    "sentence",
    "tally",
    "versions",
]

GROUPS: dict[Kind, tuple[str, str, str]] = {
    "theorem": ("Theorems", "theorem", "theorems"),
    "finding": ("Findings of the experiments", "finding", "findings"),
    "set-up": ("Facts of the set-up", "fact of the set-up", "facts of the set-up"),
}
"""What the kinds of claims are called: a heading, one of them, several of them."""

_VERBS: dict[Verdict, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "holds in part": ("holds in part", "hold in part"),
    "does not hold": ("does not hold", "do not hold"),
    "not measured": ("was not measured", "were not measured"),
}


def number(value: float | None, digits: int = 3) -> str:
    """A number as a reader would write it.

    >>> number(0.00012345), number(1234567.0), number(0.5), number(float("inf")), number(None)
    ('1.23 × 10⁻⁴', '1.23 × 10⁶', '0.5', '∞', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if -3 <= exponent <= 5:
        text = f"{value:.{max(0, digits - 1 - exponent)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return text.replace("-", "−")
    mantissa = f"{value / 10.0**exponent:.{digits - 1}f}".rstrip("0").rstrip(".").replace("-", "−")
    superscript = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa} × 10{superscript}"


def measurement(part: Part) -> str:
    """The number with its spread and the threshold, in one line.

    >>> measurement(Part("x", 0.5, "<=", 1.0, spread=0.01))
    '0.5 ± 0.01 (≤ 1)'
    """
    relation = {"<=": "≤", ">=": "≥"}[part.relation]
    if part.measured is None:
        return f"not measured ({relation} {number(part.threshold)})"
    spread = "" if part.spread is None else f" ± {number(part.spread, 2)}"
    return f"{number(part.measured)}{spread} ({relation} {number(part.threshold)})"


def duration(seconds: float) -> str:
    """A time as a reader would say it.

    >>> duration(3.21), duration(83.0), duration(119.9), duration(7384.0)
    ('3.2 s', '1 min 23 s', '2 min 00 s', '2 h 03 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


_BRACED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # one pair of braces may stand within another
_RAISED_OR_LOWERED = re.compile(rf"([_^])(?:{_BRACED}|([A-Za-z0-9])(?![A-Za-z0-9]))")


def maths(text: Any) -> Markup:
    """Text with the paper's indices and powers set as such, escaped.

    >>> maths("f(x_{T+1}) ≤ σ_t²")
    Markup('f(x<sub>T+1</sub>) ≤ σ<sub>t</sub>²')
    >>> maths("a < b^T")
    Markup('a &lt; b<sup>T</sup>')
    >>> maths("∫_{a_0}^{Σ_{t=0}^T a_t}")
    Markup('∫<sub>a<sub>0</sub></sub><sup>Σ<sub>t=0</sub><sup>T</sup> a<sub>t</sub></sup>')
    """

    def set_one(found: re.Match[str]) -> str:
        element = "sub" if found[1] == "_" else "sup"
        inside = found[2] if found[3] is None else found[3]
        return f"<{element}>{_RAISED_OR_LOWERED.sub(set_one, inside)}</{element}>"

    return Markup(_RAISED_OR_LOWERED.sub(set_one, str(escape(text))))


class Decision(NamedTuple):
    """A part that a verdict follows from, and what it does to it."""

    label: str
    part: Part


def decisions(claim: Claim) -> list[Decision]:
    """The parts that the verdict follows from: the main one, and what keeps a claim from holding whole.

    >>> main, other = Part("at noise 5", 1.0, "<=", 2.0, main=True), Part("at noise 1", 3.0, "<=", 2.0)
    >>> claim = Claim("x", "It is so.", "Section 7", "a check", "a reason", (main, other))
    >>> [(label, part.what) for label, part in decisions(claim)]
    [('main part', 'at noise 5'), ('but', 'at noise 1')]
    """
    headline = claim.headline
    if claim.verdict == "holds in part":
        measured = [part for part in claim.parts if part.main and part.holds]
        nearest = max(measured, key=lambda part: part.closeness, default=None)
        found = [] if nearest is None else [Decision("main part", nearest)]
        return [*found, Decision("but" if found else "what fails", headline)]
    return [Decision("main part" if headline.main else "nearest call", headline)]


def counted(count: int, verdict: Verdict) -> str:
    """How many have a verdict.

    >>> counted(1, "does not hold"), counted(2, "holds in part")
    ('1 does not hold', '2 hold in part')
    """
    return f"{count} {_VERBS[verdict][count != 1]}"


def _counted(counts: Counter[Verdict]) -> str:
    words = [counted(counts[v], v) for v in VERDICTS if counts[v]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _counts(claims: Iterable[Claim]) -> dict[Kind, Counter[Verdict]]:
    counts: dict[Kind, Counter[Verdict]] = {kind: Counter() for kind in KINDS}
    for claim in claims:
        counts[claim.kind][claim.verdict] += 1
    return {kind: found for kind, found in counts.items() if found}


def tally(claims: Iterable[Claim]) -> str:
    """How many claims of each kind have each verdict, in words.

    >>> tally([])
    'no claims'
    >>> tally([Claim("x", "It is so.", "Section 7", "a check", "a reason", (Part("a", 1.0, "<=", 2.0),))])
    'findings: 1 holds'
    """
    counts = _counts(claims)
    return "; ".join(f"{GROUPS[kind][2]}: {_counted(found)}" for kind, found in counts.items()) or "no claims"


def sentence(claims: Sequence[Claim]) -> str:
    """The same as sentences.

    >>> sentence([Claim("x", "It is so.", "Section 7", "a check", "a reason", (Part("a", 1.0, "<=", 2.0),))])
    'The finding holds.'
    """
    said = []
    for kind, found in _counts(claims).items():
        total, (_, one, several) = found.total(), GROUPS[kind]
        if len(found) > 1:
            said.append(f"Of {total} {several} {_counted(found)}.")
        else:
            verb = _VERBS[next(iter(found))]
            said.append(f"The {one} {verb[0]}." if total == 1 else f"All {total} {several} {verb[1]}.")
    return " ".join(said)


def markdown(claims: Iterable[Claim]) -> str:
    """The claims as a table for a README.

    >>> claim = Claim("x", "It is so.", "Section 7", "a check", "a reason", (Part("a", 1.0, "<=", 2.0),))
    >>> print(markdown([claim]))
    | verdict | kind | the paper says | the part that decides |
    |---|---|---|---|
    | holds | finding | “It is so.” (Section 7) | nearest call: a: 1 (≤ 2) |
    """
    rows = ["| verdict | kind | the paper says | the part that decides |", "|---|---|---|---|"]
    for claim in claims:
        decided = "; ".join(f"{label}: {part.what}: {measurement(part)}" for label, part in decisions(claim))
        cells = (claim.verdict, claim.kind, f"“{claim.sentence}” ({claim.where})", decided)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def versions() -> dict[str, str]:
    """The versions of what computed the results."""
    own = {"sgdol": sgdol.__version__, "Python": platform.python_version()}
    machine = {"machine": f"{platform.system()} {platform.machine()}"}
    return own | installed(("numpy", "jax", "jaxlib", "optax", "xarray", "matplotlib")) | machine


def command(configuration: Any) -> str:
    """The command line that makes the same results again."""
    words = ["sgdol", "reproduce"]
    figures = tuple(getattr(configuration, "figures", (1, 2, 3, 4)))
    if figures != (1, 2, 3, 4):
        words += [word for figure in figures for word in ("--figure", str(figure))]
    words += [word for method in getattr(configuration, "only", ()) for word in ("--method", method)]
    words += ["--horizon", str(configuration.horizon)]
    if getattr(configuration, "repeats", None) is not None:
        words += ["--repeats", str(configuration.repeats)]
    if getattr(configuration, "noise_model", "coordinate") != "coordinate":
        words += ["--noise", str(configuration.noise_model)]
    if getattr(configuration, "adagrad_form", "current") != "current":
        words += ["--adagrad", str(configuration.adagrad_form)]
    words += ["--seed", str(getattr(configuration, "seed", 0))]
    if getattr(configuration, "data", None):
        words += ["--data", str(configuration.data)]
    if getattr(configuration, "quick", False):
        words.append("--quick")
    return shlex.join([*words, "--out", "results"])
