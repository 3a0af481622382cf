"""nanoGPT's loop: a small GPT on the text of Python's own manual, character by character.

The four lines marked "sgdol" are what changes in a loop that has AdamW. --adamw trains with AdamW as nanoGPT's
train_shakespeare_char does: lr 1e-3 with warm-up and cosine decay, beta2 0.99, weight decay 0.1.
"""

import argparse
import math
import pydoc_data.topics
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgdol.torch import SGDOLFree, backward  # sgdol

parser = argparse.ArgumentParser()
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=400)
args = parser.parse_args()
torch.manual_seed(args.seed)

text = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).encode("ascii", "ignore")
data = torch.tensor(list(text))
train, val = data[: -len(data) // 10], data[-len(data) // 10 :]
block, batch_size, width = 32, 16, 64


def get_batch(source: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.randint(len(source) - block - 1, (batch_size,))
    windows = torch.stack([source[i : i + block + 1] for i in rows])
    return windows[:, :-1], windows[:, 1:]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(block, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 128, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        logits = self.head(self.layers(h, mask=self.mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


model = GPT()
opt: Any
if args.adamw:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    warm_up = args.steps // 20
    falling = lambda t: 0.1 + 0.45 * (1 + math.cos(math.pi * (t - warm_up) / (args.steps - warm_up)))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: (t + 1) / warm_up if t < warm_up else falling(t))
else:
    opt = SGDOLFree(model.parameters(), weight_decay=0.1)  # sgdol: and no schedule

for step in range(args.steps):
    x, y = get_batch(train)
    loss = backward(lambda x, y: model(x, y)[1], x, y)  # sgdol: in place of _, loss = model(x, y); loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    if args.adamw:
        schedule.step()
    if step % 100 == 0:
        print(f"step {step}  loss {loss:.3f}")

model.eval()
torch.manual_seed(0)
with torch.no_grad(), nullcontext() if args.adamw else opt.averaged():  # sgdol
    print(f"validation loss {sum(model(*get_batch(val))[1].item() for _ in range(40)) / 40:.3f}")
