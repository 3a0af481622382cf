"""Vectors for words, images and items: most of a table gets no gradient from a batch, and scores are products."""

from __future__ import annotations

import functools
import importlib.resources
import math
import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import data
from benchmarks.quality.data import PARTS, Samples
from benchmarks.quality.networks import MLP
from benchmarks.quality.objectives import Classifier, Objective, Supervised

__all__ = ["cooccurrence", "n_pair", "ranking", "skip_gram", "words"]


@functools.cache
def words(part: str, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Scikit-learn's descriptions of its data sets as the ranks of their words; rarer words are left out.

    Even and odd descriptions, by name, make the two parts.
    """
    folder = importlib.resources.files("sklearn.datasets.descr")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=lambda f: f.name)
    texts = [re.findall("[a-z]+", f.read_text(encoding="utf-8").lower()) for f in files[PARTS.index(part) :: 2]]
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary]
    rank = {word: i for i, word in enumerate(ranked)}
    return tuple(tuple(rank[word] for word in text if word in rank) for text in texts)


def _pairs(part: str, vocabulary: int, window: int) -> Tensor:
    pairs = [
        (a, text[j])
        for text in words(part, vocabulary)
        for i, a in enumerate(text)
        for j in range(max(0, i - window), min(len(text), i + window + 1))
        if i != j
    ]
    return torch.tensor(pairs)


class _SkipGram(nn.Module):
    """Products of a word's vector with those of its neighbour and of some others; the latter's table starts at zero."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Parameter((torch.rand(vocabulary, width) - 0.5) / width)
        self.contexts = nn.Parameter(torch.zeros(vocabulary, width))

    def forward(self, rows: Tensor) -> Tensor:
        word = F.embedding(rows[:, 0], self.words)
        return torch.einsum("nd,nkd->nk", word, F.embedding(rows[:, 1:], self.contexts))


def skip_gram(
    seed: int, part: str, vocabulary: int, window: int, negatives: int, width: int, batch: int, data_seed: int
) -> Objective:
    """Skip-gram with negative sampling (Mikolov et al. 2013), summed over a pair's words."""
    pairs = _pairs(part, vocabulary, window)
    generator = torch.Generator().manual_seed(data_seed)
    pairs = pairs[torch.randperm(len(pairs), generator=generator)[:5120]]
    frequency = pairs[:, 1].bincount(minlength=vocabulary).double() ** 0.75
    others = torch.multinomial(frequency, len(pairs) * negatives, replacement=True, generator=generator)
    inputs = torch.hstack([pairs, others.view(-1, negatives)])
    labels = torch.zeros(len(pairs), 1 + negatives)
    labels[:, 0] = 1.0
    samples = Samples(inputs[:4096], labels[:4096], inputs[4096:], labels[4096:])

    def criterion(scores: Tensor, labels: Tensor) -> Tensor:
        return (1 + negatives) * F.binary_cross_entropy_with_logits(scores, labels)

    share = torch.tensor([1 / (1 + negatives), negatives / (1 + negatives)])
    constant = (1 + negatives) * float(torch.special.entr(share).sum())
    return Supervised(_SkipGram(vocabulary, width), samples, batch, criterion, constant)


class _Bilinear(nn.Module):
    """<a_i, b_j> + c_i + d_j."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.randn(vocabulary, width) / width) for _ in range(2)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(vocabulary)) for _ in range(2)])

    def forward(self, rows: Tensor) -> Tensor:
        i, j = rows.unbind(1)
        product = F.embedding(i, self.tables[0]) * F.embedding(j, self.tables[1])
        return product.sum(1) + self.biases[0][i] + self.biases[1][j]


def cooccurrence(seed: int, part: str, vocabulary: int, window: int, width: int, batch: int) -> Objective:
    """Weighted least squares on the logarithms of how often words are near each other (GloVe)."""
    counts = Counter(map(tuple, _pairs(part, vocabulary, window).tolist()))
    where = torch.tensor(sorted(counts))
    often = torch.tensor([float(counts[tuple(w)]) for w in where.tolist()])
    targets = torch.stack([often.log(), (often / 10).clamp(max=1) ** 0.75], 1)
    order = torch.randperm(len(where), generator=torch.Generator().manual_seed(0))
    where, targets = where[order], targets[order]
    cut = len(where) * 4 // 5

    def criterion(scores: Tensor, targets: Tensor) -> Tensor:
        return (targets[:, 1] * (scores - targets[:, 0]) ** 2).mean()

    samples = Samples(where[:cut], targets[:cut], where[cut:], targets[cut:])
    log, weight = samples.targets.unbind(1)
    constant = float(criterion((weight * log).sum() / weight.sum(), samples.targets))
    return Supervised(_Bilinear(vocabulary, width), samples, batch, criterion, constant)


class _Similarities(nn.Module):
    """Cosines of the first image of a row with the others, over a temperature."""

    def __init__(self, widths: tuple[int, ...], temperature: float) -> None:
        super().__init__()
        self.network, self.temperature = MLP(widths), temperature

    def forward(self, x: Tensor) -> Tensor:
        e = F.normalize(self.network(x), dim=-1)
        return torch.einsum("nd,nkd->nk", e[:, 0], e[:, 1:]) / self.temperature


def n_pair(
    seed: int, part: str, negatives: int, hidden: tuple[int, ...], temperature: float, batch: int, data_seed: int
) -> Objective:
    """Contrastive learning: which of the others is the same digit as the first one."""
    digits = data.digits(part)
    generator = torch.Generator().manual_seed(data_seed)

    def tuples(x: Tensor, y: Tensor, rows: int) -> Tensor:
        anchor = torch.randint(len(y), (rows,), generator=generator)
        same = (y[anchor, None] == y).double()
        positive = torch.multinomial(same, 1, generator=generator)
        return x[torch.hstack([anchor[:, None], positive, torch.multinomial(1 - same, negatives, generator=generator)])]

    inputs = tuples(digits.inputs, digits.targets, 1024)
    kept = tuples(digits.test_inputs, digits.test_targets, 512)
    zeros = torch.zeros(1024, dtype=torch.long)
    objective = Classifier(_Similarities((64, *hidden), temperature), Samples(inputs, zeros, kept, zeros[:512]), batch)
    objective.constant = math.log(1 + negatives)
    return objective


class _Scores(nn.Module):
    """The score of each item of a pair."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.network = MLP((*widths, 1), nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).squeeze(-1)


def ranking(seed: int, features: int, hidden: tuple[int, ...], noise: float, batch: int, data_seed: int) -> Objective:
    """RankNet: which of two items of a query is the better one; relevance is not linear in the features."""
    generator = torch.Generator().manual_seed(data_seed)
    x = torch.randn(2560, 2, features, generator=generator)
    a, b = torch.randn(2, features, generator=generator) / math.sqrt(features)
    relevance = x @ a + (x @ b) ** 2 + noise * torch.randn(2560, 2, generator=generator)
    better = relevance.argmax(1)
    samples = Samples(x[:2048], better[:2048], x[2048:], better[2048:])
    return Classifier(_Scores((features, *hidden)), samples, batch)
