"""Hugging Face's Trainer trains with SGDOL as a loop by hand does: the same bits, also resumed."""

from __future__ import annotations

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_problems import arguments, language_model, logged, noise_averse

import sgdol
from sgdol import SGDOL

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # pairs of batches are tested

BATCH = 8


@pytest.fixture(scope="module", autouse=True)
def imported():
    """When the first test runs, not when tests are collected: transformers takes seconds."""
    global Trainer
    from sgdol.trainers.huggingface import Trainer


def build():
    return language_model(n_embd=16)


@pytest.fixture(scope="module")
def dataset(digits):
    words = (16 * digits[0][: 12 * BATCH]).long()
    labels = words.clone()
    labels[:, 0] = -100  # the first word is not predicted
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def train(model, opt, args, dataset, **options):
    class Pairs(Trainer):
        """Batches stay whole: without accumulation two of them make an update."""

        parts = 1

    trainer = Pairs(model, args, train_dataset=dataset, optimizers=(opt, None))
    trainer.train(**options)
    return trainer


def by_hand(dataset, steps, accumulate, clip, precision=None):
    """The loop that the Trainer promises to run, written out, over the batches in their order."""
    model = build()
    model.train()
    opt = noise_averse(model.parameters())
    step_sizes, norms = [], []
    for step in range(steps):
        rows = dataset[step * accumulate * BATCH : (step + 1) * accumulate * BATCH]
        words = torch.stack([row["input_ids"] for row in rows]).split(BATCH)
        labels = torch.stack([row["labels"] for row in rows]).split(BATCH)
        items = sum(label.ne(-100).sum() for label in labels)  # the Trainer divides all k batches by what they predict
        for batch, label in zip(words, labels, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None):
                loss = model(input_ids=batch, labels=label, num_items_in_batch=items).loss
            loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        opt.step()
        opt.zero_grad()
        step_sizes.append(opt.diagnostics()["step_size"][0])
    assert max(norms) > clip, "nothing was clipped"
    return model, opt, step_sizes


@pytest.mark.parametrize(("accumulate", "precision"), [(1, None), (3, None), (2, "bf16")])
def test_the_trainer_takes_the_same_steps_as_a_loop_by_hand(tmp_path, dataset, assert_same, accumulate, precision):
    model = build()
    opt = noise_averse(model.parameters())
    asked = {"num_train_epochs": 1, "gradient_accumulation_steps": accumulate, "max_grad_norm": 0.2}
    args = arguments(tmp_path, **asked, bf16=precision == "bf16", train_sampling_strategy="sequential")
    trainer = train(model, opt, args, dataset)
    steps = 12 // accumulate
    hand, hand_opt, step_sizes = by_hand(dataset, steps, accumulate, 0.2, precision)
    inner = trainer.optimizer.optimizer  # inside of Accelerate's wrapper
    assert inner is opt
    for group in inner.param_groups:
        group.pop("initial_lr")  # the scheduler's
    assert_same(model, inner, hand, hand_opt)
    assert opt.diagnostics()["gradients"] == max(accumulate, 2)
    assert opt.diagnostics()["updates"] == (steps if accumulate > 1 else steps // 2)
    assert logged(trainer, "sgdol/step_size") == step_sizes
    assert len(set(step_sizes)) > 3


def test_reports_and_the_log_history_have_the_learned_step_size(tmp_path, dataset, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    args = arguments(tmp_path, max_steps=8, gradient_accumulation_steps=2, logging_steps=2, report_to="tensorboard")
    model = build()
    opt = noise_averse(model.parameters())
    trainer = train(model, opt, args, dataset)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    found = opt.diagnostics()
    for name in ("signal_to_noise", "noise_scale", "skipped", "updates", "gradients"):
        assert rows[-1][f"sgdol/{name}"] == found[name]
    assert rows[-1]["learning_rate"] == 0.5
    assert rows[-1]["sgdol/step_size"] == found["step_size"][0] < 0.5
    (events,) = {path.parent for path in (tmp_path / "board").rglob("events.*")}
    board = EventAccumulator(str(events)).Reload()
    shown = [(event.step, event.value) for event in board.Scalars("train/sgdol/step_size")]
    assert shown == [(row["step"], pytest.approx(row["sgdol/step_size"], rel=1e-6)) for row in rows]  # float32 there
    (line,) = sgdol.plot(trainer.state.log_history).axes[0].lines
    assert list(line.get_xdata()) == [2, 4, 6, 8]


def test_the_trainer_makes_the_optimizer_itself_from_the_class(tmp_path, dataset):
    """Its two groups, with and without weight decay, one of which may be empty."""
    model = build()
    model.requires_grad_(False)
    model.transformer.wte.weight.requires_grad_(True)  # which decays, so that nothing is left that does not
    args = arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2, weight_decay=0.01)
    trainer = Trainer(model, args, train_dataset=dataset, optimizer_cls_and_kwargs=(SGDOL, {"lr": 0.5}))
    trainer.train()
    opt = trainer.optimizer.optimizer
    assert [(bool(group["params"]), group["weight_decay"]) for group in opt.param_groups] == [(True, 0.01), (False, 0)]
    assert logged(trainer, "sgdol/gradients") == [2, 2, 2, 2]
    assert min(logged(trainer, "sgdol/step_size")) > 0
