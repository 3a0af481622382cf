r"""Hugging Face Transformers: a Trainer for SGDOL and SGDOLFree.

Give :class:`Trainer` an ordinary optimizer by ``optimizers=(opt, None)`` or
``optimizer_cls_and_kwargs=(SGDOLFree, {})``. It is :class:`transformers.Trainer` with three mixins, which your own
Trainer may have as well:

* :class:`Microbatches` splits each batch in two, so that every step has two independent gradients, and gives SGDOLFree
  its closure. With ``gradient_accumulation_steps=k`` each of the k batches is one gradient, and nothing is split.
* :class:`AveragedWeights` evaluates and saves at the average, where the optimizer has one.
* :class:`StepSizeMonitor` logs the learned step size.

Two of ``TrainingArguments`` deserve a look:

* ``lr_scheduler_type``: the default lets lr fall linearly to 0. SGDOL's step size is lr times what it has learned, so
  it would fall twice; SGDOLFree has no lr at all. ``"constant"`` leaves the decision to the optimizer.
* ``max_grad_norm``: the default clips gradients at 1. SGDOLFree takes 0 only, which is never.

Models that count tokens (``num_items_in_batch``) weight each of the k gradients by its share :math:`\omega_i` of the
tokens: :math:`S = \sum_i \omega_i g_i`. SGDOL takes them as equal and estimates

.. math:: u = \frac{k}{k-1} (\|S\|^2 - Q), \qquad
    \mathrm{E}\, u = \frac{k}{k-1} \Big(1 - \sum_i \omega_i^2\Big) \|\nabla f\|^2
    = \Big(1 - \frac{c^2}{k-1}\Big) \|\nabla f\|^2,

with c the coefficient of variation of the weights: too small, never too large. The surrogate loss then lies above the
one of Theorem 1, which therefore still holds, and the step size is smaller by that factor at most: 4 % for k = 2 and
token counts that vary by 20 %. Counts that hardly vary (packing, ``train_sampling_strategy="group_by_length"``) make
it nothing.
"""

# ruff: noqa: E402  # what is missing is said before anything needs it
from __future__ import annotations

import contextlib
import os
from typing import Any

from sgdol._extras import require

require("sgdol.trainers.huggingface", "trainers", "transformers")

import torch
from torch import Tensor
from transformers import Trainer as _Trainer

from sgdol.torch import SGDOLFree
from sgdol.torch._backward import split
from sgdol.torch._log import finite, scalars
from sgdol.trainers._average import Average, inner, put_back
from sgdol.trainers._parts import refuse_clipping

__all__ = ["AveragedWeights", "Microbatches", "StepSizeMonitor", "Trainer"]

ITERATE = "sgdol_iterate.pt"
"""The file of a checkpoint with the weights that training goes on from."""


class Microbatches:
    """Splits each batch into parts, and gives SGDOLFree its closure; a mixin for Trainers of your own.

    A batch is split along the first axis of its tensors, unless there are several independent gradients already: from
    ``gradient_accumulation_steps`` or from other ranks. SGDOLFree gets its accumulated batches together, at the last
    of them, because it may evaluate them at another point as well.

    Attributes:
        parts: into how many parts; 1 for none, which SGDOLFree cannot do with. SGDOL then makes an update of every two
            batches, and ``max_steps`` counts both.

    >>> from transformers import Seq2SeqTrainer
    >>> class MyTrainer(Microbatches, AveragedWeights, StepSizeMonitor, Seq2SeqTrainer):
    ...     parts = 4
    """

    parts: int = 2
    optimizer: Any
    lr_scheduler: Any
    args: Any
    accelerator: Any
    current_gradient_accumulation_steps: Any
    compute_loss_func: Any
    get_batch_samples: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept_batches: list[Any] = []
        chosen = getattr(self, "optimizer_cls_and_kwargs", None)
        if _is_free(self.optimizer) or (chosen and isinstance(chosen[0], type) and issubclass(chosen[0], SGDOLFree)):
            _refuse_what_free_cannot(self.args)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A scheduler as ``lr_scheduler_type`` says; for SGDOLFree one that does nothing."""
        if self.lr_scheduler is None and _is_free(self.optimizer):
            self.lr_scheduler = _NoSchedule(inner(self.optimizer))
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The backward passes of a batch; for SGDOLFree the whole step, once all batches of the step are here."""
        batches = self.current_gradient_accumulation_steps
        if not _is_free(self.optimizer):
            return self._run_passes(model, [inputs], num_items_in_batch, batches)
        self._kept_batches.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)  # its loss comes with that of the last one
        window, self._kept_batches = self._kept_batches[-batches:], []  # none of a step that was never made
        losses: list[Tensor] = []

        def closure() -> Tensor:
            losses.append(self._run_passes(model, window, num_items_in_batch, batches))
            return losses[-1]

        self.optimizer.step(closure)
        # Trainer is about to call step() itself, which Accelerate does not pass on while batches are accumulated.
        self.accelerator.gradient_state._set_sync_gradients(False)
        return losses[0]

    def _run_passes(self, model: torch.nn.Module, window: list[Any], items: Any, batches: int) -> Tensor:
        """The passes of these batches, and the sum of their losses as the Trainer weighs them."""
        if batches == 1 and self.args.world_size == 1 and self.parts > 1:
            passes = self._split(window[0], items)
        else:
            passes = [(batches, inputs, items) for inputs in window]
        total = torch.zeros((), device=self.args.device)
        try:
            for number, (divisor, inputs, count) in enumerate(passes, start=1):
                self.current_gradient_accumulation_steps = divisor  # by which the Trainer divides a mean
                last = number == len(passes)
                with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                    total = total + super().training_step(model, inputs, count)  # type: ignore[misc]
        finally:
            self.current_gradient_accumulation_steps = batches
        return total

    def _split(self, inputs: Any, items: Any) -> list[tuple[float, Any, Any]]:
        """The parts of a batch, each with what its mean loss is to be divided by, or with the items of the batch.

        A model may be told how many items (tokens) there are in the batch and divide the sum of its losses by that.
        Many take the number and return a mean all the same. So each is asked for a mean, where it can be.
        """
        found = [(share, part) for share, (part,) in split((inputs,), self.parts)]
        if items is None:
            return [(1 / share, part, None) for share, part in found]
        counts = [int(self.get_batch_samples(iter([part]), 1, self.args.device)[1]) for _, part in found]
        own_loss = self.compute_loss_func is not None or getattr(self, "loss_is_scaled_for_ga", None)
        if own_loss or not all(counts):  # a loss that is known to be a sum; a part with nothing in it has no mean
            return [(1, part, items) for _, part in found]
        return [(sum(counts) / count, part, None) for count, (_, part) in zip(counts, found, strict=True)]


