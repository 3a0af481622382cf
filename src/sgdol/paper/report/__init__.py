"""The report: one self-contained page with the verdicts, the figures and everything needed to run it again."""

from sgdol.paper.report.page import render, write_report
from sgdol.paper.report.readings import READINGS
from sgdol.paper.report.sections import Cell, Page, Picture, Section, Table
from sgdol.paper.report.words import command, decisions, duration, markdown, measurement, number, tally, versions

__all__ = [
    "READINGS",
    "Cell",
    "Page",
    "Picture",
    "Section",
    "Table",
    "command",
    "decisions",
    "duration",
    "markdown",
    "measurement",
    "number",
    "render",
    "tally",
    "versions",
    "write_report",
]
