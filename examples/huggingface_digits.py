"""Hugging Face: give SGDOL to the Trainer, and log what it learns with sgdol.trainers.huggingface.Trainer.

A small residual network from scratch; nothing is downloaded.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import ResNetConfig, ResNetForImageClassification, TrainingArguments, set_seed

from sgdol import SGDOL
from sgdol.trainers.huggingface import Trainer

set_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1504, len(images) - 1504])
dataset = [{"pixel_values": images[i], "labels": labels[i]} for i in train]

config = ResNetConfig(num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
config.num_labels = 10
model = ResNetForImageClassification(config)
opt = SGDOL(model.parameters(), lr=0.5)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),  # a place of your own, in earnest
    num_train_epochs=6,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,  # two independent gradients per update
    lr_scheduler_type="constant",  # SGDOL learns the step size: no schedule
    logging_steps=47,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model, args, train_dataset=dataset, optimizers=(opt, None))
trainer.train()

for row in trainer.state.log_history:  # sgdol.plot(trainer.state.log_history) draws it
    if "loss" in row:
        print(f"step {row['step']}  loss {row['loss']:.3f}  step size {row['sgdol/step_size']:.4f}")
model.eval()
accuracy = (model(images[test]).logits.argmax(1) == labels[test]).float().mean()
print(f"test accuracy {accuracy:.3f}  {opt.diagnostics()['gradients']} gradients per update")
