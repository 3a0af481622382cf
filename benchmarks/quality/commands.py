"""The command line that the quality suite and the larger networks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quality.methods import Contender
from benchmarks.quality.problem import HALVES, Half

__all__ = ["RESULTS", "chosen_contenders", "halves", "parse"]

RESULTS = Path(__file__).parents[1] / "results"


def parse(
    package: str, about: str | None, smoke: str, cache: str, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """The command, ``measure``, ``tables`` or ``list``, and its options.

    Args:
        package: that is run, as ``python -m`` wants it.
        about: the help text.
        smoke: what a smoke run leaves out.
        cache: the default folder of the single runs, below the results.
        arguments: of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="measure | tables | list")
    measure = commands.add_parser("measure", help="run what is missing, save it, and write the tables")
    measure.add_argument("--half", choices=[*HALVES, "both"], required=True, help="of the problems")
    measure.add_argument("--jobs", type=int, default=1, help="processes, of one thread each (default 1)")
    measure.add_argument("--smoke", action="store_true", help=smoke)
    measure.add_argument("--cache", type=Path, default=RESULTS / cache, help="folder of the single runs")
    measure.add_argument("--problem", action="append", help="only this one; may be repeated; prints, saves nothing")
    measure.add_argument("--method", action="append", help="only this one; may be repeated; prints, saves nothing")
    measure.add_argument(
        "--without-package", action="append", default=[], help="keep the saved lines of its optimizers as they are"
    )
    measure.add_argument("--fresh", action="store_true", help="use no saved line, only --cache")
    tabulate = commands.add_parser("tables", help="write the tables and the plot from the saved runs")
    for command in (measure, tabulate):
        command.add_argument(
            "--out", type=Path, help=f"folder of what is saved (default {RESULTS.name}/ beside the code)"
        )
    commands.add_parser("list", help="show the problems and the methods")
    return parser.parse_args(arguments)


def halves(options: argparse.Namespace) -> tuple[Half, ...]:
    """Those that --half names."""
    return HALVES if options.half == "both" else (options.half,)


def chosen_contenders(everyone: Sequence[Contender], options: argparse.Namespace) -> list[Contender]:
    """Those that --method and --without-package leave."""
    chosen = [
        c
        for c in everyone
        if c.method.package not in options.without_package and c.method.name in (options.method or [c.method.name])
    ]
    missing = set(options.method or []) - {c.method.name for c in chosen}
    if missing:
        raise SystemExit(f"--method: not known or not installed: {', '.join(sorted(missing))}; see `list`")
    return chosen
