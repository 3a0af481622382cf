"""What the command line looks like: consoles, characters, bars and tables."""

from __future__ import annotations

import codecs
import threading
import time
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sgdol.paper.verdict import VERDICTS, Claim, Verdict

__all__ = ["Bars", "Whole", "console", "make_printable", "print_claim", "print_claims", "status"]

COLOURS: dict[Verdict, str] = {
    "holds": "green",
    "holds in part": "yellow",
    "does not hold": "red",
    "not measured": "dim",
}


def console(*, stderr: bool = False) -> Console:
    """A console that prints what it is given: no markup, no highlighting, and :car: is not a picture of one."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


# --- Characters that a stream does not have ---------------------------------------------------------------------------

_PLAIN = {
    "≤": "<=", "≥": ">=", "“": '"', "”": '"', "‘": "'", "’": "'", "′": "'", "×": "x", "±": "+-", "−": "-", "–": "-",
    "…": "...", "∞": "inf", "∇": "grad ", "‖": "||", "Σ": "sum", "√": "sqrt", "ℓ": "l", "α": "alpha", "β": "beta",
    "η": "eta", "μ": "mu", "σ": "sigma", "φ": "phi", "ł": "l", "Ł": "L",
}  # fmt: skip
_RAISED = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
_HANDLER = "sgdol.plain"


def _spelled_out(error: UnicodeError) -> tuple[str, int]:
    """What stands for the characters that an encoding lacks: their plain spelling, or a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    words, text = [], error.object
    for place in range(error.start, error.end):
        character = text[place]
        if character in _RAISED:
            first = place == 0 or text[place - 1] not in _RAISED
            words.append("^" * first + "-0123456789"[_RAISED.index(character)])
        elif character in _PLAIN:
            # A Greek letter is a word now: M eta, not Meta.
            apart = character.isalpha() and place > 0 and text[place - 1].isalnum()
            words.append(" " * apart + _PLAIN[character])
        else:
            plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
            words.append(plain or "?")
    return "".join(words), error.end


