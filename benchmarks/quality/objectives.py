r"""Objectives as modules: parameters, a stochastic loss, the full loss and what is known of the optimum.

An objective f(x) = E F(x, xi). ``draw`` makes the xi of a whole run from a seed, one row per step; ``part`` cuts a row
into independent parts whose mean is the whole (the microbatches of SGDOL); ``forward`` is F. So every method sees the
same xi at the same step, and a step can be evaluated again at another point on the same xi.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.data import Samples

__all__ = [
    "Adult",
    "Classifier",
    "Evaluation",
    "Finite",
    "LeastSquares",
    "Logistic",
    "MatrixFactorisation",
    "Objective",
    "Quadratic",
    "Rescaled",
    "Rosenbrock",
    "Supervised",
]


class Evaluation(NamedTuple):
    """How good a point is."""

    loss: float
    """f: on all training data."""
    accuracy: float | None = None
    """On the samples that were kept for it, for classifiers."""
    validation: float | None = None
    """The loss on the samples that were kept for it, where nothing is classified."""


class Objective(nn.Module):
    """What a problem needs to know of its function."""

    optimum: float = 0.0
    """f* where it is known, 0 for networks: the gap of a network is its training loss."""
    constant: float | None = None
    """The loss of the best constant predictor: who is not below it has learned nothing. None: nothing is predicted."""

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        """The randomness of ``steps`` stochastic losses, along the first axis."""
        raise NotImplementedError

    def part(self, row: Tensor, part: int, parts: int) -> Tensor:
        """The randomness of one of ``parts`` (1 or 2) independent parts of a step."""
        raise NotImplementedError

    def full(self) -> Tensor:
        """F: on everything, differentiable."""
        raise NotImplementedError

    def evaluate(self) -> Evaluation:
        """The value at the present parameters."""
        with torch.no_grad():
            return Evaluation(float(self.full()))


# Additive noise on the gradient ---------------------------------------------------------------------------------------


class _Noisy(Objective):
    r"""F(x, xi) = f(x) + <xi, x>: the gradient of f and white noise of standard deviation sigma per coordinate."""

    def __init__(self, start: Tensor, sigma: float) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())
        self.sigma = sigma

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        noise = torch.randn(steps, 2, len(self.x), generator=generator, dtype=self.x.dtype)
        return noise.mul_(self.sigma * math.sqrt(2))  # of a half; the mean of two halves has sigma

    def part(self, row: Tensor, part: int, parts: int) -> Tensor:
        return row.mean(0) if parts == 1 else row[part]

    def forward(self, noise: Tensor) -> Tensor:
        return self.full() + noise.dot(self.x)


class Rosenbrock(_Noisy):
    r"""sum_i (1 - x_i)^2 + 100 (x_{i+1} - x_i^2)^2, from the origin; f* = 0 at (1, ..., 1)."""

    def __init__(self, dimension: int, sigma: float) -> None:
        super().__init__(torch.zeros(dimension, dtype=torch.float64), sigma)

    def full(self) -> Tensor:
        low, high = self.x[:-1], self.x[1:]
        valley, left = high - low * low, 1 - low
        return left.dot(left) + 100 * valley.dot(valley)


def _spectrum(dimension: int, condition: float) -> Tensor:
    """Eigenvalues from 1/condition to 1, evenly spaced in the logarithm."""
    return torch.logspace(-math.log10(condition), 0, dimension, dtype=torch.float64)


def _rotation(dimension: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(dimension, dimension, generator=generator, dtype=torch.float64))[0]


class Quadratic(_Noisy):
    r"""(x - x*)^T H (x - x*) / 2 in a rotated basis, from the origin, with ||x*|| = sqrt(d); f* = 0."""

    def __init__(self, dimension: int, condition: float, sigma: float, data_seed: int) -> None:
        super().__init__(torch.zeros(dimension, dtype=torch.float64), sigma)
        generator = torch.Generator().manual_seed(data_seed)
        basis = _rotation(dimension, generator)
        self.matrix = basis * _spectrum(dimension, condition) @ basis.T
        self.solution = torch.randn(dimension, generator=generator, dtype=torch.float64)

    def full(self) -> Tensor:
        e = self.x - self.solution
        return e.dot(self.matrix @ e) / 2


# Minibatches of data --------------------------------------------------------------------------------------------------


class Finite(Objective):
    """f(x) = mean of f_i(x) over the rows of a data set; xi is the numbers of a minibatch, without replacement."""

    def __init__(self, rows: int, batch: int) -> None:
        super().__init__()
        if batch % 2 or batch > rows:
            raise ValueError(f"batch must be even, to be split in two, and at most {rows}, got {batch}")
        self.rows, self.batch = rows, batch
        self.everything = torch.arange(rows)

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        per_epoch = self.rows // self.batch
        epochs = [
            torch.randperm(self.rows, generator=generator)[: per_epoch * self.batch].view(per_epoch, self.batch)
            for _ in range(-(-steps // per_epoch))
        ]
        return torch.cat(epochs)[:steps]

    def part(self, row: Tensor, part: int, parts: int) -> Tensor:
        return row if parts == 1 else row.reshape(parts, -1, *row.shape[1:])[part]

    def full(self) -> Tensor:
        return self(self.everything)


class LeastSquares(Finite):
    r"""mean_i (a_i . (x - x*))^2 / 2: multiplicative noise, which vanishes at x*; f* = 0.

    The a_i are Gaussian with covariance diag(1/condition, ..., 1), or that in a rotated basis.
    """

    def __init__(self, dimension: int, condition: float, batch: int, rotated: bool, data_seed: int) -> None:
        rows = 2048
        super().__init__(rows, batch)
        generator = torch.Generator().manual_seed(data_seed)
        features = torch.randn(rows, dimension, generator=generator, dtype=torch.float64)
        features = features * _spectrum(dimension, condition).sqrt()
        if rotated:
            features = features @ _rotation(dimension, generator).T
        self.features = features
        solution = torch.randn(dimension, generator=generator, dtype=torch.float64)
        self.targets = features @ solution
        self.x = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        residual = self.features[rows] @ self.x - self.targets[rows]
        return residual.dot(residual) / (2 * len(rows))


class MatrixFactorisation(Finite):
    r"""mean over the entries of (A - U V^T)^2 / 2, from small random factors.

    A has ``rank`` planted singular directions, whose sizes fall from 1 to ``smallest``, and noise, so that no factors
    fit it: f* is the tail of A's singular values (Eckart and Young). xi is the numbers of a minibatch of entries.
    """

    def __init__(self, shape: tuple[int, int], rank: int, smallest: float, noise: float, batch: int, seed: int) -> None:
        n, m = shape
        super().__init__(n * m, batch)
        generator = torch.Generator().manual_seed(n * m + rank)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        sizes = torch.linspace(1.0, smallest, rank, dtype=torch.float64)
        matrix = (randn(n, rank) * sizes) @ randn(m, rank).T + noise * randn(n, m)
        self.optimum = float((torch.linalg.svdvals(matrix)[rank:] ** 2).sum() / (2 * n * m))
        self.entries = matrix.flatten()
        self.constant = float(self.entries.var(correction=0) / 2)
        self.columns = m
        generator = torch.Generator().manual_seed(seed)
        self.u = nn.Parameter(0.3 * randn(n, rank))
        self.v = nn.Parameter(0.3 * randn(m, rank))

    def forward(self, rows: Tensor) -> Tensor:
        residual = (self.u[rows // self.columns] * self.v[rows % self.columns]).sum(1) - self.entries[rows]
        return residual.dot(residual) / (2 * len(rows))

    def full(self) -> Tensor:
        residual = (self.u @ self.v.T).flatten() - self.entries
        return residual.dot(residual) / (2 * len(residual))


class _Linear(Finite):
    """A linear classifier of two classes, from zero."""

    def __init__(self, samples: Samples, batch: int) -> None:
        super().__init__(len(samples.targets), batch)
        self.samples = samples
        self.constant = float(self._of_constants(torch.linspace(-8, 8, 1601, dtype=samples.targets.dtype)).min())
        self.x = nn.Parameter(torch.zeros(samples.inputs.shape[1], dtype=samples.inputs.dtype))

    def _of_constants(self, values: Tensor) -> Tensor:
        """The loss of every one of ``values`` as the prediction for all samples."""
        raise NotImplementedError

    def evaluate(self) -> Evaluation:
        with torch.no_grad():
            right = (self.samples.test_inputs @ self.x) * self.samples.test_targets > 0
            return Evaluation(float(self.full()), float(right.double().mean()))


class Adult(_Linear):
    r"""The paper's loss phi(a . x - y), phi(r) = r^2 / (1 + r^2): not convex."""

    def _of_constants(self, values: Tensor) -> Tensor:
        share = (self.samples.targets > 0).double().mean()
        return share * (1 - 1 / (1 + (values - 1) ** 2)) + (1 - share) * (1 - 1 / (1 + (values + 1) ** 2))

    def forward(self, rows: Tensor) -> Tensor:
        residual = self.samples.inputs[rows] @ self.x - self.samples.targets[rows]
        return 1 - (1 / (1 + residual * residual)).mean()


