r"""Hugging Face Transformers: a Trainer for SGDOL and SGDOLFree.

In place of ``from transformers import Trainer, TrainingArguments`` write
``from sgdol.trainers.huggingface import Trainer, TrainingArguments``. Then ``TrainingArguments(optim="sgdol_free")``
trains without a learning rate, and ``optim="sgdol"`` with ``learning_rate``. To set other options, give
``optimizers=(opt, None)`` or ``optimizer_cls_and_kwargs=(SGDOLFree, {"metric": "adagrad"})``.

:class:`Trainer` is :class:`transformers.Trainer` with three mixins, which your own Trainer may have as well:

* :class:`Microbatches` splits each batch in two, so that every step has two independent gradients, and lets SGDOLFree
  run them again. With ``gradient_accumulation_steps=k`` each of the k batches is one gradient, and nothing is split.
* :class:`AveragedWeights` evaluates and saves at the average, where the optimizer has one.
* :class:`StepSizeMonitor` logs the learned step size.

Two arguments should have other values than their defaults. ``optim="sgdol_free"`` sets both and ``optim="sgdol"`` the
first; with ``optimizers=(opt, None)`` set them yourself:

* ``lr_scheduler_type="constant"``: the default lowers lr linearly to 0. The step size is lr times a learned factor, for
  both optimizers (for SGDOLFree lr is 1), so it would fall twice.
* ``max_grad_norm=0``: the default clips gradients at 1. Both optimizers work with it, but do not need it.

Models that count tokens (``num_items_in_batch``) weight each of the k gradients by its share :math:`\omega_i` of the
tokens: :math:`S = \sum_i \omega_i g_i`. SGDOL takes them as equal and estimates

.. math:: u = \frac{k}{k-1} (\|S\|^2 - Q), \qquad
    \mathrm{E}\, u = \frac{k}{k-1} \Big(1 - \sum_i \omega_i^2\Big) \|\nabla f\|^2
    = \Big(1 - \frac{c^2}{k-1}\Big) \|\nabla f\|^2,

with c the coefficient of variation of the weights: too small, never too large. The surrogate loss then lies above the
one of Theorem 1, which therefore still holds, and the step size is smaller by that factor at most: 4 % for k = 2 and
token counts that vary by 20 %. With counts that hardly vary (packing, ``train_sampling_strategy="group_by_length"``)
the factor is 1.
"""

# ruff: noqa: E402  # what is missing is said before anything needs it
from __future__ import annotations

import contextlib
import dataclasses
import os
from functools import partial
from typing import Any

from sgdol._extras import require

require("sgdol.trainers.huggingface", "trainers", "transformers")

import torch
from torch import Tensor
from transformers import Trainer as _Trainer
from transformers import TrainingArguments as _TrainingArguments

from sgdol.torch import SGDOL, SGDOLFree
from sgdol.torch._backward import repeatable, split, watched
from sgdol.torch._log import finite, inner, scalars
from sgdol.trainers._average import Average, put_back

__all__ = ["AveragedWeights", "Microbatches", "StepSizeMonitor", "Trainer", "TrainingArguments"]

OPTIMIZERS: dict[str, type[SGDOL | SGDOLFree]] = {"sgdol": SGDOL, "sgdol_free": SGDOLFree}
"""What ``optim`` may be besides the names that transformers knows."""
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(_TrainingArguments)}

ITERATE = "sgdol_iterate.pt"
"""The file of a checkpoint with the weights that training goes on from."""


class Microbatches:
    """Splits each batch into parts, and lets SGDOLFree run them again; a mixin for Trainers of your own.

    A batch is split along the first axis of its tensors, unless there are several independent gradients already: from
    ``gradient_accumulation_steps`` or from other ranks.

    Attributes:
        parts: into how many parts. 1 does not split; SGDOLFree needs at least 2, and SGDOL then makes one update of
            every two batches, of which ``max_steps`` counts both.

    >>> from transformers import Seq2SeqTrainer
    >>> class MyTrainer(Microbatches, AveragedWeights, StepSizeMonitor, Seq2SeqTrainer):
    ...     parts = 4
    """

    parts: int = 2
    args: Any
    accelerator: Any
    current_gradient_accumulation_steps: Any
    compute_loss_func: Any
    get_batch_samples: Any

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The backward passes of a batch, in parts, which SGDOLFree can run again."""
        batches = self.current_gradient_accumulation_steps
        splits = batches == 1 and self.args.world_size == 1 and self.parts > 1
        passes = self._split(inputs, num_items_in_batch) if splits else [(batches, inputs, num_items_in_batch)]
        whole = not splits or len(passes) > 1  # a batch of a single sample cannot be split
        return repeatable(partial(self._run_passes, model, passes, batches), len(passes), whole=whole)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, whose backward is noted."""
        found = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        watched(found[0] if isinstance(found, tuple) else found)
        return found

    def _run_passes(self, model: torch.nn.Module, passes: list[tuple[float, Any, Any]], batches: int) -> Tensor:
        """Run these passes: the sum of their losses as the Trainer weighs them."""
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
        """Log this, and what SGDOL or SGDOLFree has learned if it is about training."""
        if "loss" in logs and inner(self.optimizer) is not None:
            logs.update(finite(scalars(self.optimizer), prefix="sgdol/"))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


@dataclasses.dataclass
class TrainingArguments(_TrainingArguments):
    """:class:`transformers.TrainingArguments` that know ``optim="sgdol"`` and ``optim="sgdol_free"`` as well.

    With these two names a ``lr_scheduler_type`` that is left at its default becomes ``"constant"``, and with
    ``"sgdol_free"`` a ``max_grad_norm`` that is left at its default becomes 0. ``"sgdol"`` takes ``learning_rate``, the
    number that SGD with momentum 0.9 would take; ``"sgdol_free"`` does not use it. Both take ``weight_decay``.

    >>> args = TrainingArguments(output_dir="out", optim="sgdol_free", use_cpu=True, report_to="none")
    >>> args.optim, args.lr_scheduler_type.value, args.max_grad_norm
    ('sgdol_free', 'constant', 0.0)
    """

    optim: str = dataclasses.field(
        default=_DEFAULTS["optim"], metadata={"help": "sgdol, sgdol_free, or a name that transformers knows."}
    )

    def __post_init__(self) -> None:
        chosen = self.optim
        own = chosen in OPTIMIZERS
        if own:
            if self.lr_scheduler_type == _DEFAULTS["lr_scheduler_type"]:
                self.lr_scheduler_type = "constant"
            if chosen == "sgdol_free" and self.max_grad_norm == _DEFAULTS["max_grad_norm"]:
                self.max_grad_norm = 0.0
            self.optim = "sgd"  # a name that is known; nothing is made of it
        super().__post_init__()
        if own:
            self.optim = chosen


class Trainer(Microbatches, AveragedWeights, StepSizeMonitor, _Trainer):
    """:class:`transformers.Trainer` for SGDOL and SGDOLFree: with the three mixins of this module."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """The class and the arguments of the optimizer that ``args.optim`` names."""
        if args.optim in OPTIMIZERS:
            return OPTIMIZERS[args.optim], {"lr": args.learning_rate} if args.optim == "sgdol" else {}
        return _Trainer.get_optimizer_cls_and_kwargs(args, model)
