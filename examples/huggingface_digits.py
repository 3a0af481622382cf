"""Hugging Face: give SGDOL or SGDOLFree to sgdol.trainers.huggingface.Trainer.

It splits each batch into two independent gradients, logs what is learned, and evaluates and saves at the average. A
small residual network from scratch; nothing is downloaded.
"""

import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import ResNetConfig, ResNetForImageClassification, TrainingArguments, set_seed

from sgdol import SGDOL, SGDOLFree
from sgdol.trainers.huggingface import Trainer

set_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1504, len(images) - 1504])
dataset = [{"pixel_values": images[i], "labels": labels[i]} for i in train]

config = ResNetConfig(num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
config.num_labels = 10


def train_with(optimizer: type, **options: Any) -> Trainer:
    """A network from the same start, trained."""
    set_seed(0)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),  # a place of your own, in earnest
        num_train_epochs=6,
        per_device_train_batch_size=32,
        lr_scheduler_type="constant",  # the step size is learned: no schedule
        max_grad_norm=0,  # no clipping
        logging_steps=47,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = ResNetForImageClassification(config)
    trainer = Trainer(model, args, train_dataset=dataset, optimizer_cls_and_kwargs=(optimizer, options))
    trainer.train()
    return trainer


def accuracy(trainer: Trainer) -> float:
    """On the images that were not trained on."""
    model = trainer.model.eval()
    with torch.no_grad():
        return (model(images[test]).logits.argmax(1) == labels[test]).float().mean().item()


trainer = train_with(SGDOL, lr=0.05)
for row in trainer.state.log_history:  # sgdol.plot(trainer.state.log_history) draws it
    if "loss" in row:
        sizes = row["sgdol/step_size/0"], row["sgdol/gradients"]
        print(f"step {row['step']}  loss {row['loss']:.3f}  step size {sizes[0]:.4f}  {sizes[1]} gradients per update")
print(f"test accuracy {accuracy(trainer):.3f}")

free = train_with(SGDOLFree)
print(f"without a learning rate: test accuracy {accuracy(free):.3f}")