class Logistic(_Linear):
    r"""Logistic regression, log(1 + exp(-y a . x)) + ridge ||x||^2 / 2."""

    def __init__(self, samples: Samples, batch: int, ridge: float) -> None:
        super().__init__(samples, batch)
        self.ridge = ridge

    def _of_constants(self, values: Tensor) -> Tensor:
        share = (self.samples.targets > 0).double().mean()
        return share * F.softplus(-values) + (1 - share) * F.softplus(values)

    def forward(self, rows: Tensor) -> Tensor:
        margin = (self.samples.inputs[rows] @ self.x) * self.samples.targets[rows]
        return F.softplus(-margin).mean() + self.ridge / 2 * self.x.dot(self.x)


class Classifier(Finite):
    """Cross-entropy of a network, or with ``ridge`` of softmax regression; tokens are classified one by one."""

    def __init__(self, network: nn.Module, samples: Samples, batch: int, ridge: float = 0.0) -> None:
        super().__init__(len(samples.targets), batch)
        self.network, self.samples, self.ridge = network, samples, ridge
        share = samples.targets.flatten().bincount() / samples.targets.numel()
        self.constant = float(torch.special.entr(share).sum())
        self.norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def logits(self, inputs: Tensor) -> Tensor:
        """Of the classes."""
        return self.network(inputs)

    def forward(self, rows: Tensor) -> Tensor:
        logits = self.logits(self.samples.inputs[rows])
        loss = F.cross_entropy(logits.flatten(0, -2), self.samples.targets[rows].flatten())
        if self.ridge:
            loss = loss + self.ridge / 2 * sum(p.square().sum() for p in self.network.parameters())
        return loss

    def evaluate(self) -> Evaluation:
        """In eval mode; BatchNorm's statistics are estimated anew at these weights, in the same way for all methods."""
        with torch.no_grad():
            if self.norms:
                self._estimate_statistics()
            self.eval()
            loss = float(self.full())
            right = self.logits(self.samples.test_inputs).argmax(-1) == self.samples.test_targets
            self.train()
            return Evaluation(loss, float(right.double().mean()))

    def _estimate_statistics(self) -> None:
        momenta = [m.momentum for m in self.norms]
        for m in self.norms:
            m.reset_running_stats()
            m.momentum = None  # the plain mean over the batches
        for rows in self.everything.split(256):
            self.network(self.samples.inputs[rows])
        for m, momentum in zip(self.norms, momenta, strict=True):
            m.momentum = momentum


