"""The report: one self-contained page with the verdicts, the figures and everything needed to run it again.

Nothing on it is loaded from elsewhere: figures are inlined as SVG, fonts are the reader's own.
"""

from __future__ import annotations

import base64
import html
import importlib.metadata
import math
import os
import platform
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sgdol
from sgdol.paper.claims import UNCHECKED
from sgdol.paper.figures import FIGURES
from sgdol.paper.measures import Reader
from sgdol.paper.results import write_atomically
from sgdol.paper.verdict import VERDICTS, Claim, Part

__all__ = ["READINGS", "command", "markdown", "measurement", "number", "render", "tally", "versions", "write_report"]


READINGS: tuple[tuple[str, str], ...] = (
    (
        "“additive white Gaussian noise” of level σ",
        "N(0, σ²) independently on each coordinate, fresh for g and for g′. Option --noise total: E‖noise‖² = σ²",
    ),
    (
        "E[‖∇f(x_k)‖²] vs. iterations",
        "running mean over s ≤ t of the true squared gradient norm at x_s, before update s: the expectation over"
        " Algorithm 1's uniformly random output. Then the mean over the repeats",
    ),
    ("the horizon", "not stated in the paper; T = 100,000 here, --horizon to change it"),
    (
        "“learning rates giving the best convergence rate”",
        "smallest running mean at T on the noiseless problem, over a 1-2-5 grid in each decade; on adult, f(x_T) must"
        " also be within 0.002 of the best, since steps that jump to the flat region have small gradients too",
    ),
    ("M of SGDOL", "1 / (SGD's best learning rate)"),
    (
        "SGD GL",
        "step min(1/M, √(2 (f_1 − f*)/M) / (σ √T)) with σ² the total variance: section 4's formula has lost its 1/√M",
    ),
    ("AdaGrad Global", "lr / (√(Σ_{s≤t} ‖g_s‖²) + 1e-10), the current gradient included"),
    ("Adam, RMSProp, AdaDelta, AMSGrad, AdaGrad Coordinate", "optax's with the usual defaults; only the rate is tuned"),
    ("Hypergradient", "SGD-HD, additive rule, of Baydin et al. (2018); its first rate and its β are both tuned"),
    ("minibatch of 1 or 50", "i.i.d. with replacement; g and g′ are two independent draws"),
    (
        "adult subsampling",
        "all 7,841 positives and 7,841 of the 24,720 negatives drawn without replacement by a named seed; x_1 = 0",
    ),
    ("SGDOL Coordinate", "α in each coordinate"),
)
"""What the paper leaves open, and how it was read."""

_CAPTIONS = {
    1: "Top: mean squared gradient, the running mean of ‖∇f(x_s)‖² over s ≤ t. Bottom: step sizes; Adam has none.",
    2: "Top: mean squared gradient. Middle: optimality gap at x_t. Bottom: step sizes; Adam has none.",
    3: "Top: mean squared gradient. Bottom: optimality gap at x_t.",
    4: "Mean squared gradient. The minimum is not known, so that there is no gap to show. A number f(x_T) marks a run"
    " that ended above f(x_1) = 0.5: it has jumped to where the loss is flat, and its small gradients mean nothing.",
}

_MARKS = {"holds": "✓", "holds in part": "◐", "does not hold": "✗", "not measured": "–"}
_CLASSES = {"holds": "yes", "holds in part": "part", "does not hold": "no", "not measured": "none"}

_OUTCOMES = {True: '<span class="yes">✓</span>', False: '<span class="no">✗</span>', None: "–"}

