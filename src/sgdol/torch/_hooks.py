"""Hooks on the way of gradients, which do not keep the recorder of passes alive, and the backward that they run in."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgdol.torch._world import Tap

if TYPE_CHECKING:
    from sgdol.torch._passes import Passes

__all__ = ["Listener", "after_backward", "graph_task", "outermost", "remove", "short_hook"]

_ENGINE = torch.autograd.graph._engine_run_backward.__code__

graph_task = torch._C._current_graph_task_id


class Listener:
    """What one parameter's hooks call; does not keep the recorder alive."""

    __slots__ = ("_index", "_recorder")

    def __init__(self, recorder: Passes, index: int) -> None:
        self._recorder, self._index = weakref.ref(recorder), index

    def arrived(self, gradient: Tensor) -> None:
        """A gradient arrives."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.arrived(self._index, gradient)

    def begun(self) -> None:
        """A backward has begun."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.begun(self._index)

    def reduced(self) -> None:
        """A gradient has been reduced."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.reduced(self._index)


def short_hook(recorder: Passes, key: int) -> Callable[[tuple[Tensor | None, ...]], None]:
    """The hook of an ordinary leaf. It is called more often than anything else, so its usual way is short."""
    reference = weakref.ref(recorder)

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        here, gradient = reference(), gradients[0]
        if here is None or gradient is None:
            return
        if here._keeping or graph_task() not in here._tasks or key not in here._rows:
            here.arrived(key, gradient)
        else:
            here._reached[here._rows[key]] = None

    return hook


def after_backward(callback: Callable[[], None]) -> None:
    """Run this when the backward that runs now has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def outermost() -> tuple[FrameType | None, bool]:
    """The outermost call of autograd's engine on this thread, and whether there is another inside of it.

    Reentrant checkpointing nests calls, and a graph task does not tell which other it is inside of; Python's stack
    does. (On an accelerator hooks run in a thread of the device, whose stack begins there: reentrant segments count as
    passes of their own.)
    """
    found, depth, frame = None, 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            found, depth = frame, depth + 1
        frame = frame.f_back  # type: ignore[assignment]
    return found, depth > 1


def remove(taps: Sequence[Tap]) -> None:
    """Take hooks away."""
    for tap in taps:
        tap.remove()
