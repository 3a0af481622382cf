"""The command line ``sgdol``: it parses, calls :mod:`sgdol.paper` and prints; it holds no logic."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import sgdol
from sgdol._interrupts import INTERRUPTED, leave
from sgdol.paper.environment import lines

EXTRA = "sgdol's command line needs the extra 'paper', and {} is missing: pip install 'sgdol[paper]'"
WITHOUT_THE_EXTRA = """Usage: sgdol [OPTIONS] COMMAND [ARGS]...

Stochastic gradient descent that learns its own step size: the paper's experiments, figures and claims.

Commands: reproduce, claims, report, convexity, data, env. All but env need the extra 'paper', which is not installed:
pip install 'sgdol[paper]'. The optimizers need no command: from sgdol import SGDOL, SGDOLFree."""
FAILED, USAGE = 1, 2
"""The statuses that shells know: it did not work, it was not called as it should be."""

try:
    import typer
    from typer.core import TyperCommand, TyperGroup

    from sgdol.paper.terminal import Bars, console, make_printable, print_claim, print_claims, status
except ModuleNotFoundError as error:
    if sys.argv[1:] == ["env"]:  # who has a front end alone can report a bug too
        print("\n".join(lines()))
        raise SystemExit from None
    if sys.argv[1:] in (["--help"], ["-h"], ["--version"]):
        print(f"sgdol {sgdol.__version__}" if "--version" in sys.argv else WITHOUT_THE_EXTRA)
        raise SystemExit from None
    raise SystemExit(EXTRA.format(error.name)) from None

__all__ = ["app", "main"]


class _ShowsFlags:
    """Help that shows an option without a value without one: --quick, not --quick <bool>."""

    def get_params(self, context: Any) -> list[Any]:
        parameters = super().get_params(context)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return parameters


class _Command(_ShowsFlags, TyperCommand):
    pass


class _Group(_ShowsFlags, TyperGroup):
    pass


app = typer.Typer(
    help="Stochastic gradient descent that learns its own step size: the paper's experiments, figures and claims.",
    epilog="Start with: sgdol reproduce --quick --out results, then open results/report.html.",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out, err = console(), console(stderr=True)


class Refusal(Exception):
    """An option that cannot be used; the message is one sentence that says why."""


OutOption = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="The results folder. It is made if it is not there.")
]
ResultsOption = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="The results folder that sgdol reproduce wrote.")
]


def _methods() -> list[str]:
    from sgdol.paper.methods import METHODS

    return list(METHODS)


def _claim_ids(context: typer.Context) -> list[str]:
    """The ids that the folder's claims.json has, if it has one: a shell that completes a word wants no more."""
    try:
        claims = json.loads((Path(context.params.get("out_folder") or "results") / "claims.json").read_bytes())
        return [claim["id"] for claim in claims]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"sgdol {sgdol.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Stochastic gradient descent that learns its own step size: the paper's experiments, figures and claims."""


@app.command(cls=_Command)
def reproduce(
    figure: Annotated[
        list[int] | None,
        typer.Option(
            metavar="1|2|3|4",
            autocompletion=lambda: ["1", "2", "3", "4"],
            help="Which of the paper's figures; repeat it for several. Default: all four. 1 and 4 are the adult data,"
            " 2 and 3 the Rosenbrock function; one alone is faster.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            autocompletion=_methods,
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
            autocompletion=lambda: ["coordinate", "total"],
            help="How the paper's noise level on Rosenbrock is read: sigma as the standard deviation of each"
            " coordinate, or of the whole noise vector. The paper leaves it open.",
        ),
    ] = "coordinate",
    adagrad: Annotated[
        str,
        typer.Option(
            metavar="current|delayed",
            autocompletion=lambda: ["current", "delayed"],
            help="Whether AdaGrad Global's step size sees the current gradient, as usual, or only those before it,"
            " which makes the step independent of the gradient that it scales.",
        ),
    ] = "current",
) -> None:
    """Run the paper's experiments and write figures, numbers, claims and a report.

    Interrupt it whenever you like: the same command continues where it stopped and ends with the same results.
    """
    from sgdol.paper.configuration import Configuration
    from sgdol.paper.experiments import iteration_cost
    from sgdol.paper.publish import publish
    from sgdol.paper.report import duration
    from sgdol.paper.reproduce import reproduce as run

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
    with Bars(err, iteration_cost, duration) as bars:
        results = run(configuration, out_folder, bars)
    times = bars.times()
    for group, seconds in times.items():
        share = f"{seconds / sum(times.values()):>6.0%}" if seconds else ""
        out.print(f"{group:<28} {duration(seconds) if seconds else 'done before':>12}{share}")
    ran = time.perf_counter()
    with status(err, "figures and claims") as step:
        published = publish(results, step)
    done = time.perf_counter()
    out.print(f"{'figures, claims, report':<28} {duration(done - ran):>12}")
    out.print(f"{'altogether':<28} {duration(done - start):>12}\n")
    print_claims(out, published.claims)
    out.print(f"\n{results.folder}: figures, curves, summary.csv, claims.json\nOpen {published.report.resolve()}")


