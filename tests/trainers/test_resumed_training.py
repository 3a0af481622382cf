"""A resumed run is the uninterrupted one, with every trainer: weights, buffers, optimizer and history, to the last bit.

Runs stop in the middle of a pair and between two, within an epoch and at its end, with accumulated batches and with
batches that are split, which SGDOLFree ("free") and SGDOL with averages ("base") train at the average.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_accelerate
import test_lightning
import torch
from trainer_problems import BATCHES, Loader, arguments, language_model, make, noise_averse

from sgdol.trainers import lightning

pytestmark = pytest.mark.filterwarnings(
    "ignore:SGDOL got one backward",  # pairs of batches are among what is resumed
    "ignore:.*LeafSpec:FutureWarning",  # Lightning's, of torch
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
)

STEPS = 18


@dataclass
class Run:
    """Where a run has come to."""

    model: torch.nn.Module
    opt: Any
    history: list[dict[str, Any]]


def optimizer(kind, params):
    """Of pairs and of accumulated batches, or of batches that are split."""
    return noise_averse(params, momentum=0.5) if kind == "whole" else make(kind, params)


class Classifier(test_lightning.Classifier):
    def configure_optimizers(self):
        return optimizer(self.kind, self.parameters())


def by_lightning(folder, digits, kind, accumulate, stop=None, resume=None) -> Run:
    model, monitor = Classifier(kind), lightning.StepSizeMonitor(every=1)
    split = [] if kind == "whole" else [lightning.Microbatches(), lightning.AveragedWeights()]
    lengths = {"max_epochs": -1, "max_steps": stop or STEPS, "accumulate_grad_batches": accumulate}
    fit = test_lightning.trainer(folder, [*split, monitor], **lengths)
    fit.fit(model, Loader(digits), ckpt_path=resume and resume / "stopped", weights_only=True if resume else None)
    if stop:
        fit.save_checkpoint(folder / "stopped")
    assert fit.global_step == (stop or STEPS)
    return Run(model.net, fit.optimizers[0], monitor.history)


def by_accelerate(folder, digits, kind, accumulate, stop=None, resume=None) -> Run:
    """Random numbers depend on the number of the batch alone, as batches do."""
    run, start = test_accelerate.Run(digits, kind, accumulate), 0
    if resume:
        run.accelerator.load_state(resume / "stopped")
        start = int((resume / "place").read_text())
    end = (stop or BATCHES // accumulate) * accumulate
    run.train(start, end)
    if stop:
        run.accelerator.save_state(folder / "stopped")
        (folder / "place").write_text(str(end))
    return Run(run.model, run.opt, run.monitor.history)


def by_huggingface(folder, digits, kind, accumulate, stop=None, resume=None) -> Run:
    """With shuffling, dropout and evaluations, and with a schedule where there is a rate to move."""
    from sgdol.trainers.huggingface import Trainer  # which takes seconds

    class Whole(Trainer):
        parts = 1

    model = language_model(dropout=0.1)
    words = (16 * digits[0][:96]).long()
    rows = [{"input_ids": row, "labels": row} for row in words]
    args = arguments(
        folder,
        max_steps=STEPS // accumulate,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.0 if kind == "free" else 1.0,
        lr_scheduler_type="constant" if kind == "free" else "linear",
        save_strategy="steps" if stop else "no",
        save_steps=stop or 1,
        eval_strategy="no" if kind == "whole" else "steps",
        eval_steps=4,
    )
    opt = optimizer(kind, model.parameters())
    trainer = (Whole if kind == "whole" else Trainer)(
        model, args, train_dataset=rows, eval_dataset=rows[:8], optimizers=(opt, None)
    )
    first = resume and min(resume.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    trainer.train(resume_from_checkpoint=first and str(first))
    shown = ("step", "loss", "sgdol/step_size")
    return Run(model, opt, [{name: row[name] for name in shown} for row in trainer.state.log_history if "loss" in row])


CASES = [
    (by_lightning, "whole", 1, 7),
    (by_lightning, "whole", 1, 12),
    (by_lightning, "whole", 3, 2),
    (by_lightning, "free", 1, 7),
    (by_lightning, "base", 1, 12),
    (by_accelerate, "whole", 1, 5),
    (by_accelerate, "whole", 3, 2),
    (by_accelerate, "free", 1, 7),
    (by_accelerate, "base", 1, 7),
    (by_huggingface, "whole", 1, 5),
    (by_huggingface, "whole", 2, 3),
    (by_huggingface, "free", 1, 14),
    (by_huggingface, "free", 2, 3),
    (by_huggingface, "base", 1, 5),
]


def made(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize(("train", "kind", "accumulate", "stop"), CASES)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, digits, assert_same, train, kind, accumulate, stop):
    torch.manual_seed(1)
    whole = train(made(tmp_path / "whole"), digits, kind, accumulate)
    torch.manual_seed(1)
    stopped = train(made(tmp_path / "stopped"), digits, kind, accumulate, stop=stop)
    resumed = train(made(tmp_path / "resumed"), digits, kind, accumulate, resume=tmp_path / "stopped")
    assert_same(resumed.model, resumed.opt, whole.model, whole.opt)
    assert repr(resumed.history) == repr(whole.history)  # which has nan before the first update
    if train is not by_huggingface:  # whose run goes on after it has saved
        assert len(stopped.history) < len(whole.history)
        assert getattr(stopped.opt, "pending", False) == (kind == "whole" and accumulate == 1 and stop % 2 == 1)
