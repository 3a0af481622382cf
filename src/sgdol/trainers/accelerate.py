"""Accelerate: split batches, a closure for SGDOLFree, the average in checkpoints, and a log for the trackers.

``accelerator.prepare`` takes an ordinary ``sgdol.SGDOL`` or ``sgdol.SGDOLFree``.

* :class:`Microbatches` makes a step of a batch, split in two, or of the batches that are accumulated. SGDOLFree needs
  it.
* :class:`AveragedWeights` evaluates at the average and has it saved by ``accelerator.save_state``.
* :class:`StepSizeMonitor` logs the learned step size.

In the loop of Accelerate's documentation, with SGDOL and without :class:`Microbatches`, each batch under
``accelerator.accumulate(model)`` is one gradient, and ``step()`` does nothing before the last of them. Accelerate
divides the loss by ``gradient_accumulation_steps`` also where an epoch ends with fewer batches, as it does for every
optimizer: choose a number that divides the batches of an epoch.
"""

# ruff: noqa: E402  # what is missing is said before anything needs it
from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sgdol._extras import require

require("sgdol.trainers.accelerate", "trainers", "accelerate")

import torch
from accelerate import Accelerator
from torch import Tensor

from sgdol.torch import Log
from sgdol.torch._backward import repeatable, split, watched
from sgdol.torch._log import inner
from sgdol.trainers._average import Average, put_back
from sgdol.trainers._parts import check_parts

__all__ = ["AveragedWeights", "Microbatches", "StepSizeMonitor"]


