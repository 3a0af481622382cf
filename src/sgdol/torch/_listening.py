"""Listening to the gradients of parameters without keeping the listener alive, and to the end of a backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["COMPILED", "Listening", "Recording", "after_backward", "compiled_autograd", "graph_task", "outermost"]

_ENGINE = torch.autograd.graph._engine_run_backward.__code__

COMPILED = -2
"""A graph task that is none: compiled autograd has traced a hook. Nobody can tell then where a backward ends."""

graph_task = torch._C._current_graph_task_id


class Recording(Protocol):
    """Who wants to know, of parameters that it knows by their place."""

    def arrived(self, index: int, gradient: Tensor) -> None:
        """This rank's own gradient arrives, and is about to be accumulated."""

    def begun(self, index: int) -> None:
        """A backward has reached a sharded parameter."""

    def reduced(self, index: int) -> None:
        """A sharded parameter's gradient, averaged over the ranks, has been added to ``.grad``."""


class Listening:
    """What one parameter's hooks call; does not keep the recorder alive.

    Args:
        recorder: is told.
        index: the parameter's place.
    """

    __slots__ = ("_index", "_recorder")

    def __init__(self, recorder: Recording, index: int) -> None:
        self._recorder = weakref.ref(recorder)
        self._index = index

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


def after_backward(callback: Callable[[], None]) -> None:
    """Run this when the backward that runs now has finished, after what has been queued so far.

    DistributedDataParallel queues its wait for the all-reduce in the middle of backward, so that a callback which is
    queued by a callback runs after it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def outermost() -> tuple[FrameType | None, bool]:
    """The call of the engine that this hook runs in, and whether there is another inside of it that does."""
    found, depth, frame = None, 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            found, depth = frame, depth + 1
        frame = frame.f_back  # type: ignore[assignment]
    return found, depth > 1


def compiled_autograd(who: str) -> NotImplementedError:
    """What is raised if passes went by uncounted because autograd was compiled."""
    return NotImplementedError(
        f"{who} does not run under compiled autograd, which hides from hooks where a backward() ends: switch it off "
        "(torch._dynamo.config.compiled_autograd = False). torch.compile of the model itself is fine"
    )
