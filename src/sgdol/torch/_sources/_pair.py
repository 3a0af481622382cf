"""One backward per step: the gradient of one step is held, and makes a pair with that of the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgdol.torch._geometry import Geometry
from sgdol.torch._sources._gradients import Gradients, Signal, Wishes, settled
from sgdol.torch._tensors import real_view, scalar_dtype
from sgdol.torch._world import World, local, local_gradient, real_gradients

__all__ = ["HeldPair"]


class HeldPair:
    """Two gradients of two consecutive steps, which are there themselves: Algorithm 1's own protocol.

    Args:
        groups: the optimizer's parameter groups; ``"pending"`` in them says that a gradient is held.
        state: the optimizer's state, where held gradients are kept.
        geometry: how long gradients are.
        world: gives the world that the optimizer is in.
        wishes: what is to be made of each parameter's gradients.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state: dict[Any, Any],
        geometry: Geometry,
        world: Callable[[], World],
        wishes: Wishes,
    ) -> None:
        self._groups = groups
        self._state = state
        self._geometry = geometry
        self._world = world
        self._wishes = wishes
        self._spare: dict[Tensor, Tensor] = {}

    @property
    def pending(self) -> bool:
        """Whether a gradient is held."""
        return bool(self._groups) and self._groups[0].get("pending", False)

    def holds(self, param: Tensor) -> bool:
        """Whether a gradient of this parameter is held."""
        return "held_gradient" in self._state.get(param, ())

    def hold(self, params: list[Tensor]) -> None:
        """Keep a copy of the gradients until the next step."""
        for p in params:
            buffer = self._spare.pop(p, None)
            if buffer is None or buffer.shape != p.shape or buffer.dtype != p.dtype or buffer.device != p.device:
                buffer = torch.empty_like(p, memory_format=torch.preserve_format)
            local(buffer).copy_(local_gradient(p))
            self._state[p]["held_gradient"] = buffer
        self.set_pending(True)

    def set_pending(self, pending: bool) -> None:
        """Say whether a gradient is held."""
        for group in self._groups:
            group["pending"] = pending

    def take(self, params: list[Tensor]) -> Gradients | None:
        """The held gradients with those of this step; None if none are held."""
        if not self.pending:
            return None
        self._refuse_reshaped(params)
        first = [real_view(self._release(p)) for p in params]
        second = real_gradients(params)
        wishes = [self._wishes(p) for p in params]
        signals = {
            i: Signal(self._geometry.products(params[i], first[i], second[i]), 0.0, 1.0)
            for i, wish in enumerate(wishes)
            if wish.coordinates
        }
        like = torch.zeros((), device=params[0].device, dtype=scalar_dtype(params[0].device))
        u = self._geometry.inner(params, first, second, like)
        # The mean of both, or the first alone: one scale for all, so that where both occur the means are halved here.
        mixed = len({wish.paper for wish in wishes}) > 1
        scale = 1.0 if mixed or wishes[0].paper else 0.5
        for v, g, wish in zip(first, second, wishes, strict=True):
            if not wish.paper:
                v.add_(g)
                if mixed:
                    v.mul_(0.5)
        # As inner products, like u: for two equal gradients u = n to the last bit.
        n = self._geometry.inner(params, first, first, like) * scale**2
        n, u = self._world().total(params, torch.stack([n, u])).unbind()
        self.set_pending(False)
        return settled(Gradients(2, params, first, scale, n, u, signals), self._geometry)

    def _release(self, p: Tensor) -> Tensor:
        """The held gradient, as memory that may be written to; it is kept for the next one."""
        held = self._state[p].pop("held_gradient", None)
        if not self._state[p]:
            del self._state[p]
        self._spare[p] = torch.zeros_like(p) if held is None else held
        return local(self._spare[p])

    def _refuse_reshaped(self, params: list[Tensor]) -> None:
        for i, p in enumerate(params):
            held = self._state.get(p, {}).get("held_gradient")
            if held is not None and held.shape != p.shape:
                raise ValueError(
                    f"the two gradients of a pair must have the same shape: parameter {i} is {tuple(p.shape)} now, the "
                    f"gradient that is held {tuple(held.shape)}"
                )
