"""Hugging Face's Trainer with SGDOLFree, with batches that are split, and at the average: as a loop by hand."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
import torch
from trainer_problems import arguments as quiet_arguments
from trainer_problems import language_model, logged, make, step_by_hand

from sgdol import SGDOLFree
from sgdol.torch import backward

BATCH = 8


@pytest.fixture(scope="module", autouse=True)
def imported():
    """When the first test runs, not when tests are collected: transformers takes seconds."""
    global ResNetConfig, ResNetForImageClassification, TrainerCallback, Trainer
    from transformers import ResNetConfig, ResNetForImageClassification, TrainerCallback

    from sgdol.trainers.huggingface import Trainer


def build_images() -> ResNetForImageClassification:
    """A classifier with BatchNorm, whose loss is a mean over the samples."""
    config = ResNetConfig(num_channels=1, embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    config.num_labels = 10
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ResNetForImageClassification(config)


@pytest.fixture(scope="module")
def words(digits):
    """The first half of each batch predicts less than the second."""
    rows = (16 * digits[0][: 12 * BATCH]).long()
    dataset = [{"input_ids": row, "labels": row.clone()} for row in rows]
    for number, row in enumerate(dataset):
        row["labels"][: 21 if number % BATCH < BATCH // 2 else 1] = -100
    return dataset


@pytest.fixture(scope="module")
def images(digits):
    pixels = digits[0][: 6 * BATCH + 3].reshape(-1, 1, 8, 8)
    return [{"pixel_values": image, "labels": label} for image, label in zip(pixels, digits[1], strict=False)]


def arguments(tmp_path, **options):
    """The trainer's own clipping and schedule are left out."""
    free = {"max_grad_norm": 0.0, "per_device_eval_batch_size": 2 * BATCH, "train_sampling_strategy": "sequential"}
    return quiet_arguments(tmp_path, **{**free, **options})