_STYLE = """
:root { color-scheme: light; --ink: #1d2327; --soft: #5b6670; --line: #dfe3e6; --yes: #00694d; --part: #8a5a00;
  --no: #a8320c; --none: #5b6670; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 2rem 1.25rem 4rem; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .6rem; padding-top: .5rem; border-top: 2px solid var(--ink); }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { max-width: 46rem; }
.lead { color: var(--soft); margin: 0 0 1.2rem; }
a { color: #00569b; }
nav { font-size: .9rem; margin: 1rem 0 0; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
.tally { display: flex; flex-wrap: wrap; gap: .5rem 1.6rem; padding: 0; margin: 1.2rem 0; list-style: none; }
.tally b { font-size: 1.5rem; font-variant-numeric: tabular-nums; margin-right: .35rem; }
.yes { color: var(--yes); } .part { color: var(--part); } .no { color: var(--no); } .none { color: var(--none); }
table { border-collapse: collapse; width: 100%; font-size: .875rem; line-height: 1.4; }
th, td { text-align: left; vertical-align: top; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--ink); white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { font-size: .78rem; } .wide td, .wide th { padding-right: .45rem; white-space: nowrap; }
.verdict { font-weight: 600; white-space: nowrap; }
.where { color: var(--soft); font-size: .8rem; display: block; }
.measure { display: block; font-variant-numeric: tabular-nums; }
q { quotes: "“" "”"; }
details { margin: .35rem 0 .2rem; }
summary { cursor: pointer; color: #00569b; font-size: .8rem; }
details p { margin: .4rem 0; font-size: .85rem; }
details table { font-size: .8rem; }
figure { margin: 1.4rem 0 2rem; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .85rem; margin-top: .4rem; max-width: 46rem; }
pre { background: #f4f6f7; padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; line-height: 1.45; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .9em; }
.scroll { overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .875rem; margin: .6rem 0; }
dt { color: var(--soft); } dd { margin: 0; font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) {
  body { padding: 1.2rem .9rem 3rem; }
  .claims thead { display: none; }
  .claims tr { display: block; padding: .7rem 0; border-bottom: 1px solid var(--line); }
  .claims td { display: block; border: 0; padding: .1rem 0; }
  .claims details table tr { display: table-row; }
  .claims details table td { display: table-cell; padding-right: .5rem; }
  .claims details thead { display: table-header-group; }
}
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  nav, details { display: none; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  pre { white-space: pre-wrap; }
}
"""


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


def versions() -> dict[str, str]:
    """The versions of what computed the results."""
    found = {"sgdol": sgdol.__version__, "Python": platform.python_version()}
    for name in ("numpy", "jax", "jaxlib", "optax", "xarray", "matplotlib"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"machine": f"{platform.system()} {platform.machine()}"}


def command(configuration: Any) -> str:
    """The command line that makes the same results again."""
    words = ["sgdol", "reproduce"]
    figures = tuple(getattr(configuration, "figures", (1, 2, 3, 4)))
    if figures != (1, 2, 3, 4):
        words += [word for figure in figures for word in ("--figure", str(figure))]
    words += ["--horizon", str(configuration.horizon)]
    if getattr(configuration, "repeats", None) is not None:
        words += ["--repeats", str(configuration.repeats)]
    if getattr(configuration, "noise_model", "coordinate") != "coordinate":
        words += ["--noise", str(configuration.noise_model)]
    words += ["--seed", str(getattr(configuration, "seed", 0))]
    if getattr(configuration, "data", None):
        words += ["--data", str(configuration.data)]
    if getattr(configuration, "quick", False):
        words.append("--quick")
    return shlex.join([*words, "--out", "results"])


def tally(claims: Iterable[Claim]) -> str:
    """How many claims have each verdict, in words.

    >>> tally([])
    'no claims'
    """
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]) or "no claims"


def markdown(claims: Iterable[Claim]) -> str:
    """The claims as a table for a README.

    >>> claim = Claim("x", "It is so.", "Section 7", "a check", "a reason", (Part("a", 1.0, "<=", 2.0),))
    >>> print(markdown([claim]))
    | verdict | the paper says | the number that decides |
    |---|---|---|
    | holds | “It is so.” (Section 7) | a: 1 (≤ 2) |
    """
    rows = ["| verdict | the paper says | the number that decides |", "|---|---|---|"]
    for claim in claims:
        said = f"“{claim.sentence}” ({claim.where})"
        cells = (claim.verdict, said, f"{claim.headline.what}: {measurement(claim.headline)}")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _e(text: Any) -> str:
    return html.escape(str(text))


def _m(text: str) -> str:
    """Text with the paper's indices and powers set as such.

    >>> _m("f(x_{T+1}) ≤ σ_t²")
    'f(x<sub>T+1</sub>) ≤ σ<sub>t</sub>²'
    """
    escaped = re.sub(r"_(?:\{([^}]+)\}|([A-Za-z0-9])(?![A-Za-z0-9]))", r"<sub>\1\2</sub>", _e(text))
    return re.sub(r"\^([A-Z])", r"<sup>\1</sup>", escaped)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[int] = (), css: str = "") -> str:
    """A table; the cells are HTML already."""

    def cell(tag: str, column: int, content: Any) -> str:
        return f"<{tag}{' class=n' if column in numeric else ''}>{content}</{tag}>"

    header = "".join(cell("th", i, _e(name)) for i, name in enumerate(head))
    body = "\n".join("<tr>" + "".join(cell("td", i, c) for i, c in enumerate(row)) + "</tr>" for row in rows)
    table = f'<table class="{css}"><thead><tr>{header}</tr></thead><tbody>\n{body}\n</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _tally(claims: Sequence[Claim]) -> str:
    counts = Counter(claim.verdict for claim in claims)
    items = [
        f'<li class="{_CLASSES[verdict]}"><b>{counts[verdict]}</b>{_MARKS[verdict]} {verdict}</li>'
        for verdict in VERDICTS
        if counts[verdict]
    ]
    return f'<ul class="tally">{"".join(items)}</ul>'


