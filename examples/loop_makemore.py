"""makemore's loop: a small network learns to make more words like those of a list, here words of made syllables.

The four lines marked "sgdol" are what changes in a loop that has AdamW. --adamw trains with makemore's: lr 5e-4, betas
0.9 and 0.99, weight decay 0.01.
"""

import argparse
import random
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgdol.torch import SGDOLFree, backward  # sgdol

parser = argparse.ArgumentParser()
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=1500)
args = parser.parse_args()

made = random.Random(0)
syllables = [a + b + c for a in "bdklmnrst" for b in "aeiou" for c in ("", "", "n", "s", "r")]
weights = [made.random() ** 3 for _ in syllables]
words = sorted({"".join(made.choices(syllables, weights, k=made.choice([2, 3]))) for _ in range(8000)})
made.shuffle(words)
letters = "." + "".join(sorted(set("".join(words))))
context = 4


def examples(words: list[str]) -> tuple[Tensor, Tensor]:
    pairs = [(("." * context + word)[i : i + context], (word + ".")[i]) for word in words for i in range(len(word) + 1)]
    x = torch.tensor([[letters.index(c) for c in before] for before, _ in pairs])
    return x, torch.tensor([letters.index(after) for _, after in pairs])


(X, Y), test = examples(words[:-500]), examples(words[-500:])


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(letters), 64)
        self.layers = nn.Sequential(nn.Linear(64 * context, 64), nn.Tanh(), nn.Linear(64, len(letters)))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(self.letters(x).flatten(1))
        return logits, F.cross_entropy(logits, y)


torch.manual_seed(args.seed)
model = MLP()
opt: Any
if args.adamw:
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)
else:
    opt = SGDOLFree(model.parameters(), weight_decay=0.01)  # sgdol

for step in range(args.steps):
    rows = torch.randint(len(X), (32,))
    model.zero_grad(set_to_none=True)
    loss = backward(lambda x, y: model(x, y)[1], X[rows], Y[rows])  # sgdol: in place of model(X, Y) and loss.backward()
    opt.step()
    if step % 500 == 0:
        print(f"step {step}  loss {loss:.3f}")

with torch.no_grad(), nullcontext() if args.adamw else opt.averaged():  # sgdol
    print(f"test loss {model(*test)[1]:.3f}")
