"""What every source of independent gradients leaves, and what a source is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from sgdol.torch._geometry import Geometry

__all__ = ["Gradients", "GroupWishes", "Signal", "Source", "Wish", "Wishes", "settled"]


class Wish(NamedTuple):
    """What is to be made of a parameter's gradients."""

    paper: bool
    """Whether the estimator is the paper's, which needs the first two gradients themselves."""
    coordinates: bool
    """Whether u is wanted per coordinate as well."""


Wishes = Callable[[Tensor], Wish]


class GroupWishes:
    """What is to be made of each parameter's gradients: its group's estimator and granularity say it.

    Args:
        group_of: the parameter group of each parameter.
    """

    def __init__(self, group_of: dict[Tensor, dict[str, Any]]) -> None:
        self._group_of = group_of

    def __call__(self, p: Tensor) -> Wish:
        """Of this parameter."""
        group = self._group_of[p]
        return Wish(group["estimator"] == "paper", group["granularity"] == "coordinate")


class Signal(NamedTuple):
    r"""U of each coordinate of one tensor, as :math:`u = a n + b \cdot \text{base}` with its n.

    Accumulated gradients leave Q in the base (:func:`sgdol.surrogate.symmetric_signal`: a = k/(k-1) = -b); where the
    signal itself has been measured, a = 0 and b = 1. It is put together where it is used, in few passes over memory.
    """

    base: Tensor
    """Real, float32 or wider; may be written to."""
    a: float
    b: float


class Gradients(NamedTuple):
    """The independent gradients of one step, as far as anybody has to know them.

    The mean gradient of parameter i is ``scale * vectors[i]``: real tensors, this rank's pieces.
    """

    k: int
    """How many there were."""
    params: list[Tensor]
    """The parameters that take part, in the order of the groups."""
    vectors: list[Tensor]
    """Not to be written to."""
    scale: float
    n: Tensor
    """<gbar, D^-1 gbar> of each parameter, over all ranks."""
    u: Tensor
    """The mean of <g_i, D^-1 g_j> over i != j, of each parameter, over all ranks."""
    signals: dict[int, Signal]
    """U of each coordinate of the parameters, by place, for which it was asked."""


class Source(Protocol):
    """Where independent gradients come from. A new one is a class like this, in the optimizer's list of sources."""

    def take(self, params: list[Tensor]) -> Gradients | None:
        """The gradients of these parameters in this step, or None if this source has not enough of them (yet)."""


def settled(gradients: Gradients, geometry: Geometry) -> Gradients:
    """The gradients in the metric of this step, which is known of all of them only now."""
    divisors = geometry.diagonals.begin(gradients.params, gradients.n)
    if divisors is None:
        return gradients
    for i, signal in gradients.signals.items():
        signal.base.div_(divisors[i].to(signal.base))
    return gradients._replace(n=gradients.n / divisors, u=gradients.u / divisors)