def _claim_row(claim: Claim) -> tuple[str, str, str]:
    verdict = f'<span class="verdict {_CLASSES[claim.verdict]}">{_MARKS[claim.verdict]} {claim.verdict}</span>'
    parts = _table(
        ("", "what", "measured", "spread", "asked"),
        (
            (
                _OUTCOMES[part.holds],
                _m(part.what),
                number(part.measured),
                "" if part.spread is None else f"± {number(part.spread, 2)}",
                f"{'≤' if part.relation == '<=' else '≥'} {number(part.threshold)}",
            )
            for part in claim.parts
        ),
        numeric=(2, 3, 4),
    )  # fmt: skip
    passed, measured = sum(p.holds is True for p in claim.parts), sum(p.holds is not None for p in claim.parts)
    note = f"<p>{_m(claim.note)}</p>" if claim.note else ""
    sentence = (
        f'<q id="{_e(claim.id)}">{_m(claim.sentence)}</q><span class="where">{_e(claim.where)}</span>'
        f"<details><summary>{passed} of {measured} measured parts hold</summary>"
        f"<p><b>Measured:</b> {_m(claim.check)}.</p><p><b>Threshold:</b> {_m(claim.reason)}.</p>{note}{parts}</details>"
    )
    headline = claim.headline
    return verdict, sentence, f'{_m(headline.what)}<span class="measure">{_e(measurement(headline))}</span>'


def _claims(claims: Sequence[Claim]) -> str:
    rows = [_claim_row(claim) for claim in claims]
    left_out = "".join(f"<li><q>{_m(sentence)}</q> – {_e(why)}.</li>" for sentence, why in UNCHECKED)
    return (
        _table(("verdict", "the paper's sentence", "the number that decides"), rows, css="claims")
        + f"<details><summary>Sentences without a check</summary><ul>{left_out}</ul></details>"
    )


def _figure(folder: Path, name: str, caption: str) -> str:
    path = folder / f"{name}.svg"
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f'<figure id="{name}"><img alt="{_e(caption)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{_m(caption)}</figcaption></figure>"
    )


def _rates(read: Reader) -> str:
    rows, rules = [], {}
    for experiment, method in dict.fromkeys((e, m) for e, _, m in read.available):
        tuning = read.tuning(experiment, method)
        if tuning is None:
            continue
        rates = tuning["rate"].values
        second = {k.removeprefix("chosen_"): v for k, v in tuning.attrs.items() if k.startswith("chosen_")}
        rules[experiment] = (tuning.attrs.get("criterion", ""), int(tuning.attrs["horizon"]))
        rows.append(
            (
                _e(experiment),
                _e(method),
                number(float(tuning.attrs["chosen"])) + "".join(f", {_e(k)} = {number(v)}" for k, v in second.items()),
                f"{number(float(rates.min()))} to {number(float(rates.max()))}",
                len(set(rates.tolist())),
            )
        )
    criteria = "".join(f"<p>{_e(e)}: {_e(rule)}, T = {horizon:,}.</p>" for e, (rule, horizon) in rules.items())
    return criteria + _table(("experiment", "method", "rate", "grid", "rates tried"), rows, numeric=(2, 3, 4))


def _summary(summary: Sequence[Mapping[str, Any]], methods: Sequence[str] | None = None) -> str:
    rows = []
    for row in summary:
        if methods is not None and row["method"] not in methods:
            continue
        diverged, repeats = int(row["diverged"]), int(row["repeats"])
        rate = row["learning_rate"]
        m = row["smoothness"]
        is_sgdol = str(row["method"]).startswith("SGDOL")
        rows.append(
            (
                _e(row["experiment"]),
                _e(row["noise"]),
                _e(row["method"]),
                f"M = {number(float(m))}" if is_sgdol else number(_float(rate)),
                f"{number(_float(row['mean_squared_gradient']))} ±"
                f" {number(_float(row['mean_squared_gradient_std']), 2)}",
                f"{number(_float(row['objective']))} ± {number(_float(row['objective_std']), 2)}",
                number(_float(row["step_size"])),
                f'<span class="no">{diverged} of {repeats}</span>' if diverged else f"0 of {repeats}",
                f"{int(row['horizon']):,}",
            )
        )
    head = ("experiment", "noise", "method", "rate", "mean ‖∇f‖²", "f(x_T)", "step size", "diverged", "T")
    return _table(head, rows, numeric=(3, 4, 5, 6, 7, 8), css="wide")


