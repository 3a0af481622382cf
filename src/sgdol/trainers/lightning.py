"""Lightning: callbacks that split batches, evaluate and save at the average, and log what is learned.

``configure_optimizers`` returns an ordinary ``sgdol.SGDOL`` or ``sgdol.SGDOLFree``; optimization is automatic.

* :class:`Microbatches` runs ``training_step`` on the halves of each batch, so that every step has two independent
  gradients. SGDOLFree needs it; with SGDOL every batch is then an update.
* :class:`AveragedWeights` validates at the average and saves it in checkpoints: for SGDOLFree, and for SGDOL with
  ``averaging``.
* :class:`StepSizeMonitor` logs the learned step size.

``LightningCLI`` takes them by their import paths: ``--optimizer sgdol.SGDOLFree
--trainer.callbacks+=sgdol.trainers.lightning.Microbatches
--trainer.callbacks+=sgdol.trainers.lightning.AveragedWeights``.

Without :class:`Microbatches`, SGDOL takes each batch as one of k gradients with ``accumulate_grad_batches=k``; without
accumulation two consecutive batches make an update and ``trainer.global_step`` advances by two. The same holds for
manual optimization. Each batch passes through the model once. Lightning divides the loss by
``accumulate_grad_batches`` also where an epoch ends with fewer batches, as it does for every optimizer: choose a number
that divides the batches of an epoch, for instance with ``limit_train_batches``.
"""

# ruff: noqa: E402  # what is missing is said before anything needs it
from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sgdol._extras import require

require("sgdol.trainers.lightning", "trainers", "lightning")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from sgdol.torch import Log, SGDOLFree
from sgdol.torch._backward import repeatable, split, watched
from sgdol.torch._log import finite
from sgdol.torch._rerun import RUNNING
from sgdol.trainers._average import Average, put_back
from sgdol.trainers._parts import check_parts

__all__ = ["AveragedWeights", "Microbatches", "StepSizeMonitor"]

ITERATE = "sgdol_iterate"
"""Where a checkpoint has the weights that training goes on from."""


