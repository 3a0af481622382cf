"""Diagonal metrics, made of the squares of past gradients (:mod:`sgdol.metrics`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from sgdol._numbers import namespace, ratio, sqrt, where

__all__ = ["RMS", "AdaGrad", "Diagonal", "Means", "Squares"]

Array = Any


class Means(NamedTuple):
    """What D of a tensor may need besides the tensor's own history."""

    tensor: Array
    """The mean of the squares (:meth:`Metric.mean_square`) over the tensor."""
    overall: Array
    """The same over all coordinates of all tensors."""


class Squares(NamedTuple):
    """What a diagonal metric remembers of one tensor."""

    square: Array
    """v, the weighted sum of the squared gradients."""
    weight: Array
    """w, the sum of the weights; 0 while no gradient has been seen."""


@dataclass(frozen=True)
class Diagonal:
    """D is a diagonal matrix.

    Args:
        values: of its diagonal, positive, in the tensor's shape.
    """

    values: Array

    def sharp(self, gradient: Array) -> Array:
        """Each coordinate divided by its value."""
        return gradient / self.values

    def flat(self, vector: Array) -> Array:
        """Each coordinate times its value."""
        return vector * self.values


@dataclass(frozen=True)
class RMS:
    r"""The root mean square of each coordinate's past gradients, as in RMSProp and Adam, normalised.

    With weighted sums :math:`v \leftarrow b v + \bar g^2`, :math:`w \leftarrow b w + 1` after every update,

    .. math:: V = \frac{v + k_0\,\mathrm{mean}_{\text{tensor}}(v)/w}{w + k_0}, \qquad
        D = \sqrt{\frac{V/\bar V + k_1}{1 + k_1}}, \qquad \bar V = \mathrm{mean}_{\text{all}}(v)/w,

    so that the mean of :math:`D^2` over all coordinates is 1 and M, or lr = 1/M, keeps Euclid's unit. The first
    pseudo-count :math:`k_0` of the tensor's mean keeps coordinates that were never seen in bounds, the second
    :math:`k_1` of the mean over all coordinates does so for tensors that have had no gradient at all so far (a factor
    that starts at zero). At the first update there is no past: D is then made of the tensors' means of the present
    squares, a constant in each tensor. Memory: one vector.

    Args:
        decay: b in (0, 1]: how much of a square is left after one more update; 1 forgets nothing (:class:`AdaGrad`).
        tensor: k_0, positive: the pseudo-count of the tensor's mean.
        overall: k_1, at least 0: the pseudo-count of the mean over all coordinates.
    """

    decay: float = 0.99
    tensor: float = 0.01
    overall: float = 1e-4

    diagonal: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay!r}")
        if not 0 < self.tensor < float("inf"):
            raise ValueError(f"tensor must be positive and finite, got {self.tensor!r}")
        if not 0 <= self.overall < float("inf"):
            raise ValueError(f"overall must be finite and at least 0, got {self.overall!r}")

    @property
    def floor(self) -> float:
        """The least that D can be: see :func:`sgdol.theory.in_metric`."""
        return (self.overall / (1 + self.overall)) ** 0.5

    def initial(self, zero: Array) -> Squares:
        """No gradient yet."""
        return Squares(zero, 0.0)

    def mean_square(self, state: Squares, gradient: Array) -> Array:
        """mean(v)/w, or the mean of the present squares if there is no past."""
        xp = namespace(state.square)
        past, present = xp.mean(state.square), xp.mean(gradient * gradient)
        return where(state.weight > 0, ratio(past, state.weight, 1.0), present)

    def coefficients(self, weight: Array, overall: Array) -> tuple[Array, Array, Array]:
        """(a, b, c) of D^2 = a v + b mean + c, where mean is the tensor's. Where all is 0 so far, D is 1."""
        a = 1 / ((weight + self.tensor) * (1 + self.overall) * where(overall > 0, overall, 1.0))
        least = 0.0 * overall + self.overall / (1 + self.overall)  # of the type that the means have
        return a, self.tensor * a, where(overall > 0, least, 1.0)

    def operator(self, state: Squares, means: Means) -> Diagonal:
        """The diagonal D."""
        a, b, c = self.coefficients(state.weight, means.overall)
        return Diagonal(sqrt(a * state.square + (b * means.tensor + c)))

    def past_square(self, state: Squares, operator: Diagonal) -> Array:
        """The mean of the past <g, D^-1 g>, had D always been what it is now; 0 if there is no past."""
        return ratio(namespace(state.square).sum(operator.sharp(state.square)), state.weight, 0.0)

    def observe(self, state: Squares, gradient: Array) -> Squares:
        """Add the square of the gradient."""
        return Squares(self.decay * state.square + gradient * gradient, self.decay * state.weight + 1)


@dataclass(frozen=True)
class AdaGrad(RMS):
    """As :class:`RMS`, with all past gradients weighted equally, as in AdaGrad. The step size is left to the learner.

    >>> AdaGrad().decay
    1.0
    """

    decay: float = 1.0


for public in (AdaGrad, Diagonal, Means, RMS, Squares):
    public.__module__ = "sgdol.metrics"  # where users find them, and where objects that were saved say they are from