def _float(value: Any) -> float | None:
    return None if value is None or value == "" else float(value)


def _duration(seconds: float) -> str:
    """A time as a reader would say it.

    >>> _duration(3.21), _duration(83.0)
    ('3.2 s', '1 min 23 s')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {round(seconds % 60)} s"


def _definitions(pairs: Mapping[str, Any]) -> str:
    return "<dl>" + "".join(f"<dt>{_e(k)}</dt><dd>{_e(v)}</dd>" for k, v in pairs.items()) + "</dl>"


def render(
    read: Reader,
    summary: Sequence[Mapping[str, Any]],
    claims: Sequence[Claim],
    folder: str | os.PathLike[str],
    timings: Mapping[str, float] | None = None,
) -> str:
    """The page as text, with the figures that the folder holds.

    Args:
        read: reads an opened results folder.
        summary: the rows of summary.csv.
        claims: what :func:`sgdol.paper.claims.check_claims` found.
        folder: where the figures' SVG files are.
        timings: seconds by part of the run.
    """
    where, configuration = Path(folder), read.configuration
    settings = {name: value for name, value in vars(configuration).items() if value is not None}
    figures = "".join(
        _figure(where, f"figure{n}", f"Figure {n}. {layout.title}. {_CAPTIONS[n]}") for n, layout in FIGURES.items()
    )
    sections = [
        ("claims", "What holds", _tally(claims) + _claims(claims)),
        ("figures", "Figures", figures),
        (
            "rates",
            "Learning rates",
            "<p>Each method's rate was chosen on the noiseless problem and used unchanged under noise. SGDOL's M is the"
            " reciprocal of SGD's rate, and α = 10; neither was tuned.</p>"
            + _rates(read)
            + _figure(where, "tuning", "Each point is a whole run without noise, the ring is the rate chosen."),
        ),
        (
            "evaluations",
            "By gradient evaluations",
            "<p>An iteration of SGDOL takes two stochastic gradients, of every other method one.</p>"
            + _figure(where, "evaluations", "The runs of Figures 1 and 2 by gradient evaluations."),
        ),
        (
            "coordinate",
            "SGDOL with one step size for each coordinate",
            "<p>Section 6 of the paper describes this variant; its experiments leave it out. A coordinate whose"
            " feature never"
            " occurs keeps the step size 1/M, so that an unweighted mean of the step sizes misleads.</p>"
            + _figure(where, "coordinate", "SGDOL Coordinate against SGDOL Global and AdaGrad Coordinate.")
            + _summary(summary, ("SGDOL Global", "SGDOL Coordinate", "AdaGrad Coordinate")),
        ),
        (
            "summary",
            "All results at the horizon",
            "<p>Means over the repeats ± one standard deviation between them. The same table is in summary.csv.</p>"
            + _summary(summary),
        ),
        (
            "readings",
            "How the paper was read",
            "<p>The paper leaves these open. Where another reading changes a result, an option offers it.</p>"
            + _table(("the paper says", "read as"), ((_m(a), _m(b)) for a, b in READINGS)),
        ),
        (
            "again",
            "Run it again",
            f"<pre><code>pip install 'sgdol[paper]=={_e(sgdol.__version__)}'\n{_e(command(configuration))}</code></pre>"
            "<p>The same seed gives the same numbers. A run that was interrupted continues where it stopped.</p>"
            "<h3>Settings</h3>" + _definitions(settings)
            + "<h3>Versions</h3>" + _definitions(versions())
            + ("<h3>Time</h3>" + _definitions({k: _duration(v) for k, v in timings.items()}) if timings else ""),
        ),
    ]  # fmt: skip
    sections = [(name, title, body) for name, title, body in sections if body]
    nav = "".join(f'<a href="#{name}">{_e(title)}</a>' for name, title, _ in sections)
    body = "\n".join(
        f'<section id="{name}"><h2>{_e(title)}</h2>{content}</section>' for name, title, content in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>SGDOL: the paper, reproduced</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>SGDOL: the paper, reproduced</h1>
<p class="lead">Zhuang, Cutkosky and Orabona, <i>Surrogate Losses for Online Learning of Stepsizes in Stochastic
Non-Convex Optimization</i>, ICML 2019. Every experiment, and every factual sentence of its experiments as a check.</p>
<nav>{nav}</nav>
{body}
</body>
</html>
"""


def write_report(
    read: Reader,
    summary: Sequence[Mapping[str, Any]],
    claims: Sequence[Claim],
    folder: str | os.PathLike[str],
    timings: Mapping[str, float] | None = None,
) -> Path:
    """Write report.html beside the figures and return where it is."""
    target = Path(folder) / "report.html"
    write_atomically(target, render(read, summary, claims, folder, timings).encode())
    return target
