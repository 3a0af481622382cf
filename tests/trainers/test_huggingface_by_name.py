"""TrainingArguments(optim="sgdol_free"): by its name, an optimizer trains as it does by its class."""

from __future__ import annotations

import pytest
import torch
from trainer_problems import arguments, language_model

from sgdol import SGDOL, SGDOLFree


@pytest.fixture(scope="module", autouse=True)
def imported():
    """When the first test runs, not when tests are collected: transformers takes seconds."""
    global HfArgumentParser, Trainer, TrainingArguments
    from transformers import HfArgumentParser

    from sgdol.trainers.huggingface import Trainer, TrainingArguments


ROWS = [{"input_ids": row, "labels": row} for row in torch.randint(17, (64, 12), generator=torch.Generator())]


def trained(folder, kind=None, *, optimizer=None, **options) -> torch.Tensor:
    """By the name in our arguments of this kind, or with an optimizer's class in transformers' own."""
    model = language_model()
    args = arguments(folder, kind, max_steps=6, **options)
    Trainer(model, args, train_dataset=ROWS, **({"optimizer_cls_and_kwargs": optimizer} if optimizer else {})).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("clip", [{}, {"lr_scheduler_type": "cosine", "max_grad_norm": 0.5}], ids=["", "a schedule"])
def test_without_a_learning_rate_by_name(tmp_path, clip):
    """A schedule that somebody asks for is used and not replaced."""
    theirs = clip or {"lr_scheduler_type": "constant", "max_grad_norm": 0}
    named = trained(tmp_path, TrainingArguments, optim="sgdol_free", weight_decay=0.1, **clip)
    assert torch.equal(named, trained(tmp_path, optimizer=(SGDOLFree, {}), weight_decay=0.1, **theirs))


def test_with_a_learning_rate_by_name(tmp_path):
    named = trained(tmp_path, TrainingArguments, optim="sgdol", learning_rate=0.1)
    plain = trained(tmp_path, optimizer=(SGDOL, {"lr": 0.1}), lr_scheduler_type="constant")
    assert torch.equal(named, plain)


def test_the_command_line_knows_the_name(tmp_path):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--optim", "sgdol_free", "--use_cpu"]
    )
    assert args.optim == "sgdol_free"
    assert args.to_dict()["optim"] == "sgdol_free"


def test_other_names_are_transformers_own(tmp_path):
    """Logging the loss of such an optimizer raised: it has learned no step size."""
    args = TrainingArguments(str(tmp_path), optim="adamw_torch", use_cpu=True)
    assert (args.lr_scheduler_type.value, args.max_grad_norm) == ("linear", 1.0)
    assert Trainer.get_optimizer_cls_and_kwargs(args)[0] is torch.optim.AdamW
    assert torch.isfinite(trained(tmp_path, TrainingArguments, optim="adamw_torch", logging_steps=2)).all()
    with pytest.raises(ValueError, match="sgdol_fre"):
        TrainingArguments(str(tmp_path), optim="sgdol_fre", use_cpu=True)
