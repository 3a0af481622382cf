"""Text and signals of the larger networks: what Python and installed packages ship, and what a seed makes."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from benchmarks.quality.data import PARTS, Samples

__all__ = ["BYTES", "LEVELS", "english", "python_source", "sound"]

BYTES = 128
"""Tokens of :func:`english` and :func:`python_source`: ASCII; every other byte is 0."""
LEVELS = 64
"""Tokens of :func:`sound`."""


def _windows(text: bytes, length: int) -> Samples:
    """Disjoint windows, with the same moved by one byte as targets; eight of every eighty are kept for validation."""
    tokens = torch.tensor(list(text))
    tokens = torch.where(tokens < BYTES, tokens, 0)
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    kept = torch.arange(count) // 8 % 10 == 9
    return Samples(inputs[~kept], targets[~kept], inputs[kept], targets[kept])


@functools.cache
def english(part: str, length: int) -> Samples:
    """Every second page, by name, of the documentation that Python's help() shows."""
    pages = [topics[name] for name in sorted(topics)[PARTS.index(part) :: 2]]
    return _windows("\n".join(pages).encode(), length)


@functools.cache
def python_source(part: str, length: int) -> Samples:
    """The first million bytes of every second module, by name, of Python's standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[PARTS.index(part) :: 2]
    return _windows(b"\n".join(f.read_bytes() for f in files)[:1_000_000], length)


@functools.cache
def sound(length: int, notes: int, data_seed: int) -> Samples:
    """Notes of three decaying partials and some noise, one a window, quantised to ``LEVELS`` on a mu-law scale."""
    generator = torch.Generator().manual_seed(data_seed)

    def uniform(*size: int) -> Tensor:
        return torch.rand(notes, *size, generator=generator)

    time = torch.arange(length + 1).expand(notes, 1, -1)
    pitch = 2 * math.pi / (8 * 4 ** uniform(1, 1))  # periods of 8 to 32 samples
    partials = pitch * torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
    loudness = uniform(3, 1) * torch.exp(-0.03 * uniform(3, 1) * time)
    wave = (loudness * torch.sin(partials * time + 2 * math.pi * uniform(3, 1))).sum(1) / 3
    wave = (wave + 0.02 * torch.randn(wave.shape, generator=generator)).clamp(-1, 1)
    squashed = wave.sign() * torch.log1p(LEVELS * wave.abs()) / math.log1p(LEVELS)
    tokens = ((squashed + 1) / 2 * (LEVELS - 1)).round().long()
    kept = notes // 10
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Samples(inputs[:-kept], targets[:-kept], inputs[-kept:], targets[-kept:])
