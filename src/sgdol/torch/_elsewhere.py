"""The batch of one step, evaluated at other points: at probes, at the average, before the last step.

:mod:`sgdol.free` decides when, and what follows; here are the points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sgdol import free, probing
from sgdol.free import Settings, State
from sgdol.torch._evaluations import Evaluation, Evaluator, Here, Kept, root
from sgdol.torch._vectors import Vector, dot, numbers

__all__ = ["Elsewhere"]


class Elsewhere:
    """Decides where a step starts from, with the batch that the closure evaluates.

    Args:
        calls: calls the closure.
        closure: evaluates the batch of this step.
        settings: the constants.
        vector: the optimizer's vector of this name: ``"average"``, ``"previous"``.
    """

    def __init__(
        self, calls: Evaluator, closure: Callable[[], Any], settings: Settings, vector: Callable[[str], Vector]
    ) -> None:
        self._calls = calls
        self._closure = closure
        self._settings = settings
        self._vector = vector

    def advance(self, state: State, here: Here, now: Evaluation) -> tuple[State, Here, Evaluation]:
        """Decide where to step from. The parameters are there afterwards, and its gradient is in ``.grad``."""
        if state.updates == 0:
            if not now.finite or now.norm == 0:
                return state, here, now
            state = self._begin(state, here, now)
        elif free.alarm(state, now.loss, self._settings):
            state, here, now = self._guard(state, here, now)
        state, looks = free.wants_look_back(state, now.norm if now.finite else math.nan, self._settings)
        return self._look_back(state, here, now) if looks else (state, here, now)

    def _begin(self, state: State, here: Here, now: Evaluation) -> State:
        """The first point: check the closure, and measure M along the gradient by a difference of gradients."""
        kept = self._calls.kept(here, now)
        self._calls.refuse_another_batch(here, now, self._evaluate(here))
        direction = here.sharp(now.g, "direction")
        bracket = probing.first_probe(now.norm, here.length(here.x), now.loss)
        while not bracket.told and bracket.count < probing.DEFAULTS.probes:
            share = -bracket.length / now.norm / self._calls.unit
            here.space.put([torch.add(x, d, alpha=share) for x, d in zip(here.x, direction, strict=True)])
            probed = self._evaluate(here)
            change = math.inf
            if probed.finite:
                change = self._calls.norm(here, here.difference(probed.g, now.g, "y")) / now.norm
            bracket = probing.next_probe(bracket, change)
        self._return(here, kept)
        return free.begin(state, bracket.curvature * now.norm, now.norm)

    def _guard(self, state: State, here: Here, now: Evaluation) -> tuple[State, Here, Evaluation]:
        """The loss has jumped: go back to the average if this batch is fine there."""
        kept = self._calls.kept(here, now)
        here.space.put(self._vector("average"))
        there = here._replace(x=here.space.point("there"))
        found = self._evaluate(here)
        if found.finite and free.confirms(state, now.loss, found.loss, self._settings):
            return free.roll_back(state, self._settings), there, found
        self._return(here, kept)
        return state, here, now

    def _look_back(self, state: State, here: Here, now: Evaluation) -> tuple[State, Here, Evaluation]:
        """Evaluate this batch before the last step as well, and stay there if the step was too long."""
        before, unit = self._vector("previous"), self._calls.unit
        kept = self._calls.kept(here, now)
        here.space.put(before)
        loss = self._calls.again(self._closure)
        found = self._calls.gradient(here)
        s, y = here.difference(here.x, before, "s"), here.difference(now.g, found.g, "y")
        length = here.length(s)
        for along in s if length > 0 else ():
            along.div_(length)
        y_along, q_along, yy = numbers(dot(y, s), dot(found.g, s), dot(y, here.sharp(y)))
        if math.isfinite(loss) and math.isfinite(q_along):
            y_along = y_along / unit if now.finite else math.nan
            state, rejected = free.look_back(state, y_along, root(yy) / unit, length, q_along / unit, self._settings)
            if rejected:
                for x, start in zip(here.x, before, strict=True):
                    x.copy_(start)
                return state, here, self._calls.measure_found(here, loss, found)
        self._return(here, kept)
        return state, here, now

    def _evaluate(self, here: Here) -> Evaluation:
        """The same batch where the parameters are now."""
        return self._calls.measure(here, self._calls.again(self._closure))

    def _return(self, here: Here, kept: Kept) -> None:
        """Back to this point, with its gradient in ``.grad``."""
        here.space.put(here.x)
        kept.put_back()
