"""The backward that runs now: reentrant checkpointing makes several graph tasks of one, threads run several at once.

A graph task does not tell which other it is inside of, but Python's stack does: all tasks of one backward are under the
same outermost call of autograd's engine. (On an accelerator hooks run in a thread of the device, whose stack begins
there: segments of reentrant checkpointing count as passes of their own, which matters where they share parameters.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor

from sgdol.torch._listening import COMPILED, Listening, graph_task
from sgdol.torch._sources._slots import Slot
from sgdol.torch._world import local

__all__ = ["Quick", "Running", "quick_hook", "thread"]

Quick = dict[int, tuple[dict[int, Tensor | None], bool]]
"""By graph task: where gradients that are measured together are kept, and whether they are, or only counted."""

thread = threading.get_ident


class Running:
    """A backward, and what it has brought so far.

    Args:
        number: how many have left a gradient before it.
        call: the outermost call of the engine that it runs in; None if there is none on this thread.
        eager: whether gradients are to be measured as they arrive, because ``.grad`` may not be theirs alone.
    """

    __slots__ = (
        "again",
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
        self.again: set[int] = set()
        """The slots that a second task has reached."""
        self.sums: dict[int, Tensor] = {}
        """What several tasks have brought the slots that they share."""

    def runs_in(self, call: FrameType | None, inside: bool) -> bool:
        """Whether a task under this call is part of it, the outermost of which there is one, or one inside."""
        if self.told:
            return inside and call is not None and self.outer == id(call)
        return call is not None and self.call is call

    def add(self, index: int, gradient: Tensor) -> None:
        """Add to what several tasks bring a slot."""
        known = self.sums.get(index)
        self.sums[index] = gradient if known is None else known + gradient


def quick_hook(
    quick: Quick, index: int, slot: Slot, listening: Listening
) -> Callable[[tuple[Tensor | None, ...]], None]:
    """A hook of one ordinary leaf. It is called more often than anything else, so its usual way is short."""
    strided = torch.strided

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0]
        if gradient is None:
            return
        found = quick.get(graph_task()) if slot.together else None
        if found is None or index in found[0] or gradient.layout is not strided or gradient.requires_grad:
            if torch.compiler.is_compiling():  # compiled autograd traces this
                quick[COMPILED] = ({}, False)
            else:
                listening.arrived(local(gradient))
        else:
            found[0][index] = gradient if found[1] else None

    return hook
