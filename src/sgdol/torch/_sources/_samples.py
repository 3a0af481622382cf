"""A few entries of every gradient, to notice what versions do not tell: that it was written to, and how.

GradScaler's kernel and ``p.grad.data`` write without raising a tensor's version. And what is known of contributions can
follow a gradient that was multiplied by a factor, but not one that noise was added to or whose entries were clamped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sgdol.torch._sources._slots import Slot, entries
from sgdol.torch._tensors import scalar_dtype

__all__ = ["Samples"]

BENT = 1e-3
"""By how much the squared cosine of a gradient with what it was may miss 1: rounding in bfloat16 makes 1e-5."""


class Samples:
    """Entries of the gradients as the last backward left them. Only the host looks: an accelerator is not waited for.

    The samples are views of gradients, whose memory they keep alive until :meth:`clear`.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all: the gradients have been used or thrown away."""
        self._slots: list[Slot] = []
        self._views: list[Tensor] = []
        self._kept = torch.zeros(0)

    def take(self, slots: Sequence[Slot]) -> None:
        """Remember the gradients of these as they are now."""
        self._slots = [slot for slot in slots if slot.readable]
        self._views = [entries(slot.param.grad) for slot in self._slots]  # type: ignore[arg-type]
        self._kept = torch.cat(self._views) if self._views else torch.zeros(0)

    def changed(self) -> bool:
        """Whether entries changed although no version says so, or whether it cannot be told."""
        if not self._views:
            return True
        return not torch.equal(torch.cat(self._views), self._kept) or not self._kept.any().tolist()

    def bent(self, slots: Collection[Slot]) -> bool:
        """Whether any of these gradients is no longer a multiple of what it was."""
        chosen = [i for i, slot in enumerate(self._slots) if slot in slots and slot.param.grad is not None]
        if not chosen:
            return False
        kept = self._kept.split([len(view) for view in self._views])
        now = [self._now(i) for i in chosen]
        if any(len(view) != len(kept[i]) for i, view in zip(chosen, now, strict=True)):
            return True
        rows = torch.cat([torch.full((len(kept[i]),), row) for row, i in enumerate(chosen)])
        wide = scalar_dtype(rows.device)
        a, b = torch.cat([kept[i] for i in chosen]).to(wide), torch.cat(now).to(wide)
        sums = torch.zeros(3, len(chosen), dtype=wide).index_add_(1, rows, torch.stack([a * b, a * a, b * b]))
        cross, before, after = sums.unbind()
        return bool((cross.square() < (1 - BENT) * before * after).any().tolist())

    def _now(self, i: int) -> Tensor:
        slot = self._slots[i]
        grad = slot.param.grad
        assert grad is not None
        return self._views[i] if slot.seen is not None and slot.seen() is grad else entries(grad)
