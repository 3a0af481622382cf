"""What a check of the paper leaves: the sentence it tests, numbers with their spread, and a verdict.

A claim is a sentence of the paper and the parts that it is made of. A part is one number against one threshold. The
verdict follows from the parts alone. Some parts are *main*: the sentence stands or falls with them. Every part of a
theorem is main; of a finding, those at the largest noise, because noise is what the paper's experiments are about, or
those that the sentence names; where a sentence is about several methods, how many of them do as it says. If a main part
fails, the claim does not hold, however many others do; if the main parts hold and others fail, it holds in part. A fact
of the set-up has no main part: it holds in part if some of its numbers are as the paper says.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["KINDS", "VERDICTS", "Claim", "Kind", "Part", "Verdict"]

Verdict = Literal["holds", "holds in part", "does not hold", "not measured"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds in part", "does not hold", "not measured")

Kind = Literal["theorem", "finding", "set-up"]
KINDS: tuple[Kind, ...] = ("theorem", "finding", "set-up")

Relation = Literal["<=", ">="]


@dataclass(frozen=True)
class Part:
    """One number against one threshold.

    Args:
        what: the quantity, in words.
        measured: its value, or None when the results at hand do not have it; infinity for a run that diverged.
        relation: which side of the threshold the sentence asks for.
        threshold: fixed before the measurement.
        spread: the standard error over repeats or, where that is undefined, None.
        slack: how far beyond the threshold a Monte-Carlo error may carry the number; 0 except for the theorems.
        main: whether the sentence falls with this part.

    >>> Part("a ratio", 0.5, "<=", 1.0).holds
    True
    >>> Part("a ratio", None, "<=", 1.0).holds is None
    True
    """

    what: str
    measured: float | None
    relation: Relation
    threshold: float
    spread: float | None = None
    slack: float = 0.0
    main: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether the number is on the side of the threshold that the sentence asks for; None if there is none."""
        if self.measured is None:
            return None
        if math.isnan(self.measured):
            return False
        if self.relation == "<=":
            return self.measured <= self.threshold + self.slack
        return self.measured >= self.threshold - self.slack

    @property
    def closeness(self) -> float:
        """How near the number is to its threshold: 1 on it, less on the right side, more on the wrong one.

        >>> Part("a ratio", 0.5, "<=", 2.0).closeness, Part("a ratio", 4.0, ">=", 2.0).closeness
        (0.25, 0.5)
        """
        if self.measured is None:
            return 0.0
        top, bottom = (self.measured, self.threshold) if self.relation == "<=" else (self.threshold, self.measured)
        if math.isnan(top) or math.isnan(bottom):
            return math.inf
        if bottom == 0 or math.isinf(bottom):
            return 0.0
        return top / bottom


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper as a check.

    Args:
        id: stable, for links and comparisons between runs.
        sentence: the paper's words.
        where: where they stand.
        check: what is measured.
        reason: why the threshold is what it is.
        parts: the numbers.
        note: what a reader should know besides.
        kind: a theorem, a finding of the experiments, or a fact of their set-up.
        figures: the paper's figures in which it can be seen.

    >>> good, bad = Part("a", 1.0, "<=", 2.0), Part("b", 3.0, "<=", 2.0, main=True)
    >>> Claim("x", "It is so.", "Section 7", "a check", "a reason", (good,)).verdict
    'holds'
    >>> Claim("x", "It is so.", "Section 7", "a check", "a reason", (good, bad)).verdict
    'does not hold'
    """

    id: str
    sentence: str
    where: str
    check: str
    reason: str
    parts: tuple[Part, ...]
    note: str = ""
    kind: Kind = "finding"
    figures: tuple[int, ...] = ()

    @property
    def deciding(self) -> tuple[Part, ...]:
        """The parts that the claim stands or falls with: the main ones or, if none is, all of them."""
        return tuple(part for part in self.parts if part.main) or self.parts

    @property
    def verdict(self) -> Verdict:
        """Holds if every measured part does, and not if a main one fails; if others fail, in part."""
        outcomes = [part.holds for part in self.parts if part.holds is not None]
        main = [part.holds for part in self.deciding if part.holds is not None]
        if not main:
            return "not measured"
        if all(outcomes):
            return "holds"
        has_main = any(part.main for part in self.parts)
        fails = not all(main) if has_main else not any(outcomes)
        return "does not hold" if fails else "holds in part"

    @property
    def headline(self) -> Part:
        """The part that decides: of those that fail, or if none does of all, the main ones before the others.

        Among them it is the one that fails by most or holds by least.
        """
        measured = [part for part in self.parts if part.holds is not None]
        return max(measured or self.parts, key=lambda part: (part.holds is False, part.main, part.closeness))

    def record(self) -> dict[str, Any]:
        """The claim as it stands in claims.json; numbers that JSON lacks are written as text."""
        headline = self.headline
        return {
            "id": self.id,
            "kind": self.kind,
            "sentence": self.sentence,
            "where": self.where,
            "check": self.check,
            "reason": self.reason,
            "verdict": self.verdict,
            "what": headline.what,
            "measured": _plain(headline.measured),
            "spread": _plain(headline.spread),
            "relation": headline.relation,
            "threshold": _plain(headline.threshold),
            "main": headline.main,
            "figures": list(self.figures),
            "parts": [
                {key: _plain(value) for key, value in asdict(part).items()} | {"holds": part.holds}
                for part in self.parts
            ],
            "note": self.note,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
