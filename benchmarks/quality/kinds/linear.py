"""Linear models with other links and losses, or with features as they come; factors; a kernel's parameters."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.data import Samples, part_of
from benchmarks.quality.kinds.embeddings import words
from benchmarks.quality.networks import MLP
from benchmarks.quality.objectives import Classifier, Evaluation, Finite, Logistic, Objective, Supervised

__all__ = [
    "bag_of_words",
    "cancer_raw",
    "cox",
    "deep_linear",
    "gaussian_process",
    "many_classes",
    "poisson",
    "prices_raw",
    "tensor_factors",
]


def _linear(features: int, outputs: int = 1) -> nn.Linear:
    """From zero, without a bias: the features have a constant one."""
    layer = nn.Linear(features, outputs, bias=False, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    return layer


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# Links ----------------------------------------------------------------------------------------------------------------


def _poisson_loss(z: Tensor, y: Tensor) -> Tensor:
    return (z.exp() - y * z).mean()


def poisson(seed: int, features: int, size: float, batch: int, data_seed: int) -> Objective:
    """Poisson regression with the exponential link, on features whose sizes fall from 1 to a tenth.

    ``size`` is the standard deviation of the true logarithmic rate around 1.
    """
    generator = torch.Generator().manual_seed(data_seed)
    x = _random(generator, 2560, features) * torch.logspace(0, -1, features, dtype=torch.float64)
    x = torch.hstack([x, torch.ones(2560, 1, dtype=torch.float64)])
    truth = _random(generator, features)
    z = x[:, :-1] @ truth
    z = 1 + size * z / z.std()
    y = torch.poisson(z.exp(), generator=generator)[:, None]
    samples = Samples(x[:2048], y[:2048], x[2048:], y[2048:])
    mean = samples.targets.mean()
    constant = float(mean - mean * mean.log())
    return Supervised(_linear(features + 1), samples, batch, _poisson_loss, constant)


def _partial_likelihood(z: Tensor, events: Tensor) -> Tensor:
    """Minus Cox's partial log likelihood of groups whose members are sorted by time, the earliest first."""
    z = z.squeeze(-1)
    at_risk = z.flip(1).logcumsumexp(1).flip(1)
    return (events * (at_risk - z)).sum(1).mean()


def cox(seed: int, features: int, group: int, batch: int, data_seed: int) -> Objective:
    """Survival in small groups (strata), some of it censored."""
    generator = torch.Generator().manual_seed(data_seed)
    rows = 800
    x = _random(generator, rows, group, features) * torch.logspace(0.5, -1, features, dtype=torch.float64)
    truth = _random(generator, features)
    risk = x @ truth
    risk = 1.5 * risk / risk.std()
    time = -torch.rand(rows, group, generator=generator, dtype=torch.float64).log() * torch.exp(-risk)
    censored = -2 * torch.rand(rows, group, generator=generator, dtype=torch.float64).log()
    order = torch.minimum(time, censored).argsort(1)
    x = x.gather(1, order[..., None].expand_as(x))
    events = (time < censored).double().gather(1, order)
    samples = Samples(x[:640], events[:640], x[640:], events[640:])
    nobody = torch.zeros(640, group, 1, dtype=torch.float64)
    constant = float(_partial_likelihood(nobody, samples.targets))
    return Supervised(_linear(features), samples, batch, _partial_likelihood, constant)


# Features as they come ------------------------------------------------------------------------------------------------


