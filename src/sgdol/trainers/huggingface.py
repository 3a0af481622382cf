r"""Hugging Face Transformers: a Trainer that logs what SGDOL learns.

Give the Trainer an ordinary ``sgdol.SGDOL`` by ``optimizers=(opt, None)`` or
``optimizer_cls_and_kwargs=(SGDOL, {"lr": 0.5})``. Two of ``TrainingArguments`` deserve a look:

* ``lr_scheduler_type``: the default lets lr fall linearly to 0. SGDOL's step size is lr times what it has learned, so
  it would fall twice. ``"constant"`` leaves the decision to SGDOL.
* ``gradient_accumulation_steps``: each of the k batches is one gradient. With 1, two consecutive batches make an
  update, and ``max_steps`` counts both.

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

from typing import Any

from sgdol._extras import require

require("sgdol.trainers.huggingface", "trainers", "transformers")

from transformers import Trainer as _Trainer

from sgdol.torch._log import finite, scalars

__all__ = ["StepSizeMonitor", "Trainer"]


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


class Trainer(StepSizeMonitor, _Trainer):
    """:class:`transformers.Trainer`, which also logs the learned step size (see :class:`StepSizeMonitor`)."""
