"""The backward that runs now. Reentrant checkpointing makes several graph tasks of one, and threads run several at once.

A graph task does not tell which other it is inside of, but Python's stack does: all tasks of one backward are under the
same outermost call of autograd's engine. (On an accelerator hooks run in a thread of the device, whose stack begins
there: segments of reentrant checkpointing count as passes of their own, which matters only where they share parameters.)
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch
from torch import Tensor

__all__ = ["Running", "graph_task", "outermost", "thread"]

_ENGINE = torch.autograd.graph._engine_run_backward.__code__

graph_task = torch._C._current_graph_task_id
thread = threading.get_ident


class Running:
    """A backward, and what it has brought so far.

    Args:
        number: how many have left a gradient before it.
        call: the outermost call of the engine that it runs in; None if there is none on this thread.
        eager: whether gradients are to be measured as they arrive, because ``.grad`` may not be theirs alone.
    """

    __slots__ = (
        "arrived",
        "call",
        "counted",
        "eager",
        "new",
        "number",
        "outer",
        "small",
        "sums",
        "thread",
        "together",
        "told",
    )

    def __init__(self, number: int, call: FrameType | None, eager: bool) -> None:
        self.number = number
        self.thread = thread()
        self.outer = 0 if call is None else id(call)
        self.call: FrameType | None = None
        """The call itself, as long as only tasks inside of another came: nobody may tell when that ends."""
        self.told = False
        """Whether the end of the outermost task will be told."""
        self.eager = eager
        self.arrived: dict[int, Tensor | None] = {}
        """What has been kept of the gradients so far, by slot; None where ``.grad`` will say."""
        self.small: dict[int, Tensor] = {}
        """Gradients that will be measured at the end."""
        self.together: dict[int, Tensor | None] = {}
        """Gradients that are measured together with others (:mod:`sgdol.torch._sources._small`)."""
        self.new: list[int] = []
        """To which of these slots it brought the first."""
        self.counted: set[int] = set()
        """The slots of which it has been counted already, when a task of several ended."""
        self.sums: dict[int, Tensor] = {}
        """What several tasks have brought the slots that they share."""

    def runs_in(self, call: FrameType | None) -> bool:
        """Whether a task under this call is part of it."""
        return call is not None and (self.call is call if self.call is not None else self.outer == id(call))

    def add(self, index: int, gradient: Tensor) -> None:
        """Add to what several tasks bring a slot."""
        known = self.sums.get(index)
        self.sums[index] = gradient if known is None else known + gradient


def outermost() -> tuple[FrameType | None, bool]:
    """The call of the engine that this hook runs in, and whether there is another inside of it that does."""
    found, depth, frame = None, 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            found, depth = frame, depth + 1
        frame = frame.f_back  # type: ignore[assignment]
    return found, depth > 1
