"""The command line ``sgdol``: it parses, calls :mod:`sgdol.paper` and prints; it holds no logic."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import sgdol

EXTRA = "sgdol's command line needs the extra 'paper', and {} is missing: pip install 'sgdol[paper]'"
INTERRUPTED = 130
"""The status that shells know for a program that was interrupted."""

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise SystemExit(EXTRA.format(error.name)) from None

if TYPE_CHECKING:
    from sgdol.paper.verdict import Claim

__all__ = ["app", "main"]

app = typer.Typer(
    help="Stochastic gradient descent that learns its own step size: the paper's experiments, figures and claims.",
    epilog="Start with: sgdol reproduce --quick --out results, then open results/report.html.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(highlight=False, markup=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


class Refusal(Exception):
    """An option that cannot be used; the message is one sentence that says why."""


OutOption = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="The results folder. It is made if it is not there.")
]
ResultsOption = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="The results folder that sgdol reproduce wrote.")
]


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"sgdol {sgdol.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Stochastic gradient descent that learns its own step size: the paper's experiments, figures and claims."""


@app.command()
def reproduce(
    figure: Annotated[
        list[int] | None,
        typer.Option(
            metavar="1|2|3|4",
            help="Which of the paper's figures; repeat it for several. Default: all four. 1 and 4 are the adult data,"
            " 2 and 3 the Rosenbrock function; one alone is faster.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run only this method with noise, by the paper's name (for instance 'SGDOL Global'); repeat it for"
            " several. Default: all that the figures need. The noiseless runs, which tune the rates, are always made.",
        ),
    ] = None,
    horizon: Annotated[
        int | None,
        typer.Option(
            metavar="T",
            help="Iterations of each run. Default: 100000, which takes minutes. 1000000 shows the tails best and"
            " takes ten times as long.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Repeats of each noisy run. Default: the paper's, 40 on Rosenbrock and 5 on adult. With minibatches"
            " of one, five leave a spread of 40 %; more give a narrower band.",
        ),
    ] = None,
    out_folder: OutOption = Path("results"),
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="All figures at a short horizon (2000), to see that everything works before the long run. Long-run"
            " claims need the default horizon.",
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A LIBSVM file with labels -1/+1 and features 1 to 123, plain or compressed, instead of the adult"
            " data that ship with sgdol. Default: those.",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Determines everything that is drawn: the same seed gives the same numbers. Change it to see how"
            " much they depend on chance.",
        ),
    ] = 0,
    noise: Annotated[
        str,
        typer.Option(
            metavar="coordinate|total",
            help="How the paper's noise level on Rosenbrock is read: sigma as the standard deviation of each"
            " coordinate, or of the whole noise vector. The paper leaves it open.",
        ),
    ] = "coordinate",
    adagrad: Annotated[
        str,
        typer.Option(
            metavar="current|delayed",
            help="Whether AdaGrad Global's step size sees the current gradient, as usual, or only those before it,"
            " which makes the step independent of the gradient that it scales.",
        ),
    ] = "current",
) -> None:
    """Run the paper's experiments and write figures, numbers, claims and a report.

    Interrupt it whenever you like: the same command continues where it stopped and ends with the same results.
    """
    from sgdol.paper.publish import publish
    from sgdol.paper.reproduce import reproduce as run
    from sgdol.paper.results import Configuration

    given = {
        "horizon": horizon,
        "figures": tuple(figure) if figure else None,
        "only": tuple(method) if method else None,
        "data": data and str(data),
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        configuration = Configuration(
            repeats=repeats,
            quick=quick,
            seed=seed,
            noise_model=noise,  # type: ignore[arg-type]
            adagrad_form=adagrad,
            **chosen,
        )
    except ValueError as error:
        raise Refusal(str(error)) from error
    start = time.perf_counter()
    with _Bars() as bars:
        results = run(configuration, out_folder, bars)
    bars.print_times()
    ran = time.perf_counter()
    with _status("figures and claims") as step:
        published = publish(results, step)
    done = time.perf_counter()
    out.print(f"{'figures, claims, report':<28} {_seconds(done - ran):>12}")
    out.print(f"{'altogether':<28} {_seconds(done - start):>12}\n")
    _print_claims(published.claims)
    out.print(f"\n{results.folder}: figures, curves, summary.csv, claims.json\nOpen {published.report.resolve()}")


@app.command()
def claims(
    out_folder: ResultsOption = Path("results"),
    show: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Show one claim in full: the sentence, every number with its spread, and why the threshold is what"
            " it is. Default: a line for each claim.",
        ),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table in Markdown, for a README or an issue. Default: plain.")
    ] = False,
) -> None:
    """Check every claim of the paper on the results again and write claims.json."""
    from sgdol.paper.publish import publish_claims
    from sgdol.paper.report import markdown
    from sgdol.paper.results import Results

    results = Results(out_folder)
    with _status("claims") as step:
        found = publish_claims(results, step)
    if as_markdown:
        out.print(markdown(found))
        return
    if show is None:
        _print_claims(found)
        out.print(f"\n{results.folder / 'claims.json'}; sgdol claims --id ID shows one of them in full")
        return
    named = {claim.id: claim for claim in found}
    if show not in named:
        raise Refusal(f"there is no claim {show!r}: the ids are {', '.join(named)}")
    _print_claim(named[show])


