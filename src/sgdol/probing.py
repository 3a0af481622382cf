"""A first curvature, from nothing but gradients: probes along the first one, longer or shorter until one tells.

The optimizer without M (:mod:`sgdol.free`) knows no length at its first point. It tries one along the first gradient
and sees by what share that changes the gradient: by next to nothing, and the difference drowns in rounding; by too
much, and it is not the curvature here. Pure functions of a state and numbers: front ends evaluate the gradients.

>>> bracket = first_probe(norm=3.0, size=1.0, loss=1.5)  # f = 3 x^2/2 at x = 1
>>> while not bracket.told and bracket.count < DEFAULTS.probes:
...     bracket = next_probe(bracket, change=bracket.length)  # ||y||/||g||, here the length itself
>>> bracket.count, bracket.curvature  # M in units of ||g_1||
(2, 1.0)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sgdol._numbers import clip, isfinite, maximum, minimum, negate, ratio, sqrt, where

__all__ = ["Bracket", "Settings", "first_probe", "next_probe"]

Number = Any
"""A Python number, or an array that holds one."""


class Settings(NamedTuple):
    """The constants of the search: pure numbers."""

    probes: int = 8
    """How many points along the first gradient may be tried for a first M; two or three are usual."""
    guess: float = 1 / 64
    """The first probe, in units of ||x||..."""
    guess_by_loss: float = 1 / 8
    """...or, from x = 0, of abs(f)/||g||."""
    shortest: float = 1 / 32
    """A probe measures a curvature if it changes the gradient by at least this share: less drowns in rounding..."""
    longest: float = 1 / 2
    """...and by at most this one: more is not local."""
    aim: float = 1 / 8
    """The share that the next probe aims at."""
    stretch: float = 64.0
    """A probe is at most so many times longer or shorter than the one before."""


DEFAULTS = Settings()


class Bracket(NamedTuple):
    """How far the search for a first M has come."""

    length: Number
    """How long the next probe is."""
    short: Number = 0.0
    """The longest probe that was too short, 0 if none was."""
    long: Number = float("inf")
    """The shortest probe that was too long."""
    curvature: Number = 0.0
    """M in units of ||g_1||, as the probes so far tell it."""
    told: Number = False
    """Whether a probe has changed the gradient by a share that measures."""
    count: Number = 0
    """How many probes there were."""


def first_probe(norm: Number, size: Number, loss: Number, settings: Settings = DEFAULTS) -> Bracket:
    """A first guess of a length along the first gradient, from the only lengths there are.

    Args:
        norm: ||g_1||.
        size: ||x_1||.
        loss: f at x_1; with x_1 = 0 and f = 0 there is no length at all.
        settings: the constants.
    """
    by_loss = settings.guess_by_loss * (abs(loss) / norm)
    length = where(size > 0, settings.guess * size, where(by_loss > 0, by_loss, 1.0))
    return Bracket(length)


def next_probe(bracket: Bracket, change: Number, settings: Settings = DEFAULTS) -> Bracket:
    """Learn from a probe. The search ends when it has told, or after ``settings.probes``.

    Once a too short and a too long probe are known, the next is their geometric mean: a function that bends would send
    an extrapolation to and fro. If no probe measures, M is at most what the longest of the too short ones allows;
    what a too long one gives is used only if all were too long, and then it is the shortest's.

    Args:
        bracket: the search so far.
        change: ||y||/||g||, by how much the probe changed the gradient; not finite if the point was too far out.
        settings: the constants.

    >>> next_probe(Bracket(1.0), 1 / 64).length, next_probe(Bracket(1.0), 4.0).length
    (8.0, 0.03125)
    >>> next_probe(next_probe(Bracket(1.0), 1 / 64), 4.0).length  # between 1 and 8
    2.8284271247461903
    """
    b, length = bracket, bracket.length
    finite = isfinite(change)
    too_short = change < settings.shortest
    too_long = negate(change <= settings.longest)
    short = where(too_short, maximum(b.short, length), b.short)
    long = where(too_long, minimum(b.long, length), b.long)
    known = where(finite, change, 1.0)
    factor = clip(ratio(settings.aim, known, settings.stretch), 1 / settings.stretch, settings.stretch)
    extrapolated = length * where(finite, factor, 1 / settings.stretch)
    between = short * sqrt(ratio(long, short, 1.0))
    outside = too_short | too_long
    return Bracket(
        length=where((short > 0) & isfinite(long), between, extrapolated),
        short=short,
        long=long,
        curvature=where(outside & (short > 0), ratio(settings.shortest, short, 0.0), known / length),
        told=negate(outside),
        count=b.count + 1,
    )