@app.command(cls=_Command)
def claims(
    out_folder: ResultsOption = Path("results"),
    show: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            autocompletion=_claim_ids,
            help="Show one claim in full: the sentence, every number with its spread, and why the threshold is what"
            " it is. Default: a line for each claim.",
        ),
    ] = None,
    as_markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print the table in Markdown, for a README or an issue. Default: plain."),
    ] = False,
) -> None:
    """Check every claim of the paper on the results again and write claims.json."""
    from sgdol.paper.files import shown
    from sgdol.paper.publish import publish_claims
    from sgdol.paper.report import markdown
    from sgdol.paper.results import Results

    results = Results(out_folder)
    with status(err, "claims") as step:
        found = publish_claims(results, step)
    if as_markdown:
        out.print(markdown(found))
        return
    if show is None:
        print_claims(out, found)
        out.print(f"\n{results.folder / 'claims.json'}; sgdol claims --id ID shows one of them in full")
        return
    named = {claim.id: claim for claim in found}
    if show not in named:
        raise Refusal(f"there is no claim {shown(show)}: the ids are {', '.join(named)}")
    print_claim(out, named[show])


@app.command(cls=_Command)
def report(out_folder: ResultsOption = Path("results")) -> None:
    """Draw the figures and write report.html again, from the results in a folder."""
    from sgdol.paper.publish import publish
    from sgdol.paper.results import Results

    with status(err, "report") as step:
        published = publish(Results(out_folder), step)
    for path in [*published.figures, published.claims_file, published.report]:
        out.print(str(path))


@app.command(cls=_Command)
def convexity(out_folder: ResultsOption = Path("results")) -> None:
    """Measure what convexity is worth to the step sizes: minutes; report shows it as a section of its own."""
    from sgdol.paper import convexity as experiments

    with status(err, "convexity") as step:
        experiments.run(out_folder, progress=step or (lambda text: None))
    for name in ("convexity.csv", "convexity-curves.csv", "convexity.png"):
        out.print(str(out_folder / name))


@app.command(cls=_Command)
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


@app.command(cls=_Command)
def env() -> None:
    """Print the versions of everything that matters, for a bug report."""
    for line in lines():
        out.print(line)


def main() -> None:
    """The command line: whatever is wrong with the input becomes one sentence and a status that is not 0."""
    for stream in (sys.stdout, sys.stderr):
        make_printable(stream)
    try:
        code = app(prog_name="sgdol", standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        leave()
    except Exception as error:
        said = _sentence(error)
        if said is None:
            raise
        sentence, code = said
        _abandon_stdout(error)
        if sentence:
            err.print(f"sgdol: {' '.join(sentence.split())}")
    sys.exit(code if isinstance(code, int) else 0)


def _abandon_stdout(error: Exception) -> None:
    """After a full disk or a closed pipe nobody reads any more, and the interpreter would try again at its end."""
    if isinstance(error, OSError):
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(error: Exception) -> tuple[str, int] | None:
    """What is wrong with what the user gave, and the status; None for an error of ours, which wants its traceback."""
    from sgdol.paper.data import DataError

    usage_error = typer.BadParameter.__bases__[0]
    if isinstance(error, usage_error):
        return str(error.format_message()), USAGE  # type: ignore[attr-defined]
    if isinstance(error, Refusal):
        return str(error), USAGE
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("sgdol"):
        return EXTRA.format(error.name), FAILED
    if isinstance(error, BrokenPipeError):
        return "", FAILED
    if isinstance(error, OSError):
        return f"{error.filename or 'cannot write the output'}: {error.strerror or error}", FAILED
    # Without the extra there is no ResultsError to import, and none to be raised.
    configuration = sys.modules.get("sgdol.paper.configuration")
    refusals = (DataError, *((configuration.ResultsError,) if configuration else ()))
    return (str(error), FAILED) if isinstance(error, refusals) else None


if __name__ == "__main__":
    main()