class Microbatches(Callback):
    """Runs ``training_step`` and ``backward`` on parts of each batch: several independent gradients for every step.

    With SGDOLFree and ``accumulate_grad_batches=k`` the k batches are the parts: they pass through the model together
    at the last of them, and again wherever SGDOLFree evaluates them. SGDOL with accumulation has its gradients
    already, and so has either on several ranks: nothing is split there.

    ``training_step`` has to return the mean loss over the samples that it is given, as a tensor or as ``"loss"`` in a
    dict. What it logs is logged for every part, and not again when SGDOLFree evaluates the batch at another point; a
    metric object that it updates itself sees those evaluations too.

    Args:
        parts: into how many parts a batch is split along the first axis of its tensors, at least 2.

    >>> from lightning.pytorch import Trainer
    >>> callbacks = [Microbatches(), AveragedWeights()]
    >>> trainer = Trainer(accelerator="cpu", callbacks=callbacks, logger=False, enable_progress_bar=False)
    """

    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.parts = check_parts(parts)
        self._earlier: list[tuple[Any, ...]] = []
        self._index = 0
        self._undo = contextlib.ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot be, and put the split in front of ``training_step``."""
        optimizer = _optimizer(trainer, "Microbatches")
        free = isinstance(optimizer, SGDOLFree)
        if not pl_module.automatic_optimization:
            raise TypeError("Microbatches is for automatic optimization; in a loop by hand use sgdol.torch.backward")
        if free:
            _refuse_what_free_cannot(trainer)
            self._evaluate_before_the_step(pl_module, optimizer)
        if trainer.world_size > 1 or (trainer.accumulate_grad_batches > 1 and not free):
            return
        step, zero_grad = pl_module.training_step, pl_module.optimizer_zero_grad
        self._earlier = []

        @functools.wraps(step)
        def training_step(*arguments: Any) -> Any:
            if self._accumulates(trainer):
                warnings.filterwarnings("ignore", message="`training_step` returned `None`")  # it is on purpose
                self._earlier.append(arguments)
                return None
            zero_grad(trainer.current_epoch, self._index, optimizer)
            return self._run(trainer, pl_module, step, arguments)

        self._undo.enter_context(_replaced(pl_module, "training_step", training_step))
        # Lightning calls it after training_step, which would lose all parts but the last.
        self._undo.enter_context(_replaced(pl_module, "optimizer_zero_grad", _nothing))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the number of the batch."""
        self._index = batch_idx

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is done: forget its batches."""
        if not self._accumulates(trainer):
            self._earlier = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the split away again."""
        self._undo.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the split away again."""
        self._undo.close()

    def _evaluate_before_the_step(self, pl_module: LightningModule, optimizer: Any) -> None:
        """Let ``optimizer.step`` call Lightning's closure once, for its passes, and then step without a closure.

        Lightning clips gradients at the end of its closure. A look-back needs them as they were before, so it runs the
        passes alone again.
        """
        takes_closure, step = pl_module.optimizer_step, optimizer.step

        def optimizer_step(epoch: int, index: int, wrapped: Any, closure: Any = None) -> None:
            takes_closure(epoch, index, wrapped, functools.partial(repeatable, closure, 1))

        @functools.wraps(step)  # a scheduler has left a mark on it
        def closure_first(closure: Callable[[], Any] | None = None) -> Any:
            result = None if closure is None else closure()
            step()
            return result

        self._undo.enter_context(_replaced(pl_module, "optimizer_step", optimizer_step))
        self._undo.enter_context(_replaced(optimizer, "step", closure_first))

    def _accumulates(self, trainer: Trainer) -> bool:
        """Whether more batches come before the step; Lightning steps at the end of an epoch whatever there is."""
        count = self._index + 1
        final = trainer.is_last_batch or count >= trainer.num_training_batches
        return count % trainer.accumulate_grad_batches > 0 and not final

    def _run(
        self, trainer: Trainer, pl_module: LightningModule, step: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        """All parts forwards, and all but the last backwards, which is left to Lightning with the loss of them all."""
        if self._earlier:
            passes = [(1 / (len(self._earlier) + 1), each) for each in (*self._earlier, arguments)]
        else:
            passes = [(share, (part, *arguments[1:])) for share, (part,) in split(arguments[:1], self.parts)]
        replay = RUNNING.get(threading.get_ident())
        if replay is not None:
            replay.passes, replay.whole = len(passes), len(passes) > 1
        evaluated = replay is not None and replay.loss is not None
        total = torch.zeros((), device=pl_module.device)
        with _replaced(pl_module, "log", _nothing) if evaluated else contextlib.nullcontext():
            for number, (share, each) in enumerate(passes, start=1):
                output = step(*each)
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss is None:
                    raise TypeError(
                        "with Microbatches training_step must return the mean loss of each part of a batch, got None"
                    )
                loss = watched(loss * share)
                if number < len(passes):
                    with torch.autocast(pl_module.device.type, enabled=False):
                        trainer.strategy.backward(loss, None)
                total = total.detach() + loss
        total = total * trainer.accumulate_grad_batches  # which Lightning divides by
        return {**output, "loss": total} if isinstance(output, Mapping) else total


class AveragedWeights(Callback):
    """Validates at the average, saves it in checkpoints, and leaves it in the model at the end of ``fit``.

    The optimizer has to average: SGDOLFree does, SGDOL with ``averaging=8``. ``checkpoint["state_dict"]`` is the
    average, so ``load_from_checkpoint``, ``trainer.test(ckpt_path="best")`` and every other tool load the average. The
    checkpoint also has the latest weights, from which ``fit(ckpt_path=...)`` with this callback resumes exactly. Only
    parameters are averaged: a model with BatchNorm keeps the statistics of the latest weights.

    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(accelerator="cpu", callbacks=[AveragedWeights()], logger=False, enable_progress_bar=False)
    """

    def __init__(self) -> None:
        super().__init__()
        self._average = Average()
        self._undo = contextlib.ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make sure that there is an average; from here on the weights in the model are those of the training."""
        optimizer = _optimizer(trainer, "AveragedWeights")
        if optimizer.defaults.get("averaging") is None:
            raise ValueError("AveragedWeights needs averages, got averaging=None: construct SGDOL with averaging=8")
        self._average = Average()
        save = pl_module.on_save_checkpoint

        def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
            if "optimizer_states" not in checkpoint:  # save_weights_only: Lightning asks no callback
                self._save(trainer, checkpoint)
            save(checkpoint)

        self._undo.enter_context(_replaced(pl_module, "on_save_checkpoint", on_save_checkpoint))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average in."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._average.enter(_optimizer(trainer, "AveragedWeights"))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take it out again."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._average.leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average in, for good."""
        self._average.enter(_optimizer(trainer, "AveragedWeights"))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        self._undo.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Go back to the weights of the training, also from the midst of a validation."""
        self._average.leave()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the average as the model, and the iterate beside it."""
        checkpoint[ITERATE] = self._average.iterate(pl_module)
        self._save(trainer, checkpoint)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on from the iterate; to test or to predict, the average is right."""
        if trainer.state.fn == TrainerFn.FITTING and ITERATE in checkpoint:
            put_back(pl_module, checkpoint[ITERATE])

    def _save(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        with self._average.inside(trainer.optimizers[0] if trainer.optimizers else None):
            state = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()
            }


