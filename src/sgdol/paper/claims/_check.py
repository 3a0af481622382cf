"""A check: what a claim of the paper says, and the function that measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from sgdol.paper.measures import Reader
from sgdol.paper.verdict import Claim, Kind, Part

__all__ = ["COMPARABLE", "COMPARABLE_REASON", "EXACT_REASON", "STALL", "STALL_REASON", "Check", "Measured", "claim"]

STALL = 10 ** (-1 / 4)
COMPARABLE = 2.0

STALL_REASON = (
    "a run that oscillates around a value has a decade ratio of 1, one whose squared gradient falls as 1/√t"
    " has 0.32; 0.56 is halfway between them on a logarithmic axis"
)
COMPARABLE_REASON = "a factor of two is little on the figures' logarithmic axes, which span several decades"
EXACT_REASON = "a number that the setting fixes; 1e-9 is for rounding"


class Measured(NamedTuple):
    """The parts of a claim with a note that the results themselves call for."""

    parts: Iterable[Part]
    note: str = ""


Measure = Callable[[Reader], Iterable[Part] | Measured]


@dataclass(frozen=True)
class Check:
    """A claim that waits for its numbers; calling it measures them."""

    id: str
    kind: Kind
    sentence: str
    where: str
    check: str
    reason: str
    figures: tuple[int, ...]
    note: str
    measure: Measure

    def __call__(self, read: Reader) -> Claim:
        """The claim with its numbers in these results; what they lack is not measured."""
        found = self.measure(read)
        parts, note = found if isinstance(found, Measured) else (found, "")
        return Claim(
            self.id,
            self.sentence,
            self.where,
            self.check,
            self.reason,
            tuple(parts),
            note=note or self.note,
            kind=self.kind,
            figures=self.figures,
        )


def claim(
    id: str,
    *,
    kind: Kind,
    sentence: str,
    where: str,
    check: str,
    reason: str,
    figures: tuple[int, ...] = (),
    note: str = "",
) -> Callable[[Measure], Check]:
    """Make a function that measures parts the check of a claim.

    Args:
        id: stable, for links and comparisons between runs.
        kind: a theorem, a finding of the experiments, or a fact of their set-up.
        sentence: the paper's words.
        where: where they stand.
        check: what is measured.
        reason: why the threshold is what it is.
        figures: the paper's figures in which it can be seen.
        note: what a reader should know besides.

    >>> @claim("two", kind="theorem", sentence="1 + 1 = 2.", where="p. 379", check="the sum", reason="arithmetic")
    ... def two(read):
    ...     return [Part("1 + 1", 1.0 + 1.0, "<=", 2.0)]
    >>> two(None).verdict
    'holds'
    """

    def decorate(measure: Measure) -> Check:
        return Check(id, kind, sentence, where, check, reason, figures, note, measure)

    return decorate


def checks_of(module: ModuleType) -> tuple[Check, ...]:
    """The checks that a module defines, in the order in which it defines them."""
    return tuple(value for value in vars(module).values() if isinstance(value, Check))