@app.command()
def report(out_folder: ResultsOption = Path("results")) -> None:
    """Draw the figures and write report.html again, from the results in a folder."""
    from sgdol.paper.publish import publish
    from sgdol.paper.results import Results

    with _status("report") as step:
        published = publish(Results(out_folder), step)
    for path in [*published.figures, published.claims_file, published.report]:
        out.print(str(path))


@app.command()
def data(
    export: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            metavar="a9a FILE",
            help="Write LIBSVM's file a9a, byte for byte, for use with other programs. A file that is there is left"
            " alone.",
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check that a LIBSVM file of your own can be used with reproduce --data."),
    ] = None,
) -> None:
    """Describe the adult data that ship with sgdol, write them out, or check a file of your own."""
    from sgdol.paper import data as adult

    if export is not None:
        out.print(str(adult.export(*export)))
    if check is not None:
        out.print(adult.describe(check))
    if export is None and check is None:
        out.print(adult.describe())


# --- Printing ---------------------------------------------------------------------------------------------------------

_COLOURS = {"holds": "green", "holds in part": "yellow", "does not hold": "red", "not measured": "dim"}


def _print_claims(found: Sequence[Claim]) -> None:
    from sgdol.paper.report import decisions, measurement, tally

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("claim", no_wrap=True)
    table.add_column("the part that decides", overflow="fold")
    for claim in found:
        decides = Text("\n".join(f"{label}: {part.what}: {measurement(part)}" for label, part in decisions(claim)))
        table.add_row(Text(claim.verdict, style=_COLOURS[claim.verdict]), claim.id, decides)
    out.print(table, soft_wrap=False)
    out.print(f"\n{tally(found)}")


def _print_claim(claim: Claim) -> None:
    from sgdol.paper.report import measurement

    out.print(f"“{claim.sentence}”\n{claim.where}\n")
    out.print(f"{claim.verdict}\n", style=_COLOURS[claim.verdict])
    for part in claim.parts:
        mark = {True: "holds", False: "fails", None: "–"}[part.holds]
        out.print(f"  {mark:<6} {part.what}: {measurement(part)}")
    for name, text in (("measured", claim.check), ("threshold", claim.reason), ("note", claim.note)):
        if text:
            out.print(f"\n{name}: {text}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


@contextmanager
def _status(what: str) -> Iterator[Any]:
    """A line that says what is being done, on a terminal; silence elsewhere."""
    if not err.is_terminal:
        yield None
        return
    with err.status(what) as status:
        yield lambda step: status.update(f"{what}: {step}")


class _Bars:
    """A bar with the time left for each experiment and noise; without a terminal, a line for each part done."""

    def __init__(self) -> None:
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<28}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=err,
        )
        self.tasks: dict[str, Any] = {}
        self.left: dict[str, int] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.lock = threading.Lock()

    def __enter__(self) -> _Bars:
        if err.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if err.is_terminal:
            self.bars.stop()

    @staticmethod
    def group(part: str) -> str:
        """The experiment and the noise of a part: its first two words."""
        return ": ".join(part.split(": ")[:2])

    def plan(self, parts: Mapping[str, int]) -> None:
        """Make a bar for each group of parts."""
        totals: dict[str, int] = defaultdict(int)
        for part, iterations in parts.items():
            self.left[part] = iterations
            totals[self.group(part)] += iterations
        for group, total in totals.items():
            self.tasks[group] = self.bars.add_task(group, total=total, start=False)

    def advance(self, part: str, iterations: int) -> None:
        """Move the part's bar."""
        with self.lock:
            self.left[part] -= iterations
        self._move(part, iterations)

    def _move(self, part: str, iterations: int) -> None:
        task = self.tasks[self.group(part)]
        self.bars.start_task(task)
        self.bars.advance(task, iterations)

    def finish(self, part: str, seconds: float) -> None:
        """Fill what is left of the part, for one that was there already."""
        with self.lock:
            self.seconds[self.group(part)] += seconds
            rest, self.left[part] = self.left[part], 0
        self._move(part, rest)
        if not err.is_terminal:
            err.print(f"{part:<44} {_seconds(seconds) if seconds else 'done before':>12}")

    def print_times(self) -> None:
        """How long each group took, added over the runs that went side by side."""
        for group, seconds in self.seconds.items():
            out.print(f"{group:<28} {_seconds(seconds) if seconds else 'done before':>12}")


def main() -> None:
    """The entry point: whatever is wrong with the input becomes one sentence and a status that is not 0."""
    try:
        status = app(prog_name="sgdol", standalone_mode=False)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        err.print("sgdol: interrupted; the same command continues where it stopped")
        # Threads in the middle of a compiled run cannot be asked to stop, and every file is whole at every moment.
        os._exit(INTERRUPTED)
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        if sentence:
            err.print(f"sgdol: {' '.join(sentence.split())}")
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _sentence(error: Exception) -> str | None:
    """What is wrong with what the user gave; None for an error of ours, which wants its traceback."""
    from sgdol.paper.data import DataError

    usage_error = typer.BadParameter.__bases__[0]
    if isinstance(error, usage_error):
        return str(error.format_message())  # type: ignore[attr-defined]
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("sgdol"):
        return EXTRA.format(error.name)
    # Without the extra there is no ResultsError to import, and none to be raised.
    refusals: tuple[type[Exception], ...] = (Refusal, DataError, OSError)
    results = sys.modules.get("sgdol.paper.results")
    return str(error) if isinstance(error, (*refusals, *((results.ResultsError,) if results else ()))) else None


if __name__ == "__main__":
    main()
