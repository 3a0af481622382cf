"""The page: the verdicts, the figures and everything needed to run it again, in one file.

Nothing on it is loaded from elsewhere: figures, data, style and script are inside, fonts are the reader's own.
"""

from __future__ import annotations

import base64
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

import sgdol
from sgdol.paper.claims import UNCHECKED
from sgdol.paper.configuration import DEFAULT_HORIZON
from sgdol.paper.experiments import FIGURES
from sgdol.paper.files import write_atomically
from sgdol.paper.measures import Reader
from sgdol.paper.report.contents import SECTIONS
from sgdol.paper.report.curves import curves_data
from sgdol.paper.report.sections import Page, Picture, Section
from sgdol.paper.report.words import (
    GROUPS,
    command,
    counted,
    decisions,
    duration,
    maths,
    measurement,
    number,
    sentence,
    versions,
)
from sgdol.paper.verdict import KINDS, VERDICTS, Claim, Verdict

__all__ = ["render", "write_report"]

_MARKS: dict[Verdict, str] = {"holds": "✓", "holds in part": "◐", "does not hold": "✗", "not measured": "–"}
_CLASSES: dict[Verdict, str] = {"holds": "yes", "holds in part": "part", "does not hold": "no", "not measured": "none"}


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sgdol.paper.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # the methods keep the order of the paper
    environment.filters |= {"maths": maths, "number": number, "measurement": measurement, "duration": duration}
    environment.globals |= {"marks": _MARKS, "classes": _CLASSES, "decisions": decisions, "counted": counted}
    return environment


def render(
    read: Reader,
    summary: Sequence[Mapping[str, Any]],
    claims: Sequence[Claim],
    folder: str | os.PathLike[str],
    timings: Mapping[str, float] | None = None,
    *,
    sections: Iterable[Section] = (),
) -> str:
    """The page as text, with the figures that the folder holds.

    Args:
        read: reads an opened results folder.
        summary: the rows of summary.csv.
        claims: what :func:`sgdol.paper.claims.check_claims` found.
        folder: where the figures' SVG files are.
        timings: seconds by part of the run.
        sections: more of them, behind those of :data:`sgdol.paper.report.contents.SECTIONS`.
    """
    page = Page(read, summary, Path(folder))
    figures = [(number, picture) for number, picture in _figures() if picture.source(page.folder)]
    made = [section for section in (make(page) for make in SECTIONS) if section is not None]
    configuration = read.configuration
    return (
        _environment()
        .get_template("report.html")
        .render(
            summary_sentence=sentence(claims),
            short=configuration.horizon < DEFAULT_HORIZON,
            horizon=configuration.horizon,
            default_horizon=DEFAULT_HORIZON,
            folder=page.folder,
            groups=[(kind, GROUPS[kind][0], [c for c in claims if c.kind == kind]) for kind in KINDS],
            verdicts=[(v, sum(c.verdict == v for c in claims)) for v in VERDICTS],
            unchecked=UNCHECKED,
            figures=figures,
            shown={number for number, _ in figures},
            claims_of={n: [c for c in claims if n in c.figures] for n, _ in figures},
            sections=[*made, *sections],
            curves=curves_data(read),
            files=_files(page.folder),
            version=sgdol.__version__,
            command=command(configuration),
            settings=_settings(configuration),
            versions=versions(),
            times=_times(timings or {}),
        )
        .lstrip()
    )


def _figures() -> list[tuple[int, Picture]]:
    return [
        (n, Picture(f"figure{n}", f"Figure {n}. {figure.title}", figure.caption)) for n, (_, figure) in FIGURES.items()
    ]


def _files(folder: Path) -> list[tuple[str, str, str]]:
    """The small files beside the page that it carries for those who have the page alone."""
    kinds = {
        "summary.csv": ("text/csv", "every run at its horizon"),
        "claims.json": ("application/json", "every check"),
    }
    return [
        (name, what, f"data:{kind};base64,{base64.b64encode((folder / name).read_bytes()).decode('ascii')}")
        for name, (kind, what) in kinds.items()
        if (folder / name).exists()
    ]


def _settings(configuration: Any) -> dict[str, Any]:
    """What was set, in words; what was left out is left out."""
    words = {n: ", ".join(map(str, v)) if isinstance(v, tuple) else v for n, v in vars(configuration).items()}
    return {
        name.replace("_", " "): value for name, value in words.items() if value not in (None, "") and value is not False
    }


class _Time(NamedTuple):
    part: str
    seconds: float
    share: float
    """Of all the seconds."""


def _times(timings: Mapping[str, float]) -> list[_Time]:
    """The seconds of each experiment and noise, the longest first, and all together; of runs side by side, the sum."""
    groups: dict[str, float] = defaultdict(float)
    for part, seconds in timings.items():
        groups[": ".join(part.split(": ")[:2])] += seconds
    total = sum(groups.values())
    longest_first = sorted(groups, key=lambda part: -groups[part])
    return [_Time(part, groups[part], groups[part] / (total or 1)) for part in longest_first] + (
        [_Time("altogether", total, 1.0)] if groups else []
    )


def write_report(
    read: Reader,
    summary: Sequence[Mapping[str, Any]],
    claims: Sequence[Claim],
    folder: str | os.PathLike[str],
    timings: Mapping[str, float] | None = None,
    *,
    sections: Iterable[Section] = (),
) -> Path:
    """Write report.html beside the figures and return where it is; the arguments are those of :func:`render`."""
    target = Path(folder) / "report.html"
    write_atomically(target, render(read, summary, claims, folder, timings, sections=sections).encode())
    return target