def stacked(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def by_hand(kind, model, steps, summed=False):
    """The loop that is promised, written out: each step has its parts. Returns the optimizer and the losses.

    A part counts as much as it predicts, be it that the model divides a sum or that it returns a mean.
    """
    model.train()
    opt = make(kind, model.parameters())
    losses = []
    for parts in steps:
        counts = [part["labels"].ne(-100).sum().item() for part in parts]
        divisors = [1.0 if summed else sum(counts) / count for count in counts]  # as the Trainer, to the last bit
        options = {"num_items_in_batch": sum(counts)} if summed else {}

        def objective(part, divisor, options=options):
            return model(**part, **options).loss / divisor

        weighted = list(zip(parts, divisors, strict=True))
        losses.append(step_by_hand(kind, opt, weighted, [1.0] * len(parts), objective).item())
    return opt, losses


def same_weights(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def chunks(rows, size):
    return [stacked(rows[i : i + size]) for i in range(0, len(rows), size)]


@pytest.mark.parametrize(("kind", "accumulate"), [("free", 1), ("free", 2), ("base", 2)])
def test_a_model_that_counts_tokens_trains_as_by_hand(tmp_path, words, kind, accumulate):
    model, hand = language_model(), language_model()
    args = arguments(tmp_path, num_train_epochs=1, gradient_accumulation_steps=accumulate)
    opt = make(kind, model.parameters())
    trainer = Trainer(model, args, train_dataset=words, optimizers=(opt, None))
    trainer.train()
    parts = chunks(words, BATCH if accumulate == 2 else BATCH // 2)
    steps = [parts[i : i + 2] for i in range(0, len(parts), 2)]
    hand_opt, losses = by_hand(kind, hand, steps, summed=accumulate > 1)
    assert opt.diagnostics() == hand_opt.diagnostics()
    assert opt.diagnostics()["gradients"] == 2
    assert opt.diagnostics()["updates"] == trainer.state.global_step == len(steps)
    with hand_opt.averaged():
        assert same_weights(model, hand)
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)
    assert logged(trainer, "sgdol/step_size")[-1] == opt.diagnostics()["step_size"][0]
    assert min(logged(trainer, "grad_norm")) > 0


def test_a_mean_over_samples_is_weighted_by_samples(tmp_path, images):
    """The last batch has three of them."""
    model, hand = build_images(), build_images()
    args = arguments(tmp_path, num_train_epochs=2)
    opt = make("free", model.parameters())
    Trainer(model, args, train_dataset=images, optimizers=(opt, None)).train()
    parts = chunks(images[: 6 * BATCH], BATCH // 2)
    steps = [parts[i : i + 2] for i in range(0, len(parts), 2)]
    steps.append([stacked(images[6 * BATCH : 6 * BATCH + 1]), stacked(images[6 * BATCH + 1 :])])
    hand_opt, _ = by_hand("free", hand, 2 * steps)
    with hand_opt.averaged():
        assert same_weights(model, hand)
    assert opt.diagnostics() == hand_opt.diagnostics()


@pytest.mark.parametrize(("kind", "best"), [("free", False), ("base", True)])
def test_evaluation_checkpoints_and_the_end_are_at_the_average(tmp_path, words, kind, best):
    seen = []

    class Mine(Trainer):
        def prediction_step(self, model, *args, **kwargs):
            seen.append(model.transformer.wte.weight.detach().clone())
            return super().prediction_step(model, *args, **kwargs)

    class Remember(TrainerCallback):
        """The iterate and the average at each evaluation."""

        iterates: ClassVar[list] = []
        averages: ClassVar[list] = []

        def on_evaluate(self, args, state, control, model, optimizer, **rest):
            self.iterates.append(model.transformer.wte.weight.detach().clone())
            with optimizer.optimizer.averaged():
                self.averages.append(model.transformer.wte.weight.detach().clone())

    model, remember = language_model(), Remember()
    every = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    choice = {"load_best_model_at_end": best, "metric_for_best_model": "loss", "greater_is_better": True}
    args = arguments(tmp_path, max_steps=6, **every, **choice)
    trainer = Mine(
        model,
        args,
        train_dataset=words,
        eval_dataset=words[:BATCH],
        optimizers=(make(kind, model.parameters()), None),
        callbacks=[remember],
    )
    trainer.train()
    assert not torch.equal(remember.iterates[-1], remember.averages[-1])
    assert all(torch.equal(*pair) for pair in zip(seen, remember.averages, strict=True))
    for number, step in enumerate((3, 6)):
        folder = tmp_path / f"checkpoint-{step}"
        loaded = type(model).from_pretrained(folder).transformer.wte.weight
        assert torch.equal(loaded, remember.averages[number])
        iterate = torch.load(folder / "sgdol_iterate.pt", weights_only=True)["transformer.wte.weight"]
        assert torch.equal(iterate, remember.iterates[number])
    # the largest loss is called the best here, so that it is not the last one
    expected = remember.averages[0] if best else remember.averages[1]
    assert torch.equal(model.transformer.wte.weight, expected)
    trainer.evaluate()
    assert torch.equal(seen[-1], expected)
    trainer.save_model(str(tmp_path / "final"))
    assert torch.equal(type(model).from_pretrained(tmp_path / "final").transformer.wte.weight, expected)
    assert not os.path.exists(tmp_path / "final" / "sgdol_iterate.pt")


def test_training_again_goes_on_from_the_iterate(tmp_path, words, assert_same):
    model, hand = language_model(), language_model()
    opt = make("free", model.parameters())
    args = arguments(tmp_path, num_train_epochs=1)
    trainer = Trainer(model, args, train_dataset=words, optimizers=(opt, None))
    trainer.train()
    trainer.train()
    parts = chunks(words, BATCH // 2)
    hand_opt, _ = by_hand("free", hand, 2 * [parts[i : i + 2] for i in range(0, len(parts), 2)])
    with hand_opt.averaged():
        assert same_weights(model, hand)
    assert opt.diagnostics() == hand_opt.diagnostics()


def test_the_trainers_own_schedule_and_clipping_train_as_by_hand(tmp_path, words):
    """They were refused: a constant schedule and max_grad_norm=0 had to be given."""
    model, hand = language_model(), language_model()
    theirs = {"lr_scheduler_type": "linear", "max_grad_norm": 0.5}
    args = arguments(tmp_path, num_train_epochs=1, **theirs)
    trainer = Trainer(model, args, train_dataset=words, optimizer_cls_and_kwargs=(SGDOLFree, {}))
    trainer.train()
    decaying = trainer.get_decay_parameter_names(model)  # the first of the Trainer's two groups
    groups = [[p for name, p in hand.named_parameters() if (name in decaying) == first] for first in (True, False)]
    parts, opt = chunks(words, BATCH // 2), SGDOLFree([{"params": params} for params in groups])
    steps = len(parts) // 2
    hand.train()
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = 1 - step / steps
        pair = parts[2 * step : 2 * step + 2]
        counts = [part["labels"].ne(-100).sum().item() for part in pair]

        def loss_of(rows, pair=pair, counts=counts):
            return sum(hand(**pair[i]).loss / (sum(counts) / counts[i]) for i in rows)

        backward(loss_of, [0, 1], reduction="sum")
        torch.nn.utils.clip_grad_norm_(hand.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    assert logged(trainer, "learning_rate") == pytest.approx([1 - step / steps for step in range(steps)])
    assert min(logged(trainer, "grad_norm")) > 0.5  # every step was clipped
    with opt.averaged():
        assert same_weights(model, hand)


def test_a_part_in_which_nothing_is_predicted_adds_nothing(tmp_path, words):
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"].clone()} for row in words[: 2 * BATCH]]
    for row in rows[BATCH : BATCH + BATCH // 2]:
        row["labels"][:] = -100
    model = language_model()
    args = arguments(tmp_path, max_steps=2)
    opt = SGDOLFree(model.parameters())
    Trainer(model, args, train_dataset=rows, optimizers=(opt, None)).train()
    assert opt.diagnostics()["updates"] == 2
    assert opt.diagnostics()["skipped"] == 0


def test_a_last_batch_of_a_single_sample_is_left_out(tmp_path, words):
    model = language_model()
    opt = SGDOLFree(model.parameters())
    trainer = Trainer(
        model, arguments(tmp_path, num_train_epochs=1), train_dataset=words[: BATCH + 1], optimizers=(opt, None)
    )
    with pytest.warns(UserWarning, match="a batch of a single sample is a single gradient"):
        trainer.train()
    assert opt.diagnostics()["updates"] == 1
