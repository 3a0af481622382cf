"""What every source of independent gradients leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

from sgdol.torch._operators import Operators
from sgdol.torch._vectors import Layout, Numbers, Vector

__all__ = ["Gradients"]


class Gradients(NamedTuple):
    """The independent gradients of one step, in the metric of the step."""

    k: int
    """How many there were."""
    layout: Layout
    """The parameters that take part."""
    operators: Operators
    """D of the step."""
    g: Vector
    """Their mean; not to be written to."""
    n: Numbers
    """<g, D^-1 g>, over all ranks; where sums over all tensors are enough, a single Python number."""
    u: Numbers
    """The mean of <g_i, D^-1 g_j> over i != j, over all ranks."""
    squared: Any
    """The sum of n, over everything."""
    signal: Any
    """The sum of u."""
