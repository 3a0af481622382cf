"""What a section of the report is made of: prose, tables and pictures.

A section is made by a function of a :class:`Page`, which gives None where there is nothing to show, and takes its place
in :data:`sgdol.paper.report.contents.SECTIONS`. Everything in it is plain text: the template escapes it, and sets
indices such as x_t and x_{t+1}.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sgdol.paper.measures import Reader

__all__ = ["Cell", "Page", "Picture", "Section", "Table"]


class Page(NamedTuple):
    """What a section may draw on."""

    read: Reader
    """The results."""
    summary: Sequence[Mapping[str, Any]]
    """The rows of summary.csv."""
    folder: Path
    """The results folder, with the pictures' SVG files."""


class Cell(NamedTuple):
    """A cell of a table that is more than text."""

    text: str
    order: float | str | None = None
    """What the column is sorted by, if not by the text."""
    mark: str = ""
    """A word that is set off behind the text, such as "best"."""
    bad: bool = False
    """Whether it is something to worry about."""


@dataclass(frozen=True)
class Table:
    """A table."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str | int]]
    numeric: Sequence[int] = ()
    """The columns that are set to the right."""
    name: str = "table"
    """What it is, for those who cannot see it."""
    sortable: bool = False
    wide: bool = False
    """Whether it has so many columns that it is set small."""

    def cells(self) -> list[list[Cell]]:
        """The rows, every cell a :class:`Cell`."""
        return [[cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Picture:
    """A figure that the folder holds as ``<name>.svg``; where it does not, nothing is shown."""

    name: str
    title: str
    caption: str = ""

    def source(self, folder: Path) -> str | None:
        """The SVG as an address that needs no file."""
        path = folder / f"{self.name}.svg"
        if not path.exists():
            return None
        return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


@dataclass(frozen=True)
class Section:
    """A section of the report."""

    id: str
    """Of the link to it."""
    title: str
    prose: Sequence[str] = ()
    """Paragraphs."""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
