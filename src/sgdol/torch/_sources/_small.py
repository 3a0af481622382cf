"""Gradients of few entries, measured all together: for them a call costs more than what it computes.

They are laid end to end in one vector. What a backward brings is kept until the next one, or the step; then it is
known what ``.grad`` would be if nobody had written to it, and every entry is compared with what it is. This is for one
process in Euclid's norm, on the host; everything else goes the long way of :class:`sgdol.torch._sources.Recorder`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgdol.torch._packs import LARGEST
from sgdol.torch._sources._samples import BENT
from sgdol.torch._sources._slots import Slot

__all__ = ["Small"]

Numbers = NDArray[Any]


class Small:
    """What is known of the small ones of some slots between two steps."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self.places: list[int] = []
        """Where they are among all slots."""
        self.bent = False
        """Whether any was changed by more than a factor."""
        self.reset()

    def choose(self, slots: list[Slot]) -> None:
        """Take those that are small, and of one type."""
        chosen = [(i, slot) for i, slot in enumerate(slots) if _is_small(slot)]
        dtype = chosen[0][1].param.dtype if chosen else None
        chosen = [(i, slot) for i, slot in chosen if slot.param.dtype == dtype]
        self.places, self._slots = [i for i, _ in chosen], [slot for _, slot in chosen]
        for slot in slots:
            slot.together = False
        for slot in self._slots:
            slot.together = True
        self._sizes = [slot.param.numel() for slot in self._slots]
        self._total = sum(self._sizes)
        self._offsets = np.cumsum([0, *self._sizes, *self._sizes])[:-1]
        self.reset()

    def reset(self) -> None:
        """Forget all gradients."""
        self._base: Numbers | None = None
        self._q: Numbers | None = None
        self._held: dict[int, Tensor | None] = {}
        self._new: list[int] = []
        self._noted: list[tuple[Tensor | None, int]] | None = None
        self.bent = False

    @property
    def first(self) -> bool:
        """Whether ``.grad`` is all there is to know: of it nothing is kept."""
        return self._base is None

    def closed(self, brought: dict[int, Tensor | None], new: list[int]) -> None:
        """A backward has ended that brought these; to the new ones the first."""
        self._held, self._new = brought, new
        grads = [slot.param.grad for slot in self._slots]
        self._noted = [(g, -1 if g is None else g._version) for g in grads]

    def ended(self) -> None:
        """Look at once if a hook may have changed ``.grad`` in the middle of the backward: that is no factor on all."""
        if self._base is not None and any(slot.param._post_accumulate_grad_hooks for slot in self._slots):
            with torch.no_grad():
                self._measure(hooked=True)

    def fold(self) -> None:
        """Before another backward: add what the last one brought to what is known. To be called without grad."""
        if self._base is not None:
            self._measure()
            return
        now = self._flat(self._gradients())
        touched = self._touched()
        if touched:
            lengths = self._squares(now)[0]
            for place in touched:
                if lengths[place] == 0:  # thrown away
                    self._slots[place].count = 0
        self._base, self._q, self._held, self._new = now, None, {}, []

    def measured(self, *, look: bool = True) -> tuple[Tensor, Tensor]:
        """(n, q) of each, in the scale of ``.grad`` now, or, without a look at it, of before the backward that runs."""
        if self._base is None:
            n = q = self._squares(self._flat(self._gradients()))[0]
        elif look:
            n, q = self._measure()
        else:
            n = self._squares(self._base)[0]
            q = n if self._q is None else self._q
        return torch.from_numpy(n), torch.from_numpy(q)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _measure(self, *, hooked: bool = False) -> tuple[Numbers, Numbers]:
        base, q, held, size = self._base, self._q, self._held, self._total
        assert base is not None
        parts = self._gradients()
        if held:
            parts = [*self._filled([held.get(i) for i in self.places]), *parts]
        flat = self._flat(parts, 2 if held else 1)
        now = flat[-size:]
        expected = base + flat[:size] if held else base
        for place in map(self.places.index, self._new):  # what was there before is part of its first contribution
            at = slice(self._offsets[place], self._offsets[place] + self._sizes[place])
            flat[at] += base[at]
        squares = self._squares(flat)
        if q is None:
            q = self._squares(base)[0]
            q *= [slot.count > (i in self._new) for i, slot in zip(self.places, self._slots, strict=True)]
        if held:
            q = q + squares[0]
        if not (expected == now).all():
            self.bent = self.bent or hooked
            q = self._rescaled(q, expected, now)
        self._base, self._q, self._held, self._new = now, q, {}, []
        return squares[-1], q

    def _rescaled(self, q: Numbers, expected: Numbers, now: Numbers) -> Numbers:
        """Q in the scale of ``.grad`` now, which is not what backward left."""
        a, b = expected.astype(np.float64), now.astype(np.float64)
        with np.errstate(all="ignore"):
            rows = [self._sums(row)[0] for row in (a * a, a * b, b * b, (expected != now).astype(np.float64))]
            before, cross, after, changed = rows
            factors = np.where((changed > 0) & (before > 0), after / np.where(before > 0, before, 1), 1.0)
            bent = np.where(before > 0, cross * cross < (1 - BENT) * before * after, after > 0)
        thrown_away = (changed > 0) & (after == 0)
        self.bent = self.bent or bool((bent & (changed > 0) & ~thrown_away).any())
        for place in np.flatnonzero(thrown_away):
            self._slots[place].count = 0
        return np.where(thrown_away, 0.0, q * factors)

    def _touched(self) -> list[int]:
        """Which gradients, as far as versions tell, are not what the last backward left."""
        if self._noted is None:
            return [place for place, slot in enumerate(self._slots) if slot.count and not slot.untouched()]
        now = [slot.param.grad for slot in self._slots]
        pairs = enumerate(zip(now, self._noted, strict=True))
        return [place for place, (g, (was, v)) in pairs if g is not was or (g is not None and g._version != v)]

    def _gradients(self) -> list[Tensor]:
        return self._filled([slot.param.grad for slot in self._slots])

    def _filled(self, tensors: list[Tensor | None]) -> list[Tensor]:
        if all(t is not None for t in tensors):
            return tensors  # type: ignore[return-value]
        pairs = zip(tensors, self._slots, strict=True)
        return [torch.zeros_like(slot.param) if t is None else t for t, slot in pairs]

    def _flat(self, tensors: list[Tensor], times: int = 1) -> Numbers:
        flat: Tensor = torch._C._nn.flatten_dense_tensors(tensors)
        if flat.numel() != times * self._total or flat.dtype != self._slots[0].param.dtype:
            raise RuntimeError(
                "parameters or their gradients got another shape or type between the backward passes of one step: call "
                "zero_grad() of the optimizer after replacing a parameter's data"
            )
        numbers: Numbers = flat.numpy()
        return numbers.copy() if len(tensors) == 1 else numbers  # of a single one, flat is its own memory

    def _squares(self, flat: Numbers) -> Numbers:
        """The squared norm of each gradient, one row for each of the vectors that are laid end to end."""
        wide = flat.astype(np.float64)
        with np.errstate(over="ignore"):
            np.multiply(wide, wide, out=wide)
        return self._sums(wide)

    def _sums(self, flat: Numbers) -> Numbers:
        times = flat.size // self._total
        sums: Numbers = np.add.reduceat(flat, self._offsets[: times * len(self._slots)])
        return sums.reshape(times, -1)


def _is_small(slot: Slot) -> bool:
    p = slot.param
    return (
        slot.keep == "norms"
        and slot.ordinary
        and p.device.type == "cpu"
        and p.dtype in (torch.float32, torch.float64)
        and 0 < p.numel() <= LARGEST
    )
