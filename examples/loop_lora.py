"""A LoRA Trainer's loop: a small GPT-2 is fine-tuned to another task through matrices of rank 4 in its attention.

The two lines marked "sgdol" are what changes in a script that has transformers' Trainer. --adamw trains with its
default optimizer, lr 3e-4 falling linearly, a usual choice for LoRA. Nothing is downloaded: the small model is
trained here to count up, and is fine-tuned to count down.
"""

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from sgdol.trainers.huggingface import Trainer, TrainingArguments  # sgdol: in place of transformers'

parser = argparse.ArgumentParser()
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()


def counting(by: int, rows: int, seed: int) -> Tensor:
    start = torch.randint(50, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return (start + by * torch.arange(16)) % 50


class LoRA(nn.Module):
    """x W + x A B, of which A and B are trained."""

    def __init__(self, inner: Any, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner
        self.A = nn.Parameter(torch.randn(inner.weight.shape[0], rank) / rank)
        self.B = nn.Parameter(torch.zeros(rank, inner.weight.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.A @ self.B


set_seed(args.seed)
config = GPT2Config(vocab_size=50, n_positions=16, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
model: Any = GPT2LMHeadModel(config)
base = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(150):
    batch = counting(1, 32, step)
    model(input_ids=batch, labels=batch).loss.backward()
    base.step()
    base.zero_grad()

model.requires_grad_(False)
for layer in model.transformer.h:
    layer.attn.c_attn, layer.attn.c_proj = LoRA(layer.attn.c_attn), LoRA(layer.attn.c_proj)
dataset, test = ([{"input_ids": row, "labels": row} for row in counting(-1, n, s)] for n, s in ((1024, -1), (256, -2)))
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=tempfile.mkdtemp(),  # a place of your own, in earnest
        optim="adamw_torch" if args.adamw else "sgdol_free",  # sgdol
        learning_rate=3e-4,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=16,
        logging_steps=64,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=args.seed,
    ),
    train_dataset=dataset,
    eval_dataset=test,
)
trainer.train()
print(f"test loss {trainer.evaluate()['eval_loss']:.3f}")