class Supervised(Finite):
    """The mean of a criterion over samples, of a network's outputs and their targets."""

    def __init__(
        self,
        network: nn.Module,
        samples: Samples,
        batch: int,
        criterion: Callable[[Tensor, Tensor], Tensor],
        constant: float | None = None,
    ) -> None:
        super().__init__(len(samples.targets), batch)
        self.network, self.samples, self.criterion, self.constant = network, samples, criterion, constant

    def forward(self, rows: Tensor) -> Tensor:
        return self.criterion(self.network(self.samples.inputs[rows]), self.samples.targets[rows])

    def evaluate(self) -> Evaluation:
        with torch.no_grad():
            kept = self.criterion(self.network(self.samples.test_inputs), self.samples.test_targets)
            return Evaluation(float(self.full()), validation=float(kept))


# Rescaling ------------------------------------------------------------------------------------------------------------


class Rescaled(Objective):
    """The same function in other units: parameters z = c x, and the loss times another c.

    Evaluations are in the old units.
    """

    def __init__(self, objective: Objective, loss: float = 1.0, parameters: float = 1.0) -> None:
        super().__init__()
        self.loss_factor, self.factor = loss, parameters
        self.optimum, self.constant = objective.optimum, objective.constant
        self._inner = [objective]  # in a list: its parameters are then no parameters of this module
        self.names = [name for name, _ in objective.named_parameters()]
        if parameters == 1:
            self.z = nn.ParameterList(objective.parameters())
        else:
            self.z = nn.ParameterList([nn.Parameter(p.detach() * parameters) for p in objective.parameters()])

    @property
    def inner(self) -> Objective:
        """The function in the old units."""
        return self._inner[0]

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        return self.inner.draw(generator, steps)

    def part(self, row: Tensor, part: int, parts: int) -> Tensor:
        return self.inner.part(row, part, parts)

    def _values(self) -> dict[str, Tensor]:
        return {name: z / self.factor for name, z in zip(self.names, self.z, strict=True)}

    def forward(self, sample: Tensor) -> Tensor:
        if self.factor == 1:
            return self.loss_factor * self.inner(sample)
        return self.loss_factor * torch.func.functional_call(self.inner, self._values(), (sample,))

    def full(self) -> Tensor:
        if self.factor == 1:
            return self.loss_factor * self.inner.full()
        values = {f"of.{name}": value for name, value in self._values().items()}
        return self.loss_factor * torch.func.functional_call(_Full(self.inner), values)

    def train(self, mode: bool = True) -> Rescaled:
        self.inner.train(mode)
        return super().train(mode)

    def evaluate(self) -> Evaluation:
        if self.factor != 1:
            with torch.no_grad():
                for p, z in zip(self.inner.parameters(), self.z, strict=True):
                    p.copy_(z / self.factor)
        return self.inner.evaluate()


class _Full(nn.Module):
    """The full loss as a module's forward, for functional_call."""

    def __init__(self, of: Objective) -> None:
        super().__init__()
        self.of = of

    def forward(self) -> Tensor:
        return self.of.full()