def make_printable(stream: TextIO) -> None:
    """Let a stream spell out what its encoding lacks, such as <= in ASCII, instead of failing."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-")
    if not encoding.startswith("utf") and hasattr(stream, "reconfigure"):
        codecs.register_error(_HANDLER, _spelled_out)
        stream.reconfigure(errors=_HANDLER)


# --- Claims -----------------------------------------------------------------------------------------------------------


def print_claims(out: Console, found: Sequence[Claim]) -> None:
    """A line for each claim, the kinds apart, and how many there are of each verdict."""
    from sgdol.paper.report.words import GROUPS, decisions, measurement, tally

    widest = max((len(claim.id) for claim in found), default=0)
    for kind, (title, _, _) in GROUPS.items():
        members = [claim for claim in found if claim.kind == kind]
        if not members:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title=title, title_justify="left")
        table.add_column("verdict", no_wrap=True, min_width=max(map(len, VERDICTS)))
        table.add_column("claim", no_wrap=True, min_width=widest)
        table.add_column("the part that decides", overflow="fold")
        for claim in members:
            decided = "\n".join(f"{label}: {part.what}: {measurement(part)}" for label, part in decisions(claim))
            table.add_row(Text(claim.verdict, style=COLOURS[claim.verdict]), claim.id, Text(decided))
        out.print(table, soft_wrap=False)
        out.print()
    out.print(tally(found))


def print_claim(out: Console, claim: Claim) -> None:
    """One claim in full."""
    from sgdol.paper.report.words import measurement

    out.print(f"“{claim.sentence}”\n{claim.where} ({claim.kind})\n")
    out.print(f"{claim.verdict}\n", style=COLOURS[claim.verdict])
    for part in claim.parts:
        mark = {True: "holds", False: "fails", None: "–"}[part.holds]
        out.print(f"  {mark:<6} {'main' if part.main else '':<5} {part.what}: {measurement(part)}")
    for name, text in (("measured", claim.check), ("threshold", claim.reason), ("note", claim.note)):
        if text:
            out.print(f"\n{name}: {text}")


# --- Progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def status(err: Console, what: str) -> Iterator[Callable[[str], None] | None]:
    """A line that says what is being done, on a terminal; silence elsewhere."""
    if not err.is_terminal:
        yield None
        return
    with err.status(what) as line:
        yield lambda step: line.update(f"{what}: {step}")


class Whole:
    """How much of all the work is done, and how long the rest will take if it goes on like that.

    >>> whole = Whole({"a": 30.0, "b": 70.0}, clock=iter([0.0, 12.0]).__next__)
    >>> whole.advance("b", 10.0)
    >>> whole.skip("a")
    >>> round(whole.share, 3), round(whole.left(), 1)
    (0.143, 72.0)
    """

    def __init__(self, work: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.rest = dict(work)
        self.done = 0.0
        self.clock = clock
        self.start = clock()

    def advance(self, part: str, work: float) -> None:
        """So much more of the part is done."""
        step = min(work, self.rest[part])
        self.rest[part] -= step
        self.done += step

    def skip(self, part: str) -> None:
        """The part was done before: it neither counts nor tells how fast the rest goes."""
        self.rest[part] = 0.0

    @property
    def total(self) -> float:
        """All the work of this run."""
        return self.done + sum(self.rest.values())

    @property
    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        return self.done / self.total if self.total else 1.0

    def left(self) -> float | None:
        """The seconds that are left; None while nothing is done."""
        return (self.clock() - self.start) * (1 - self.share) / self.share if self.share else None


class Bars:
    """A bar for everything and one for each experiment and noise; without a terminal, a line for each part done.

    Args:
        err: where the bars go.
        cost: how long an iteration of a part takes, next to those of the others.
        words: a time in words.
    """

    def __init__(self, err: Console, cost: Callable[[str], float], words: Callable[[float], str]) -> None:
        self.err, self.cost, self.words = err, cost, words
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<28}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
            console=err,
        )
        self.tasks: dict[str, Any] = {}
        self.left: dict[str, int] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.whole = Whole({})
        self.lock = threading.RLock()

    def __enter__(self) -> Bars:
        if self.err.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.err.is_terminal:
            self.bars.stop()

    @staticmethod
    def group(part: str) -> str:
        """The experiment and the noise of a part: its first two words."""
        return ": ".join(part.split(": ")[:2])

    def plan(self, parts: Mapping[str, int]) -> None:
        """Make a bar for everything and one for each group of parts."""
        totals: dict[str, int] = defaultdict(int)
        for part, iterations in parts.items():
            self.left[part] = iterations
            totals[self.group(part)] += iterations
        self.whole = Whole({part: iterations * self.cost(part) for part, iterations in parts.items()})
        self.everything = self.bars.add_task("everything", total=self.whole.total, note="")
        for group, total in totals.items():
            self.tasks[group] = self.bars.add_task(group, total=total, start=False, note="")

    def advance(self, part: str, iterations: int) -> None:
        """Move the part's bar, and that of everything."""
        with self.lock:
            self.left[part] -= iterations
            self.whole.advance(part, iterations * self.cost(part))
        self._move(part, iterations)

    def _move(self, part: str, iterations: int) -> None:
        task = self.tasks[self.group(part)]
        self.bars.start_task(task)
        self.bars.advance(task, iterations)
        with self.lock:
            self.bars.update(
                self.everything, completed=self.whole.done, total=self.whole.total or 1, note=self._time_left()
            )

    def _time_left(self) -> str:
        left = self.whole.left()
        return "" if left is None or self.whole.share == 1 else f"about {self.words(left)} left"

    def finish(self, part: str, seconds: float) -> None:
        """Fill what is left of the part, for one that was there already."""
        with self.lock:
            self.seconds[self.group(part)] += seconds
            rest, self.left[part] = self.left[part], 0
            if seconds:
                self.whole.advance(part, self.whole.rest[part])
            else:
                self.whole.skip(part)
        self._move(part, rest)
        if not self.err.is_terminal:
            took = self.words(seconds) if seconds else "done before"
            self.err.print(f"{part:<44} {took:>12} {self.whole.share:>6.0%} {self._time_left()}".rstrip())

    def times(self) -> dict[str, float]:
        """How long each group took, added over the runs that went side by side; 0 if it was there already."""
        return dict(self.seconds)
