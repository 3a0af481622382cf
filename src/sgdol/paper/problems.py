r"""The two problems of the paper: Rosenbrock with Gaussian noise, and a non-linear classifier on the adult data.

A problem knows its objective and gradient at many points at once (an array of shape (points, dimension)), and how a
stochastic gradient is made: :meth:`~Problem.draw` draws all the randomness of many steps in one go, and
:meth:`~Problem.stochastic_gradient` is then a deterministic function of the point and of one drawn sample. Large arrays
are in :attr:`~Problem.data` and are passed as arguments, so that compiled programs do not carry them as constants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

__all__ = ["NOISE_MODELS", "AdultClassifier", "Noise", "NoiseModel", "Problem", "Rosenbrock", "phi"]

NoiseModel = Literal["coordinate", "total"]
NOISE_MODELS: tuple[str, ...] = get_args(NoiseModel)


class Noise(NamedTuple):
    """One setting of the noise; its name is what the paper's panels are called."""

    name: str
    deterministic: bool = False
    """Whether the stochastic gradient is the gradient."""
    sigma: float = 0.0
    """The standard deviation of each coordinate of additive noise."""
    batch: int = 0
    """How many samples a minibatch has; 0 for no minibatches."""


class Problem(ABC):
    """What the runner needs to know of a problem. Problems are compared by identity."""

    name: ClassVar[str]
    cheap: ClassVar[bool]
    """Whether evaluating the true gradient at every iteration is cheap."""
    chunk: ClassVar[int]
    """How many full gradients one call of the noiseless program takes."""
    ceiling: ClassVar[float] = float("inf")
    """A run that ends with an objective above this has run away, however small its gradient is there."""

    @property
    @abstractmethod
    def x1(self) -> NDArray[np.float64]:
        """The first point."""

    @property
    @abstractmethod
    def noises(self) -> tuple[Noise, ...]:
        """The settings of the noise, in the order of the paper's panels."""

    @property
    def data(self) -> Any:
        """The arrays that the objective needs."""
        return ()

    @abstractmethod
    def objective_and_gradient(self, data: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        """The objective and its gradient at each row of ``x``."""

    @abstractmethod
    def draw(self, stream: np.random.Generator, steps: int, noise: Noise) -> NDArray[Any]:
        """The randomness of ``steps`` stochastic gradients, along the first axis."""

    @abstractmethod
    def stochastic_gradient(self, data: Any, x: jax.Array, sample: jax.Array) -> jax.Array:
        """A stochastic gradient at each row of ``x``, from the sample of the same number."""

    @abstractmethod
    def total_variance(self, noise: Noise) -> float:
        """The variance E ||g - grad f||^2 of a stochastic gradient at the first point."""


@dataclass(frozen=True, eq=False)
class Rosenbrock(Problem):
    r"""The two-dimensional Rosenbrock function with additive white Gaussian noise on its gradient.

    .. math:: f(x, y) = (1 - x)^2 + 100 (y - x^2)^2, \qquad f^\star = f(1, 1) = 0

    Args:
        noise_model: ``"coordinate"``: N(0, sigma^2) on each coordinate; ``"total"``: E ||noise||^2 = sigma^2.
        sigmas: the noise levels.

    >>> f, g = Rosenbrock().objective_and_gradient((), jnp.array([[0.0, 0.0], [2.0, 4.0]]))
    >>> f.tolist(), g.tolist()
    ([1.0, 1.0], [[-2.0, 0.0], [2.0, 0.0]])
    """

    noise_model: NoiseModel = "coordinate"
    sigmas: tuple[float, ...] = (0.0, 0.2, 5.0)
    name: ClassVar[str] = "rosenbrock"
    cheap: ClassVar[bool] = True
    chunk: ClassVar[int] = 1000
    optimum: ClassVar[float] = 0.0
    """f*."""

    def __post_init__(self) -> None:
        if self.noise_model not in NOISE_MODELS:
            raise ValueError(f"noise_model must be one of {NOISE_MODELS}, got {self.noise_model!r}")
        for sigma in self.sigmas:
            if not 0 <= sigma < float("inf"):
                raise ValueError(f"every sigma must be finite and at least 0, got {sigma!r}")

    @property
    def x1(self) -> NDArray[np.float64]:
        """The origin."""
        return np.zeros(2)

    @property
    def noises(self) -> tuple[Noise, ...]:
        """One per sigma."""
        share = 1.0 if self.noise_model == "coordinate" else 2.0**-0.5
        return tuple(Noise(f"sigma={s:g}", deterministic=s == 0, sigma=s * share) for s in self.sigmas)

    def objective_and_gradient(self, data: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        """The objective and its gradient at each row of ``x``."""
        a, b = x[..., 0], x[..., 1]
        valley = b - a * a
        gradient = jnp.stack([-2 * (1 - a) - 400 * a * valley, 200 * valley], axis=-1)
        return (1 - a) ** 2 + 100 * valley**2, gradient

    def draw(self, stream: np.random.Generator, steps: int, noise: Noise) -> NDArray[Any]:
        """White noise."""
        return noise.sigma * stream.standard_normal((steps, 2))

    def stochastic_gradient(self, data: Any, x: jax.Array, sample: jax.Array) -> jax.Array:
        """The gradient with noise added."""
        return self.objective_and_gradient(data, x)[1] + sample

    def total_variance(self, noise: Noise) -> float:
        """E ||noise||^2, the same at every point."""
        return 2 * noise.sigma**2


def phi(residual: Any) -> Any:
    r"""The loss :math:`\phi(\theta) = \theta^2 / (1 + \theta^2)`: not convex, 2-smooth, 0.65-Lipschitz.

    >>> phi(1.0)
    0.5
    """
    return residual * residual / (1 + residual * residual)


def _phi_derivative(residual: jax.Array) -> jax.Array:
    inverse = 1 / (1 + residual * residual)
    return 2 * residual * inverse * inverse


class AdultData(NamedTuple):
    """The samples, in the two forms that the two kinds of gradient need."""

    features: Any
    """Distinct samples, dense: (distinct, dimension)."""
    labels: Any
    weights: Any
    """The share of each distinct sample in the data; they add up to 1."""
    indices: Any
    """Of every sample, the features that are not zero; padded by the number of features: (samples, most)."""
    values: Any
    """Their values; None if all of them are 1."""
    sample_labels: Any


@dataclass(frozen=True, eq=False)
class AdultClassifier(Problem):
    r"""The non-linear classification model of section 7, with minibatches drawn i.i.d. with replacement.

    .. math:: f(x) = \frac1m \sum_{i=1}^m \phi(a_i^\top x - y_i), \qquad \phi(\theta) = \frac{\theta^2}{1 + \theta^2}

    Equal samples are merged for full gradients (13,278 of 15,682 are distinct), and minibatch gradients use that a
    sample has no more than 15 features that are not zero.

    Args:
        features: one row per sample, a constant feature included.
        labels: -1 or +1.
        batches: the minibatch sizes; 0 for all samples.

    >>> problem = AdultClassifier(np.eye(2), np.array([1.0, -1.0]))
    >>> f, g = problem.objective_and_gradient(problem.data, jnp.zeros((1, 2)))
    >>> f.tolist(), g.tolist()
    ([0.5], [[-0.25, 0.25]])
    """

    features: NDArray[np.float64]
    labels: NDArray[np.float64]
    batches: tuple[int, ...] = (0, 50, 1)
    name: ClassVar[str] = "adult"
    cheap: ClassVar[bool] = False
    chunk: ClassVar[int] = 100
    ceiling: ClassVar[float] = 0.95  # phi is below 1 and comes near it only far away, where it is flat
    _data: AdultData = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or self.labels.shape != self.features.shape[:1] or not self.features.size:
            raise ValueError(
                f"features must be a table with a label for each row, got the shapes {self.features.shape} and "
                f"{self.labels.shape}"
            )
        object.__setattr__(self, "_data", _prepare(self.features, self.labels))

    @property
    def data(self) -> AdultData:
        """The samples."""
        return self._data

    @property
    def x1(self) -> NDArray[np.float64]:
        """All zeros."""
        return np.zeros(self.features.shape[1])

    @property
    def noises(self) -> tuple[Noise, ...]:
        """One per minibatch size."""
        return tuple(Noise(f"batch={b or 'all'}", deterministic=b == 0, batch=b) for b in self.batches)

    def objective_and_gradient(self, data: AdultData, x: Any) -> tuple[jax.Array, jax.Array]:
        """The objective and its gradient at each row of ``x``: two products of matrices."""
        residual = data.features @ x.T - data.labels[:, None]
        inverse = 1 / (1 + residual * residual)  # phi is 1 - inverse: one division does for both
        slope = (2 * data.weights[:, None]) * residual * inverse * inverse
        return 1 - data.weights @ inverse, (data.features.T @ slope).T

    def draw(self, stream: np.random.Generator, steps: int, noise: Noise) -> NDArray[Any]:
        """The numbers of the samples in each minibatch."""
        return stream.integers(0, len(self.labels), (steps, noise.batch), dtype=np.int32)

    def stochastic_gradient(self, data: AdultData, x: jax.Array, sample: jax.Array) -> jax.Array:
        """The mean gradient of a minibatch, by gathering and scattering the few features that it has."""
        dimension = x.shape[1]
        most = data.indices.shape[1]

        def one(point: jax.Array, rows: jax.Array) -> jax.Array:
            where = data.indices[rows]
            terms = jnp.append(point, 0.0)[where]
            if data.values is not None:
                terms = terms * data.values[rows]
            slope = _phi_derivative(jnp.sum(terms, axis=-1) - data.sample_labels[rows]) / len(rows)
            parts = jnp.repeat(slope, most).reshape(len(rows), most)
            if data.values is not None:
                parts = parts * data.values[rows]
            return jnp.zeros(dimension + 1).at[where.reshape(-1)].add(parts.reshape(-1))[:dimension]

        return jax.vmap(one)(x, sample)

    def total_variance(self, noise: Noise) -> float:
        """E ||g - grad f||^2 of a minibatch gradient g at x_1; at other points it is another number."""
        if noise.deterministic:
            return 0.0
        residual = self.features @ self.x1 - self.labels
        slope = 2 * residual / (1 + residual**2) ** 2
        mean = self.features.T @ slope / len(slope)
        second_moment = np.mean(slope**2 * np.sum(self.features**2, axis=1))
        return float((second_moment - mean @ mean) / noise.batch)


def _prepare(features: NDArray[np.float64], labels: NDArray[np.float64]) -> AdultData:
    table = np.column_stack([features, labels])
    distinct, counts = np.unique(table, axis=0, return_counts=True)
    per_row = np.count_nonzero(features, axis=1)
    most = max(1, int(per_row.max()))
    rows, columns = np.nonzero(features)
    position = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    indices = np.full((len(labels), most), features.shape[1], dtype=np.int32)
    values = np.zeros((len(labels), most))
    indices[rows, position] = columns
    values[rows, position] = features[rows, columns]
    return AdultData(
        features=np.ascontiguousarray(distinct[:, :-1]),
        labels=np.ascontiguousarray(distinct[:, -1]),
        weights=counts / len(labels),
        indices=indices,
        values=None if np.all(features[rows, columns] == 1) else values,
        sample_labels=labels,
    )