class StepSizeMonitor(Callback):
    """Logs the learned step size, which ``LearningRateMonitor`` cannot see: that one shows lr.

    All loggers of the Trainer get ``sgdol/step_size``, ``sgdol/signal_to_noise``, ``sgdol/noise_scale``,
    ``sgdol/updates``, ``sgdol/skipped`` and ``sgdol/gradients``, at the step at which Lightning logs the metrics of the
    same batch (see :func:`sgdol.torch.scalars`). The history goes into checkpoints.

    Args:
        every: log at every so many optimizer steps; None for the Trainer's ``log_every_n_steps``.

    >>> from lightning.pytorch import Trainer
    >>> monitor = StepSizeMonitor(every=10)
    >>> trainer = Trainer(
    ...     accelerator="cpu", accumulate_grad_batches=2, callbacks=[monitor], logger=False, enable_progress_bar=False
    ... )
    >>> monitor.history  # after trainer.fit(...): sgdol.plot(monitor)
    []
    """

    def __init__(self, every: int | None = None) -> None:
        super().__init__()
        self._log = Log(every=1 if every is None else every)
        self._every, self._period, self._steps = every, 0, 0

    @property
    def history(self) -> list[dict[str, float]]:
        """What was logged, a dict of numbers for each time; :func:`sgdol.plot` draws it."""
        return self._log.history

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make sure that there is something to log."""
        _optimizer(trainer, "StepSizeMonitor")
        self._steps = trainer.global_step
        self._period = getattr(trainer, "log_every_n_steps", 50) if self._every is None else self._every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if the optimizer has stepped and it is time to."""
        before, self._steps = self._steps, trainer.global_step
        if self._period and self._steps // self._period > before // self._period:  # 0 is Lightning's word for never
            row = dict(self._log.record(_optimizer(trainer, "StepSizeMonitor"), self._steps - 1))  # counted from 0
            step = int(row.pop("step"))
            for logger in trainer.loggers:
                logger.log_metrics(finite(row, prefix="sgdol/"), step=step)

    def state_dict(self) -> dict[str, Any]:
        """The history, for the checkpoint."""
        return self._log.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the history of a checkpoint."""
        self._log.load_state_dict(state_dict)


def _optimizer(trainer: Trainer, asker: str) -> Any:
    found = [optimizer for optimizer in trainer.optimizers if hasattr(optimizer, "diagnostics")]
    if len(found) != 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
        raise TypeError(f"{asker} needs one SGDOL among the optimizers of the Trainer, which are: {kinds}")
    return found[0]


def _refuse_what_free_cannot(trainer: Trainer) -> None:
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            'SGDOLFree evaluates a batch more than once, which a GradScaler does not allow: use precision="bf16-mixed"'
        )
    if trainer.world_size > 1 and trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"SGDOLFree on {trainer.world_size} ranks takes one batch of each rank per step, got "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
        )


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    # An attribute of this object alone, until the context ends.
    own = {name: vars(owner)[name]} if name in vars(owner) else {}  # a scheduler replaces optimizer.step, too
    setattr(owner, name, value)
    try:
        yield
    finally:
        vars(owner).pop(name, None)
        vars(owner).update(own)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a method that is not to do anything now."""
