"""TrainingArguments(optim="sgdol_free"): by its name, an optimizer trains as it does by its class."""

from __future__ import annotations

import pytest
import torch

from sgdol import SGDOL, SGDOLFree


@pytest.fixture(scope="module", autouse=True)
def imported():
    """When the first test runs, not when tests are collected: transformers takes seconds."""
    global GPT2Config, GPT2LMHeadModel, HfArgumentParser, Plain, Trainer, TrainingArguments
    from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser
    from transformers import TrainingArguments as Plain

    from sgdol.trainers.huggingface import Trainer, TrainingArguments


ROWS = [{"input_ids": row, "labels": row} for row in torch.randint(17, (64, 12), generator=torch.Generator())]


def trained(args, **optimizer) -> torch.Tensor:
    torch.manual_seed(0)
    size = {"vocab_size": 17, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**size, eos_token_id=0))
    trainer = Trainer(model, args, train_dataset=ROWS, **optimizer)
    trainer.train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def arguments(kind, folder, **options):
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return kind(output_dir=str(folder), max_steps=6, per_device_train_batch_size=8, **quiet, **options)


def test_without_a_learning_rate_by_name(tmp_path):
    named = trained(arguments(TrainingArguments, tmp_path, optim="sgdol_free", weight_decay=0.1))
    plain = arguments(Plain, tmp_path, lr_scheduler_type="constant", max_grad_norm=0, weight_decay=0.1)
    assert torch.equal(named, trained(plain, optimizer_cls_and_kwargs=(SGDOLFree, {})))


def test_with_a_learning_rate_by_name(tmp_path):
    named = trained(arguments(TrainingArguments, tmp_path, optim="sgdol", learning_rate=0.1))
    plain = arguments(Plain, tmp_path, lr_scheduler_type="constant")
    assert torch.equal(named, trained(plain, optimizer_cls_and_kwargs=(SGDOL, {"lr": 0.1})))


def test_on_the_command_line(tmp_path):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--optim", "sgdol_free", "--use_cpu"]
    )
    assert args.optim == "sgdol_free"
    assert args.to_dict()["optim"] == "sgdol_free"


def test_other_names_are_transformers_own(tmp_path):
    args = arguments(TrainingArguments, tmp_path, optim="adamw_torch")
    assert (args.lr_scheduler_type.value, args.max_grad_norm) == ("linear", 1.0)
    assert Trainer.get_optimizer_cls_and_kwargs(args)[0] is torch.optim.AdamW
    with pytest.raises(ValueError, match="sgdol_fre"):
        arguments(TrainingArguments, tmp_path, optim="sgdol_fre")


def test_another_optimizer_trains_as_with_transformers_own_trainer(tmp_path):
    """Logging its loss raised: it has learned no step size."""
    ours = arguments(TrainingArguments, tmp_path, optim="adamw_torch", logging_steps=2)
    assert torch.isfinite(trained(ours)).all()


def test_a_schedule_that_somebody_asks_for_is_used_and_not_replaced(tmp_path):
    chosen = {"lr_scheduler_type": "cosine", "max_grad_norm": 0.5}
    named = trained(arguments(TrainingArguments, tmp_path, optim="sgdol_free", **chosen))
    assert torch.equal(named, trained(arguments(Plain, tmp_path, **chosen), optimizer_cls_and_kwargs=(SGDOLFree, {})))
