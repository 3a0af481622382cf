r"""The norm in which lengths are taken: Euclid's, or one that is made of past gradients.

With :math:`D_t` a positive definite operator that is known before step t, lengths of points are taken in D and lengths
of gradients in :math:`D^{-1}`. The surrogate's numbers and the direction become

.. math:: n = \langle \bar g, D^{-1} \bar g\rangle, \qquad u = \text{mean of } \langle g_i, D^{-1} g_j\rangle, i \ne j,
    \qquad d = D^{-1} \bar g,

and where :math:`f(x + s) \le f(x) + \langle\nabla f(x), s\rangle + \frac M2 \|s\|_{D_t}^2`, everything that is
proved for Euclid's norm holds word for word in the dual norm (:mod:`sgdol.theory`): :math:`E_t \langle\nabla f,
D_t^{-1}\bar g\rangle = \|\nabla f\|^2_{D_t^{-1}} = E_t u` because :math:`D_t` is fixed given the past.

A metric is a small immutable object. What it remembers of one tensor is a named tuple of arrays, of any shapes. Its
:meth:`~Metric.operator` makes D of the coming step of that; nobody outside needs to know what D looks like. D may need
two means that run over more than its own tensor (:class:`Means`): front ends take them, over whatever ranks or devices
the parameters are spread. A new metric is one class here and its formula in :mod:`sgdol.reference`.

>>> import numpy as np
>>> metric, g = RMS(), np.array([3.0, 4.0])
>>> state = metric.observe(metric.initial(np.zeros(2)), g)
>>> mean = metric.mean_square(state, g)
>>> metric.operator(state, Means(mean, mean)).sharp(g).round(2)  # D is (3, 4)/sqrt(12.5): nearly the sign of g
array([3.53, 3.54])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from sgdol._numbers import namespace, ratio, sqrt, where

__all__ = [
    "METRICS",
    "RMS",
    "AdaGrad",
    "Diagonal",
    "Euclidean",
    "Identity",
    "Means",
    "Metric",
    "Operator",
    "Squares",
    "get",
    "is_diagonal",
    "is_scale_free",
]

Array = Any
State = Any


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


class Operator(Protocol):
    """D of one tensor in one step."""

    def sharp(self, gradient: Array) -> Array:
        """From a gradient to a direction: D^-1 g."""
        ...

    def flat(self, vector: Array) -> Array:
        """From a direction to a gradient: D v."""
        ...


@runtime_checkable
class Metric(Protocol):
    """Makes D of one tensor, from the tensor's past gradients.

    A metric that sets ``diagonal = True`` promises that D is a diagonal matrix, which step sizes per coordinate and
    sharded tensors need. One that sets ``scale_free = True`` promises that D does not change if all gradients are
    multiplied by a number. One that has ``past_square(state, operator)``, the mean of the tensor's past <g, D^-1 g> in
    the D of the coming step, tells the optimizer without M how long gradients usually are.
    """

    def initial(self, zero: Array) -> State:
        """Before any gradient: a named tuple of arrays; ``zero`` has the tensor's shape, in float32 or wider."""
        ...

    def mean_square(self, state: State, gradient: Array) -> Array:
        """The mean of the squares that D is made of; of a tensor without a past, those of the present gradient."""
        ...

    def operator(self, state: State, means: Means) -> Operator:
        """D of the coming step."""
        ...

    def observe(self, state: State, gradient: Array) -> State:
        """The state after an update with this mean gradient."""
        ...


@dataclass(frozen=True)
class Identity:
    """D = 1."""

    def sharp(self, gradient: Array) -> Array:
        """The gradient itself."""
        return gradient

    def flat(self, vector: Array) -> Array:
        """The vector itself."""
        return vector


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
class Euclidean:
    """The paper's norm: D = 1, and nothing to remember.

    >>> Euclidean().operator((), Means(1.0, 1.0)).sharp(3.0)
    3.0
    """

    diagonal: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True

    def initial(self, zero: Array) -> tuple[()]:
        """Nothing."""
        return ()

    def mean_square(self, state: tuple[()], gradient: Array) -> Array:
        """Not used: D needs no means."""
        return 1.0

    def operator(self, state: tuple[()], means: Means) -> Identity:
        """The identity."""
        return Identity()

    def observe(self, state: tuple[()], gradient: Array) -> tuple[()]:
        """Nothing."""
        return ()


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

    def coefficients(self, weight: Array, means: Means) -> tuple[Array, Array]:
        """(a, c) of D^2 = a v + c; numbers, or one entry per tensor. Where all is 0 so far, D is 1."""
        overall = where(means.overall > 0, means.overall, 1.0)
        total = (weight + self.tensor) * (1 + self.overall)
        c = self.tensor * (means.tensor / overall) / total + self.overall / (1 + self.overall)
        return 1 / (total * overall), where(means.overall > 0, c, 1.0)

    def operator(self, state: Squares, means: Means) -> Diagonal:
        """The diagonal D."""
        a, c = self.coefficients(state.weight, means)
        return Diagonal(sqrt(a * state.square + c))

    def past_square(self, state: Squares, operator: Diagonal) -> Array:
        """The mean of the past <g, D^-1 g>, had D always been what it is now; 0 if there is no past."""
        return ratio(namespace(state.square).sum(operator.sharp(state.square)), state.weight, 0.0)

    def observe(self, state: Squares, gradient: Array) -> Squares:
        """Add the square of the gradient."""
        return Squares(self.decay * state.square + gradient * gradient, self.decay * state.weight + 1)


@dataclass(frozen=True)
class AdaGrad(RMS):
    """The same with every past gradient counting alike, as in AdaGrad; the step size that decays is the learner's part.

    >>> AdaGrad().decay
    1.0
    """

    decay: float = 1.0


def is_diagonal(metric: Metric) -> bool:
    """Whether the metric promises that D is a diagonal matrix (``diagonal = True``)."""
    return bool(getattr(metric, "diagonal", False))


def is_scale_free(metric: Metric) -> bool:
    """Whether it says that D stays the same if all gradients are multiplied by a number (``scale_free = True``).

    Squares leave the range of floats long before gradients do, so front ends measure such gradients in a unit of their
    own choice. A metric that says nothing is given the gradients as they are.
    """
    return bool(getattr(metric, "scale_free", False))


METRICS: dict[str, Metric] = {"euclidean": Euclidean(), "rms": RMS(), "adagrad": AdaGrad()}
"""The metrics that have a name."""


def get(metric: str | Metric) -> Metric:
    """The metric of this name, or the metric itself.

    >>> get("rms")
    RMS(decay=0.99, tensor=0.01, overall=0.0001)
    """
    if isinstance(metric, str):
        if metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(map(repr, METRICS))} or an object, got {metric!r}")
        return METRICS[metric]
    if isinstance(metric, type) or not isinstance(metric, Metric):
        raise TypeError(
            f"metric must be a name or an object with initial, mean_square, operator and observe, got {metric!r}"
        )
    return metric
