r"""The norm in which steps and gradients are measured: Euclid's, or one made of past gradients.

:math:`D_t` is a positive definite operator that is known before step t. Steps are measured in D,
:math:`\|s\|^2 = \langle s, D s\rangle`, and gradients in :math:`D^{-1}`. The surrogate's numbers and the direction are

.. math:: n = \langle \bar g, D^{-1} \bar g\rangle, \qquad u = \text{mean of } \langle g_i, D^{-1} g_j\rangle, i \ne j,
    \qquad d = D^{-1} \bar g,

and if :math:`f(x + s) \le f(x) + \langle\nabla f(x), s\rangle + \frac M2 \|s\|_{D_t}^2`, every theorem for Euclid's
norm holds in this norm, too (:mod:`sgdol.theory`): :math:`E_t \langle\nabla f,
D_t^{-1}\bar g\rangle = \|\nabla f\|^2_{D_t^{-1}} = E_t u`, because :math:`D_t` is fixed given the past.

A metric is a small immutable object. Its state for one tensor is a named tuple of arrays of any shapes.
:meth:`~Metric.operator` returns D of the coming step, which is used by its two methods ``sharp`` and ``flat`` only. D
may need two means over more than its own tensor (:class:`Means`); front ends compute them, over all ranks or devices. A
new metric is one class and its formula as a reference (:mod:`sgdol.reference`).

>>> import numpy as np
>>> metric, g = RMS(), np.array([3.0, 4.0])
>>> state = metric.observe(metric.initial(np.zeros(2)), g)
>>> mean = metric.mean_square(state, g)
>>> metric.operator(state, Means(mean, mean)).sharp(g).round(2)  # D is (3, 4)/sqrt(12.5): nearly the sign of g
array([3.53, 3.54])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from sgdol._diagonal import RMS, AdaGrad, Diagonal, Means, Squares
from sgdol._kronecker import Factors, Kronecker, Rotated

__all__ = [
    "METRICS",
    "RMS",
    "AdaGrad",
    "Diagonal",
    "Euclidean",
    "Factors",
    "Identity",
    "Kronecker",
    "Means",
    "Metric",
    "Operator",
    "Rotated",
    "Squares",
    "get",
    "is_diagonal",
    "is_scale_free",
]

Array = Any
State = Any


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

    Optional attributes: ``diagonal = True`` if D is a diagonal matrix, which step sizes per coordinate and sharded
    tensors need. ``scale_free = True`` if D does not change when all gradients are multiplied by a number.
    ``past_square(state, operator)``, the mean of the tensor's past <g, D^-1 g> in the D of the coming step, from which
    SGDOLFree knows how long gradients usually are.
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


def is_diagonal(metric: Metric) -> bool:
    """Whether the metric promises that D is a diagonal matrix (``diagonal = True``)."""
    return bool(getattr(metric, "diagonal", False))


def is_scale_free(metric: Metric) -> bool:
    """Whether D stays the same if all gradients are multiplied by a number (``scale_free = True``).

    Squares of very large or very small gradients leave the range of floats, so front ends divide such gradients by a
    power of two if the metric is scale-free. Other metrics get the gradients as they are.
    """
    return bool(getattr(metric, "scale_free", False))


METRICS: dict[str, Metric] = {"euclidean": Euclidean(), "rms": RMS(), "adagrad": AdaGrad(), "kronecker": Kronecker()}
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
