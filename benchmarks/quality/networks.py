"""Small networks whose training takes about a second."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CNN", "MLP", "ResNet", "Transformer", "TransformerLayer"]


class MLP(nn.Sequential):
    """Fully connected layers; ``dropout`` after each hidden one."""

    def __init__(self, widths: tuple[int, ...], activation: type[nn.Module] = nn.ReLU, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            if i:
                layers += [activation()] + ([nn.Dropout(dropout)] if dropout else [])
            layers.append(nn.Linear(before, after))
        super().__init__(*layers)


class CNN(nn.Sequential):
    """Convolutions of 3 x 3, each followed by pooling, on square images given as rows."""

    def __init__(self, size: int, channels: tuple[int, ...], classes: int = 10) -> None:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, size, size))]
        for before, after in zip((1, *channels), channels, strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        side = size // 2 ** len(channels)
        super().__init__(*layers, nn.Flatten(), nn.Linear(channels[-1] * side * side, classes))


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip = nn.Conv2d(before, after, 1, stride=stride, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Sequential):
    """A stem and residual blocks with BatchNorm, the later ones of stride 2, on square images given as rows."""

    def __init__(self, size: int, channels: tuple[int, ...], stem_stride: int = 1, classes: int = 10) -> None:
        first = channels[0]
        stem = nn.Conv2d(1, first, 3, stride=stem_stride, padding=1, bias=False)
        layers: list[nn.Module] = [nn.Unflatten(1, (1, size, size)), stem, nn.BatchNorm2d(first), nn.ReLU()]
        for before, after in zip((first, *channels), channels, strict=False):
            layers.append(_Block(before, after, 1 if before == after else 2))
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], classes))


class TransformerLayer(nn.Module):
    """Attention and two linear layers, each with normalisation before and a connection around it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # Written out, because the fused kernel has no second derivative, which measuring the curvature needs.
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask).softmax(-1)
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(n, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A causal language model on characters, with learned positions and normalisation before each layer."""

    def __init__(
        self, tokens: int, length: int, width: int = 32, heads: int = 2, layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(TransformerLayer(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(self.norm(x))
