"""The independent gradients of a step, and their source in loops with one backward per step.

The source in loops with several backward passes per step is :mod:`sgdol.torch._passes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.torch._metric import Metrics
from sgdol.torch._operators import Operators
from sgdol.torch._vectors import Layout, Numbers, Vector
from sgdol.torch._world import World, local, piece_of, real_view

__all__ = ["Gradients", "HeldPair"]


class Gradients(NamedTuple):
    """The k independent gradients g_1, ..., g_k of one step, in the metric D of the step."""

    k: int
    layout: Layout  # the parameters that take part
    operators: Operators  # D
    g: Vector  # the mean of the gradients (with the paper's estimator g_1); not to be written to
    n: Numbers  # <g, D^-1 g>, over all ranks
    u: Numbers  # the mean of <g_i, D^-1 g_j> over i != j, over all ranks
    squared: Any  # the sum of n
    signal: Any  # the sum of u


class HeldPair:
    """Two gradients of two consecutive ``step()`` calls, as in Algorithm 1: the first is held, the second completes it.

    Args:
        groups: the optimizer's parameter groups; ``"pending"`` in them says that a gradient is held.
        state: the optimizer's state, where held gradients are kept.
        metrics: the metrics of the groups.
        world: gives the world that the optimizer is in.
    """

    def __init__(
        self, groups: list[dict[str, Any]], state: dict[Any, Any], metrics: Metrics, world: Callable[[], World]
    ) -> None:
        self._groups, self._state, self._metrics, self._world = groups, state, metrics, world
        self._spare: dict[Tensor, Tensor] = {}  # memory of the last held gradients, to be used again

    @property
    def pending(self) -> bool:
        return bool(self._groups) and self._groups[0].get("pending", False)

    @pending.setter
    def pending(self, pending: bool) -> None:
        for group in self._groups:
            group["pending"] = pending

    def holds(self, param: Tensor) -> bool:
        return "held_gradient" in self._state.get(param, ())

    def hold(self, params: list[Tensor]) -> None:
        for p in params:
            buffer = self._spare.pop(p, None)
            if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (p.shape, p.dtype, p.device):
                buffer = torch.empty_like(p, memory_format=torch.preserve_format)
            piece = real_view(local(buffer))
            piece.zero_() if p.grad is None else piece.copy_(piece_of(p.grad, p))
            self._state[p]["held_gradient"] = buffer
        self.pending = True

    def take(self, layout: Layout, *, pooled: bool = False) -> Gradients:
        """The pair of the held gradient and that of this step; ``pooled`` as in :meth:`Layout.products`."""
        for i, p in enumerate(layout.params):
            held = self._state.get(p, {}).get("held_gradient")
            if held is not None and held.shape != p.shape:
                raise ValueError(
                    f"the two gradients of a pair must have the same shape: parameter {i} is {tuple(p.shape)} now, the "
                    f"gradient that is held {tuple(held.shape)}"
                )
        first, second = layout.gather([self._release(p) for p in layout.params]), layout.gradients()
        for p in layout.params:
            if not self._state[p]:  # a state that is empty again is not saved
                del self._state[p]
        paper = [layout.groups[entry.group]["estimator"] == "paper" for entry in layout.entries]
        pairs = zip(first, second, paper, strict=True)
        g = [a if first_alone else torch.add(a, b).mul_(0.5) for a, b, first_alone in pairs]
        operators = self._metrics.operators(layout, g)
        # n is made like u, as a sum of products, so that u = n to the last bit if both gradients are equal.
        n, u = (layout.products(x, y, operators, pooled=pooled) for x, y in ((g, g), (first, second)))
        sums: Any = n[0], u[0]
        if not pooled:
            rows = self._world().total(layout.params, torch.stack([layout.totals(n), layout.totals(u)]))
            n, u = (layout.with_totals(x, row) for x, row in zip((n, u), rows, strict=True))
            sums = rows.sum(1)
        self.pending = False
        return Gradients(2, layout, operators, g, n, u, *sums)

    def _release(self, p: Tensor) -> Tensor | None:
        held = self._state[p].pop("held_gradient", None)
        if held is not None:
            self._spare[p] = held  # memory for the next held gradient
        return held
