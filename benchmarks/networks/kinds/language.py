"""Models of text and of signals: a GPT, its fine-tuning with LoRA, an LSTM, an encoder with a decoder, a WaveNet."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks.data import BYTES, LEVELS, english, python_source, sound
from benchmarks.quality.data import Samples
from benchmarks.quality.networks import Transformer, TransformerLayer
from benchmarks.quality.objectives import Classifier, Objective

__all__ = ["finetuning", "gpt", "lstm", "seq2seq", "wavenet"]


# Transformers ---------------------------------------------------------------------------------------------------------


def gpt(seed: int, part: str, length: int, width: int, layers: int, batch: int) -> Objective:
    """A GPT that predicts the bytes of Python source."""
    network = Transformer(BYTES, length, width, width // 32, layers)
    return Classifier(network, python_source(part, length), batch)


class LoRA(nn.Module):
    """A frozen linear layer and a trained change of low rank, which starts at zero."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = [frozen]  # in a list: its weights are then no parameters of this module
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen[0](x) + self.up(self.down(x))


@functools.cache
def _pretrained(part: str, length: int, width: int, layers: int, steps: int) -> dict[str, Tensor]:
    """The weights of a GPT after ``steps`` of AdamW on Python source: the same for every seed."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(77)
        objective = gpt(0, part, length, width, layers, batch=16)
        rows = objective.draw(torch.Generator().manual_seed(78), steps)
        optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3, weight_decay=0.0)
        for row in rows:
            optimizer.zero_grad()
            objective(row).backward()
            optimizer.step()
    return {name.removeprefix("network."): p.detach() for name, p in objective.named_parameters()}


def finetuning(
    seed: int, part: str, length: int, width: int, layers: int, rank: int, pretraining: int, batch: int
) -> Objective:
    """A GPT of Python source learns English: LoRA in every linear layer of its blocks."""
    network = Transformer(BYTES, length, width, width // 32, layers)
    network.load_state_dict(_pretrained(part, length, width, layers, pretraining))
    network.requires_grad_(False)
    for layer in network.layers:
        for name in ("qkv", "out", "up", "down"):
            setattr(layer, name, LoRA(getattr(layer, name), rank))
    objective = Classifier(network, english(part, length), batch)
    for name, p in list(network.named_parameters()):
        if not p.requires_grad:  # frozen: a buffer, so that no optimizer gets it
            owner = network.get_submodule(name.rpartition(".")[0])
            delattr(owner, name.rpartition(".")[2])
            owner.register_buffer(name.rpartition(".")[2], p.detach())
    return objective


class Decoder(TransformerLayer):
    """A transformer layer that also attends to what an encoder has made of the source."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, dropout=0.0)
        self.norm3 = nn.LayerNorm(width)
        self.query, self.keys, self.mix = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        """Attention and linear layers on ``x``, then what its queries find in ``source``."""
        assert source is not None
        x, (n, length, width) = super().forward(x, mask), x.shape
        q = self.query(self.norm3(x)).view(n, length, self.heads, -1).transpose(1, 2)
        k, v = self.keys(source).view(n, source.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return x + self.mix((weights @ v).transpose(1, 2).reshape(n, length, width))


class Seq2Seq(nn.Module):
    """An encoder and a decoder; the inputs are the tokens of the source and those of the target before each place."""

    def __init__(self, tokens: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.encoder = nn.ModuleList(TransformerLayer(width, heads, 0.0) for _ in range(layers))
        self.decoder = nn.ModuleList(Decoder(width, heads) for _ in range(layers))
        self.norm1, self.norm2, self.head = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, tokens)
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        source, x = (self.embedding(half) + self.position for half in tokens.chunk(2, 1))
        for layer in self.encoder:
            source = layer(source, torch.zeros(()))
        source = self.norm1(source)
        for layer in self.decoder:
            x = layer(x, self.mask, source)
        return self.head(self.norm2(x))


def seq2seq(seed: int, part: str, length: int, width: int, layers: int, noise: float, batch: int) -> Objective:
    """Text is restored after a share ``noise`` of its bytes has been replaced by others and the rest been reversed."""
    samples = python_source(part, length)
    generator = torch.Generator().manual_seed(41)

    def pairs(clean: Tensor) -> Tensor:
        other = torch.randint(BYTES, clean.shape, generator=generator)
        spoiled = torch.where(torch.rand(clean.shape, generator=generator) < noise, other, clean).flip(1)
        return torch.cat([spoiled, F.pad(clean[:, :-1], (1, 0))], 1)

    inputs, kept = pairs(samples.inputs), pairs(samples.test_inputs)
    network = Seq2Seq(BYTES, length, width, width // 32, layers)
    return Classifier(network, Samples(inputs, samples.inputs, kept, samples.test_inputs), batch)


# Recurrent and convolutional ------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Layers of LSTM between an embedding and a classifier of the next token."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens)
        self.layers = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


def lstm(seed: int, part: str, length: int, width: int, layers: int, batch: int) -> Objective:
    """An LSTM that predicts the bytes of English text."""
    return Classifier(Recurrent(BYTES, width, layers), english(part, length), batch)


class WaveNet(nn.Module):
    """Gated causal convolutions whose dilation doubles, with residual and skip connections."""

    def __init__(self, levels: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(levels, width), nn.Conv1d(width, levels, 1)
        self.dilations = [2**i for i in range(layers)]
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.dilations)
        self.outputs = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).mT
        skips = torch.zeros_like(x)
        for dilation, gate, output in zip(self.dilations, self.gates, self.outputs, strict=True):
            value, open_ = gate(F.pad(x, (dilation, 0))).chunk(2, 1)
            residual, skip = output(torch.tanh(value) * torch.sigmoid(open_)).chunk(2, 1)
            x, skips = x + residual, skips + skip
        return self.head(F.relu(skips)).mT


def wavenet(seed: int, length: int, notes: int, width: int, layers: int, batch: int, data_seed: int) -> Objective:
    """A WaveNet that predicts the next sample of synthetic notes."""
    return Classifier(WaveNet(LEVELS, width, layers), sound(length, notes, data_seed), batch)
