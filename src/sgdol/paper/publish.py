"""From finished runs to what people read: the figures, claims.json and report.html, beside the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sgdol.paper.claims import check_claims, write_claims
from sgdol.paper.figures import write_figures
from sgdol.paper.measures import Reader
from sgdol.paper.report import write_report
from sgdol.paper.results import Results
from sgdol.paper.verdict import Claim

__all__ = ["Publication", "publish", "publish_claims"]


class Publication(NamedTuple):
    """What was found and where it was written."""

    claims: list[Claim]
    figures: list[Path]
    claims_file: Path
    report: Path


def publish_claims(results: Results, progress: Callable[[str], None] | None = None) -> list[Claim]:
    """Check every claim on the results and write claims.json."""
    claims = check_claims(Reader(results), progress=progress)
    write_claims(claims, results.folder / "claims.json")
    return claims


def publish(results: Results, progress: Callable[[str], None] | None = None) -> Publication:
    """Draw the figures, check the claims and write the report, into the results folder.

    Args:
        results: an opened results folder.
        progress: called with the name of each step before it starts.
    """
    read = Reader(results)
    figures = write_figures(read, results.folder, read.configuration.figures, progress)
    claims = check_claims(read, progress=progress)
    claims_file = write_claims(claims, results.folder / "claims.json")
    if progress:
        progress("report")
    report = write_report(read, results.summary(), claims, results.folder, results.timings())
    return Publication(claims, figures, claims_file, report)