class Microbatches:
    """Makes steps of batches: in parts, or of those that are accumulated.

    A batch is split along the first axis of its tensors. Inside ``accelerator.accumulate(model)`` with
    ``gradient_accumulation_steps=k`` the k batches are the parts: they are kept, and pass through the model together at
    the last of them. On several ranks there are several gradients already, and nothing is split. Gradients are zeroed
    here.

    Args:
        accelerator: which has prepared the model and the optimizer.
        model: as prepared.
        optimizer: as prepared: SGDOL or SGDOLFree.
        parts: into how many parts a batch is split, at least 2.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> from sgdol import SGDOLFree
    >>> _ = torch.manual_seed(0)
    >>> accelerator = Accelerator(cpu=True)
    >>> net = torch.nn.Linear(2, 1)
    >>> model, opt = accelerator.prepare(net, SGDOLFree(net.parameters()))
    >>> microbatches = Microbatches(accelerator, model, opt)
    >>> def loss_fn(x):
    ...     return (model(x) - x.sum(1, keepdim=True)).square().mean()
    >>> for _ in range(200):
    ...     loss = microbatches.step(loss_fn, torch.randn(8, 2))
    >>> bool(loss < 1e-3)
    True
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, *, parts: int = 2) -> None:
        if inner(optimizer) is None:
            raise TypeError(f"optimizer must be an SGDOL or SGDOLFree, as prepared, got {type(optimizer).__name__}")
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.parts = check_parts(parts)
        self._window: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = []

    def step(self, loss_fn: Callable[..., Tensor], *batch: Any) -> Tensor | None:
        """Make a step, if this is the last batch of one.

        Args:
            loss_fn: a function of the batch's arguments that returns the mean loss over the samples that it is given.
            batch: tensors, or dicts, tuples, lists and dataclasses of them.

        Returns:
            The mean loss over the batches of the step, before it; None if more of them come.
        """
        self._window.append((loss_fn, batch))
        if not self.accelerator.sync_gradients:
            return None
        window, self._window = self._window, []
        if len(window) > 1 or self.accelerator.num_processes > 1:
            passes = [(1 / len(window), *each) for each in window]
        else:
            passes = [(share, loss_fn, part) for share, part in split(batch, self.parts)]
        self.optimizer.zero_grad()
        loss = repeatable(partial(self._run_passes, passes), len(passes), whole=len(passes) > 1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _run_passes(self, passes: list[tuple[float, Callable[..., Tensor], tuple[Any, ...]]]) -> Tensor:
        total: Any = 0.0
        with torch.enable_grad():
            for number, (share, loss_fn, part) in enumerate(passes, start=1):
                with contextlib.nullcontext() if number == len(passes) else self.accelerator.no_sync(self.model):
                    loss = watched(loss_fn(*part) * share)
                    # which divides by this number
                    self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)
                total = total + loss.detach()
        return total


class AveragedWeights:
    """The average for evaluation, and in what ``accelerator.save_state`` saves.

    Inside ``with averaged:`` the weights are the average; ``accelerator.save_model`` there saves it for use. A state
    that ``save_state`` saves has the average as its model, wherever it is called, and the weights that training goes
    on from beside it: ``load_state`` with this object there is exact.

    Args:
        accelerator: which has prepared the model and the optimizer.
        model: as prepared.
        optimizer: as prepared: SGDOLFree, or SGDOL with ``averaging``.

    >>> from accelerate import Accelerator
    >>> from sgdol import SGDOL
    >>> accelerator = Accelerator(cpu=True)
    >>> net = torch.nn.Linear(2, 1)
    >>> model, opt = accelerator.prepare(net, SGDOL(net.parameters(), lr=0.1, averaging=8))
    >>> averaged = AveragedWeights(accelerator, model, opt)
    >>> with averaged:
    ...     _ = model(torch.ones(1, 2))  # evaluate here
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:
        found = inner(optimizer)
        if found is None or found.defaults.get("averaging") is None:
            raise ValueError("AveragedWeights needs averages: give it an SGDOLFree, or an SGDOL with averaging=8")
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self._average = Average()
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_for_checkpointing(self)

    def __enter__(self) -> None:
        self._average.enter(self.optimizer)

    def __exit__(self, *exception: object) -> None:
        self._average.leave()

    def state_dict(self) -> dict[str, Any]:
        """The weights that training goes on from, for the checkpoint."""
        return {"iterate": self._average.iterate(self.accelerator.unwrap_model(self.model))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from these weights."""
        put_back(self.accelerator.unwrap_model(self.model), state_dict["iterate"])

    def _save(self, models: list[torch.nn.Module], weights: list[dict[str, Tensor]], output_dir: str) -> None:
        with self._average.inside(self.optimizer):
            for i, model in enumerate(models[: len(weights)]):
                if model is self.model:
                    state = self.accelerator.get_state_dict(model, unwrap=False)
                    weights[i] = {name: value.clone() for name, value in state.items()}


class StepSizeMonitor(Log):
    """Logs the learned step size to the Accelerator's trackers.

    Call it after ``opt.step()``. Batches that are only accumulated are not steps. Put it into checkpoints by
    ``accelerator.register_for_checkpointing(monitor)``.

    Args:
        accelerator: whose trackers it writes to (none, if ``init_trackers`` was not called).
        every: log at every so many optimizer steps.

    Attributes:
        history: what was logged, a dict of numbers for each time; :func:`sgdol.plot` draws it.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> from sgdol import SGDOL
    >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    >>> model = torch.nn.Linear(2, 1)
    >>> model, opt = accelerator.prepare(model, SGDOL(model.parameters(), lr=0.1))
    >>> monitor = StepSizeMonitor(accelerator, every=1)
    >>> for _ in range(4):
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(torch.randn(8, 2)).square().mean())
    ...         opt.step(); opt.zero_grad(); _ = monitor(opt)
    >>> [(row["step"], row["gradients"]) for row in monitor.history]
    [(1, 2), (2, 2)]
    """

    def __init__(self, accelerator: Accelerator, *, every: int = 10) -> None:
        super().__init__(self._write, every=every)
        self.accelerator = accelerator

    def __call__(self, optimizer: Any, step: int | None = None) -> dict[str, float] | None:
        """Record, if the optimizer has stepped and it is time to."""
        return super().__call__(optimizer, step) if self.accelerator.sync_gradients else None

    def _write(self, values: Mapping[str, float], step: int) -> None:
        self.accelerator.log(dict(values), step=step)