class AveragedWeights:
    """Evaluates and saves at the average, and leaves it in the model after ``train()``; a mixin.

    For SGDOLFree and for SGDOL with ``averaging``; with another optimizer it does nothing. A checkpoint's model is the
    average. The weights that training goes on from are in a file beside it, so that ``resume_from_checkpoint`` is
    exact. Only parameters are averaged: a model with BatchNorm keeps the statistics of the iterates.
    """

    optimizer: Any
    args: Any
    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._swap = Average()
        self._best_loaded = False
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the average in the model, or the best model if ``load_best_model_at_end`` says so."""
        self._swap.leave()
        self._best_loaded = False
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        if not self._best_loaded:
            self._swap.enter(self.optimizer)
        return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict at the average."""
        with self._at_average():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the average, and in checkpoints the iterate beside it."""
        with self._at_average():
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            checkpoint = _internal_call and self.args.should_save and not self.args.save_only_model
            if output_dir and checkpoint and self._swap.active:
                torch.save(self._swap.iterate(self.model), os.path.join(output_dir, ITERATE))

    def _at_average(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._best_loaded else self._swap.inside(self.optimizer)

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        self._best_loaded = True  # an average of its own time, which today's must not replace

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        file = os.path.join(resume_from_checkpoint, ITERATE)
        if os.path.isfile(file):
            put_back(self.model, torch.load(file, map_location="cpu", weights_only=True))


class StepSizeMonitor:
    """Logs the learned step size wherever a Trainer logs its training loss; a mixin for Trainers of your own.

    The numbers of :func:`sgdol.torch.scalars` go into ``trainer.state.log_history``, which :func:`sgdol.plot` draws,
    and to everything in ``report_to``, as ``sgdol/step_size`` and so on.

    >>> from transformers import Seq2SeqTrainer
    >>> class MyTrainer(StepSizeMonitor, Seq2SeqTrainer): ...
    """

    optimizer: Any

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log this, and what the optimizer has learned if it is about training."""
        if "loss" in logs:
            logs.update(finite(scalars(self.optimizer), prefix="sgdol/"))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class Trainer(Microbatches, AveragedWeights, StepSizeMonitor, _Trainer):
    """:class:`transformers.Trainer` for SGDOL and SGDOLFree: with the three mixins of this module."""


class _NoSchedule:
    """In place of a scheduler, for an optimizer that has no lr. The Trainer logs its step size as ``learning_rate``."""

    def __init__(self, optimizer: SGDOLFree) -> None:
        self.optimizer = optimizer

    def step(self, *args: Any) -> None:
        """Nothing."""

    def get_last_lr(self) -> list[float]:
        """The step sizes."""
        return [group["step_size"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


def _is_free(optimizer: Any) -> bool:
    return isinstance(inner(optimizer), SGDOLFree)


def _refuse_what_free_cannot(args: Any) -> None:
    if args.lr_scheduler_type != "constant":
        raise ValueError(
            "SGDOLFree has no learning rate that a scheduler could move: it chooses every step size itself. Give "
            f'TrainingArguments(lr_scheduler_type="constant"), got {str(args.lr_scheduler_type.value)!r}'
        )
    refuse_clipping("max_grad_norm", args.max_grad_norm, "0")