def cancer_raw(seed: int, part: str, batch: int, ridge: float) -> Objective:
    """Logistic regression on the breast cancer data in its own units, from 1e-3 to 1e3."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    samples = part_of(np.column_stack([x, np.ones(len(y))]), 2.0 * y - 1.0, part, torch.float64)
    return Logistic(samples, batch, ridge)


def prices_raw(seed: int, part: str, hidden: tuple[int, ...], batch: int) -> Objective:
    """Housing prices in thousands from features in their own units, from 1e-3 to 700, by a network."""
    from mlxtend.data import boston_housing_data  # type: ignore[import-untyped]

    x, y = boston_housing_data()
    samples = part_of(x, y[:, None], part, torch.float32)
    constant = float(samples.targets.var(correction=0))
    return Supervised(MLP((x.shape[1], *hidden, 1)), samples, batch, F.mse_loss, constant)


# Many classes, many features ------------------------------------------------------------------------------------------


def many_classes(seed: int, classes: int, features: int, noise: float, batch: int, data_seed: int) -> Objective:
    """Softmax regression with as many classes as some vocabularies have words; each is seen a few times."""
    generator = torch.Generator().manual_seed(data_seed)
    centres = torch.randn(classes, features, generator=generator)
    share = 1 / torch.arange(1, classes + 1).double() ** 0.7
    y = torch.multinomial(share, 5120, replacement=True, generator=generator)
    x = centres[y] + noise * torch.randn(5120, features, generator=generator)
    layer = nn.Linear(features, classes)
    nn.init.zeros_(layer.bias)
    return Classifier(layer, Samples(x[:4096], y[:4096], x[4096:], y[4096:]), batch)


@functools.cache
def _windows(part: str, vocabulary: int, length: int) -> Samples:
    """Counts of words in windows of text; is a window from the first half of the descriptions?"""
    rows, labels = [], []
    texts = words(part, vocabulary)
    for number, text in enumerate(texts):
        for start in range(0, len(text) - length, length):
            counts = Counter(text[start : start + length])
            row = np.zeros(vocabulary + 1)
            row[list(counts)] = list(counts.values())
            row[-1] = 1.0
            rows.append(row)
            labels.append(1.0 if number < len(texts) // 2 else -1.0)
    order = np.random.default_rng(1).permutation(len(rows))
    x = torch.from_numpy(np.stack(rows)[order])
    y = torch.tensor(labels, dtype=torch.float64)[torch.from_numpy(order)]
    test = torch.arange(len(y)) % 5 == 4
    return Samples(x[~test], y[~test], x[test], y[test])


def bag_of_words(seed: int, part: str, vocabulary: int, length: int, batch: int, ridge: float) -> Objective:
    """Logistic regression on sparse counts: frequent words in every batch, rare ones hardly ever."""
    return Logistic(_windows(part, vocabulary, length), batch, ridge)


# Factors --------------------------------------------------------------------------------------------------------------


class _Product(nn.Module):
    """A product of matrices."""

    def __init__(self, widths: tuple[int, ...], gain: float) -> None:
        super().__init__()
        self.factors = nn.ParameterList(
            [
                nn.Parameter(gain * torch.randn(a, b, dtype=torch.float64) / math.sqrt(a))
                for a, b in itertools.pairwise(widths)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x @ factor
        return x


def deep_linear(seed: int, widths: tuple[int, ...], gain: float, batch: int, data_seed: int) -> Objective:
    """A linear map by a deep linear network that starts near the saddle at zero; f* = 0."""
    generator = torch.Generator().manual_seed(data_seed)
    x = _random(generator, 1280, widths[0])
    rank = min(widths)
    sizes = torch.logspace(0, -1, rank, dtype=torch.float64)
    matrix = (_random(generator, widths[0], rank) * sizes) @ _random(generator, rank, widths[-1]) / widths[0]
    y = x @ matrix
    samples = Samples(x[:1024], y[:1024], x[1024:], y[1024:])
    constant = float(samples.targets.var(0, correction=0).mean())
    return Supervised(_Product(widths, gain), samples, batch, F.mse_loss, constant)


class _Tensor(nn.Module):
    """Entries of a sum of outer products of three vectors."""

    def __init__(self, shape: tuple[int, int, int], rank: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(0.5 * torch.randn(n, rank, dtype=torch.float64)) for n in shape])

    def forward(self, where: Tensor) -> Tensor:
        i, j, k = where.unbind(1)
        a, b, c = self.factors
        return (a[i] * b[j] * c[k]).sum(1)


def tensor_factors(
    seed: int, shape: tuple[int, int, int], rank: int, fitted: int, batch: int, data_seed: int
) -> Objective:
    """A tensor of the given rank, from four fifths of its entries, by ``fitted`` outer products; f* = 0."""
    generator = torch.Generator().manual_seed(data_seed)
    a, b, c = (_random(generator, n, rank) for n in shape)
    entries = torch.einsum("ir,jr,kr->ijk", a, b, c).flatten()
    where = torch.cartesian_prod(*(torch.arange(n) for n in shape))
    order = torch.randperm(len(entries), generator=generator)
    where, entries = where[order], entries[order]
    cut = len(entries) * 4 // 5
    samples = Samples(where[:cut], entries[:cut], where[cut:], entries[cut:])
    constant = float(samples.targets.var(correction=0))
    return Supervised(_Tensor(shape, fitted), samples, batch, F.mse_loss, constant)


# A kernel -------------------------------------------------------------------------------------------------------------


class GaussianProcess(Finite):
    """Minus the log marginal likelihood per point of data sets from one process.

    The parameters are the logarithms of its length scales, its size and its noise.
    """

    def __init__(self, features: int, points: int, batch: int, data_seed: int) -> None:
        rows = 128
        super().__init__(rows, batch)
        generator = torch.Generator().manual_seed(data_seed)
        truth = torch.cat([torch.linspace(-1.5, 1.5, features, dtype=torch.float64), torch.tensor([0.5, -2.0])])
        self.points = points
        self.inputs = _random(generator, 2 * rows, points, features)
        factor = torch.linalg.cholesky(self._covariance(truth, self.inputs))
        self.values = (factor @ _random(generator, 2 * rows, points, 1)).squeeze(-1)
        self.x = nn.Parameter(torch.zeros(features + 2, dtype=torch.float64))
        variance = self.values[:rows].square().mean()
        self.constant = float((variance.log() + 1 + math.log(2 * math.pi)) / 2)

    def _covariance(self, logs: Tensor, x: Tensor) -> Tensor:
        z = x * torch.exp(-logs[:-2])
        squares = (z[:, :, None] - z[:, None]).square().sum(-1)
        noise = torch.eye(self.points, dtype=torch.float64) * torch.exp(2 * logs[-1])
        return torch.exp(2 * logs[-2] - squares / 2) + noise

    def forward(self, rows: Tensor) -> Tensor:
        covariance = self._covariance(self.x, self.inputs[rows])
        jitter = 1e-8 * torch.eye(self.points, dtype=torch.float64)
        factor, failed = torch.linalg.cholesky_ex(covariance + jitter)
        white = torch.linalg.solve_triangular(factor, self.values[rows][..., None], upper=False)
        logdet = factor.diagonal(dim1=1, dim2=2).log().sum(1)
        loss = (white.square().sum((1, 2)) / 2 + logdet) / self.points + math.log(2 * math.pi) / 2
        return torch.where(failed.any(), torch.inf, loss.mean())

    def evaluate(self) -> Evaluation:
        with torch.no_grad():
            return Evaluation(float(self.full()), validation=float(self(self.everything + self.rows)))


def gaussian_process(seed: int, features: int, points: int, batch: int, data_seed: int) -> Objective:
    """See :class:`GaussianProcess`."""
    return GaussianProcess(features, points, batch, data_seed)
