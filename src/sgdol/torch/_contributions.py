r"""What the backward passes of a step have added to ``.grad``: how often, and how far their contributions agree.

Pass i adds a contribution c_i to S = ``.grad``. A step needs S and, of each tensor,

.. math:: P = \sum_{i \ne j} \langle c_i, D^{-1} c_j\rangle = \|S\|^2 - Q, \qquad Q = \sum_i \|c_i\|^2.

In a single process P is kept. It grows by :math:`2 \langle S, D^{-1} c\rangle` before c is added to S: one product, and
exactly 0 for a contribution that is alone, so the first one needs no product at all. On several ranks ``.grad`` is
their mean and no rank knows its own S: there Q is kept.

* Large tensors are measured when a contribution arrives.
* Contributions to merged small tensors are copied, and measured at the end of the step. In a single process they are
  differences: of ``.grad`` after a backward and before it, both of which are read anyway.
* While D is not known, in the first update of a metric, contributions to large tensors are copied too.

A factor on ``.grad`` after a backward (GradScaler, ``clip_grad_norm_``) is a factor on all contributions to it. So
||S||^2 is measured when a backward ends and again before use, and what is kept follows the ratio, which is exactly 1 if
nobody wrote to ``.grad``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sgdol.torch._gradients import Gradients
from sgdol.torch._metric import Metrics
from sgdol.torch._operators import IDENTITY, Operators
from sgdol.torch._vectors import Layout, Numbers, Vector, as_number, product
from sgdol.torch._world import LocalSums, World, local

__all__ = ["RESHAPED", "Contributions"]

RESHAPED = (
    "parameters or their gradients got another shape or type between the backward passes of one step: call zero_grad() "
    "of the optimizer after replacing a parameter's data"
)

SAME_FACTOR = 1e-2  # squared factors that differ by less are the same: gradients in bfloat16 are rounded
DISTORTED = 1e-3  # 1 - cos^2 of a gradient before and after a change that was no factor; bfloat16's rounding makes 1e-5


class Contributions:
    """The contributions to the gradients of some parameters since the last step.

    Args:
        layout: the parameters.
        metrics: the metrics in which contributions are measured.
    """

    def __init__(self, layout: Layout, metrics: Metrics) -> None:
        self.layout, self._metrics = layout, metrics
        self._identity = Operators([IDENTITY] * len(layout.entries)) if metrics.identity else None
        # Numbers of an accelerator are not read: that would wait for it.
        self._host = all(entry.device.type == "cpu" for entry in layout.entries)
        self.thrown_away = False  # True if gradients of passes were set to 0 before they were used
        self.forget()

    def forget(self) -> None:
        self.is_empty = True
        self.counts = [0] * len(self.layout.params)  # how many passes have reached each tensor
        self.distorted = False  # True if a gradient was changed after a backward by more than a factor
        # By entry: copies of the contributions; P or Q of large tensors; and .grad of these in the basis of D.
        self._copies: dict[int, list[Tensor]] = {}
        self._before: dict[int, Tensor] = {}  # .grad of merged entries when the backward began
        self._measured: dict[int, Tensor] = {}
        self._turned: dict[int, Tensor] = {}
        self._several = False  # whether more than what .grad is has to be known: a second pass has begun, or on ranks
        self._untouched = True  # whether .grad is the sum of the copies, to the last bit but for rounding
        # .grad at the end of the last backward: its numbers, or some of those of a large tensor. And ||S||^2 of each
        # entry; None of a large tensor of which nothing is measured yet, if its sample is not 0.
        self._samples: Vector = []
        self._norms: list[Any] = []
        self._versions: list[int] = []
        # ||S||^2 of each tensor, at the end of the last backward and when it was looked at next, if these differ.
        self._change: tuple[Tensor, Tensor] | None = None

    def take_over(self, other: Contributions) -> None:
        """Go on from contributions to fewer parameters, which lie in the same entries: a group has been added."""
        self.is_empty = False
        counts = dict(zip(other.layout.params, other.counts, strict=True))
        self.counts = [counts.get(p, n) for p, n in zip(self.layout.params, self.counts, strict=True)]
        self.distorted, self._untouched = other.distorted, False
        earlier = {tuple(other.layout.params[other.layout.rows(e)]): e for e in range(len(other.layout.entries))}
        for e in range(len(self.layout.entries)):
            old = earlier.get(tuple(self.layout.params[self.layout.rows(e)]))
            if old in other._copies:
                self._copies[e] = other._copies[old]
            if old in other._measured:
                self._measured[e] = other._measured[old]
        self.take_snapshot()

    # While backward passes run ----------------------------------------------------------------------------------------

    def begin(self, world: World) -> bool:
        """Prepare for a backward: follow what was done to ``.grad``. True if there are contributions already."""
        self._before = {}
        grads: Vector = []
        if not self.is_empty:
            if self.layout.reshaped() is not None:
                raise RuntimeError(RESHAPED)
            grads = self.layout.gradients()
            now = [None if old is None else product(x, x) for old, x in zip(self._norms, grads, strict=True)]
            self._follow(grads, now, world)
            if not any(self.counts):  # they were set to 0
                self.forget()
        self._several = not (self.is_empty and world.alone)
        if self.is_empty:
            return False
        for e, entry in enumerate(self.layout.entries):
            if world.alone and (entry.merged or (e not in self._copies and self.keeps_copies(e))):
                before = grads[e] if entry.sizes[1:] else grads[e].clone()  # that of one tensor may be .grad itself
                self._copies.setdefault(e, [before])  # the first contribution is .grad until now
                if entry.merged:
                    self._before[e] = before
        return True

    def keeps_copies(self, e: int) -> bool:
        """Whether contributions to an entry are copied; else they are measured when they arrive."""
        return self.layout.entries[e].merged or e in self._metrics.without_past(self.layout)

    def measure(self, e: int, c: Tensor, before: Tensor | None) -> Tensor:
        """What a contribution c to a large entry adds to P, given ``.grad`` ``before``; to Q if that is None."""
        layout = self.layout
        operator = self._metrics.operators(layout)[e]
        c = c.to(layout.entries[e].dtype)
        s = c if before is None else before.to(c.dtype)
        if not operator.turns:
            value = layout.inner(e, s, c, operator)
        else:  # the step needs S in the basis of D, too, and rotating costs two matrix products
            c = operator.turned(c)
            if before is not None:
                s = self._turned[e] if e in self._turned else operator.turned(s)
                self._turned[e] = s + c
            value = layout.number(e, s if before is not None else c, operator.divided(c))
        return value if before is None else 2 * value

    def add(self, arrived: dict[int, Tensor | None], measured: dict[int, Tensor], *, ends_now: bool) -> None:
        """Add the contributions of a pass.

        Args:
            arrived: those that are to be copied, by tensor; None for others.
            measured: what :meth:`measure` returned, by entry.
            ends_now: False if ``.grad`` may have been changed since the pass ended.
        """
        if ends_now:
            self.take_snapshot()
        self.is_empty = False
        for i in arrived:
            self.counts[i] += 1
        for e, before in self._before.items():
            self._copies[e].append(self._samples[e] - before)
        self._before = {}
        for e, value in measured.items():
            self._measured[e] = self._measured[e] + value if e in self._measured else value
        if any(c is not None for c in arrived.values()):
            for e, entry in enumerate(self.layout.entries):
                in_entry = list(map(arrived.get, range(entry.start, entry.stop)))
                if any(c is not None for c in in_entry):
                    self._copies.setdefault(e, []).append(self.layout.own(e, self.layout.entry(in_entry, e)))

    def take_snapshot(self) -> None:
        """Remember ``.grad`` as a backward has left it."""
        grads = self.layout.gradients()
        self._samples = self.layout.sample(grads)
        whole = [self._several or entry.merged or not self._host for entry in self.layout.entries]
        lengths = zip(whole, self._samples, grads, strict=True)
        self._norms = [product(x, x) if whole or not some.any() else None for whole, some, x in lengths]
        self._versions = [] if self.layout.plain and None not in self._norms else self._current_versions()

    def _current_versions(self) -> list[int]:
        # Ids tell of another tensor in .grad, versions of a write in place. Writing to the local tensor of a DTensor
        # does not raise the version of the DTensor.
        grads: list[Any] = [p.grad for p in self.layout.params if p.grad is not None]
        return [x for g in grads for x in (id(g), g._version, local(g)._version)]

    # The gradients of a step ------------------------------------------------------------------------------------------

    def take(self, layout: Layout, world: World, *, pooled: bool = False) -> Gradients:
        r"""The gradients of a step in its metric, with :math:`n = \|S\|^2` and :math:`u = \frac{k}{k-1} P`.

        Args:
            layout: the parameters that take part: all that are watched, or some.
            world: sums over ranks.
            pooled: whether sums over all tensors are enough: numbers are then Python floats.
        """
        watched, metrics = self.layout, self._metrics
        grads = watched.gradients()
        norms = [product(x, x) for x in grads]
        self._follow(grads, norms, world, final=True)
        k = max([*self.counts, 1]) * world.ranks
        operators = self._identity or metrics.operators(watched, grads, layout.params)
        if world.alone and self._untouched:
            for e, turned in self._turned.items():
                operators[e].cache_turned(grads[e], turned)
        kept = [self._kept(e, grads[e], operators[e], world, pooled=pooled) for e in range(len(grads))]
        if layout is not watched:
            grads = layout.gradients()
            operators, norms = metrics.operators(layout, grads), []
        n, u = layout.products(grads, grads, operators, known=norms, pooled=pooled), watched.joined(kept, pooled)
        if pooled:
            u = [u[0] * (k / (k - 1))]
            return Gradients(k, layout, operators, grads, n, u, n[0], u[0])
        u = layout.remapped(watched, u, n)
        sums = torch.stack([layout.totals(n), layout.totals(u)])
        if not world.alone:
            n, q, sums = self._over_ranks(layout, world, n, u, sums)
            # Of coordinates n and Q are arrays as large as the model: P is written over Q, which is not used again.
            u = [torch.sub(a, b, out=b) for a, b in zip(n, q, strict=True)]
            sums[1] = sums[0] - sums[1]
        u = [p.mul_(k / (k - 1)) for p in u]
        squared, signal = sums.sum(1)
        return Gradients(k, layout, operators, grads, n, u, squared, signal * (k / (k - 1)))

    def _kept(self, e: int, grad: Tensor, operator: Any, world: World, *, pooled: bool) -> Any:
        """P of an entry, or Q on several ranks, in the form of :meth:`Layout.number`."""
        layout, copies = self.layout, self._copies.get(e, [])
        if operator.turns and copies:
            copies = [operator.turned(c) for c in copies]
            if world.alone and self._untouched:
                operator.cache_turned(grad, sum(copies[1:], copies[0]))
        # In a single process each contribution but the first with the sum of those before it.
        pairs = zip(copies[1:], accumulate(copies), strict=False) if world.alone else zip(copies, copies, strict=True)
        values = [layout.number(e, s, c if operator.is_identity else operator.divided(c), pooled) for c, s in pairs]
        if values:
            return sum(values[1:], values[0]) * (2 if world.alone else 1)
        if e in self._measured:
            return self._measured[e].sum().item() if pooled else self._measured[e]
        if pooled:
            return 0.0
        if layout.entries[e].coordinates:
            return torch.zeros_like(grad, dtype=layout.precision(e, grad))
        return layout.like.new_zeros(len(layout.entries[e].sizes))

    def _over_ranks(
        self, layout: Layout, world: World, n: Numbers, q: Numbers, sums: Tensor
    ) -> tuple[Numbers, Numbers, Tensor]:
        """(n, Q) over all ranks, in the scale of ``.grad``, and the sums of both for each tensor, from this rank's."""
        places = {p: i for i, p in enumerate(self.layout.params)}
        columns = [places.get(p, -1) for p in layout.params]  # -1 is a column of zeros: a parameter that is not watched
        rows = [self.layout.like.new_tensor([min(count, 1) for count in self.counts])]
        if world.spread:
            assert self._change is not None
            rows += self._change
        seen, *change = torch.nn.functional.pad(torch.stack(rows), (0, 1))[:, columns]
        arrays = [x for section, x in zip(layout.sections, q, strict=True) if section.array]
        own = LocalSums(torch.stack([sums[0], *change]), sums[1], seen, arrays, max(self.counts))
        shared = world.share(layout.params, own)
        whole_n, *change = shared.rows
        # A gradient that no pass made on any rank, or that nobody averages over the ranks, is a single contribution.
        is_single, factor = shared.seen == 0, torch.ones_like(whole_n)
        if world.spread:
            is_single |= ~torch.tensor([world.averages(p) for p in layout.params], device=is_single.device)
            self._change = change[0], change[1]
            factor = _ratio(*change)
        whole_q, squares = torch.where(is_single, whole_n, shared.q * factor), iter(shared.squares)
        arrays_of_q = [
            next(squares) * layout.spread(e, factor[layout.rows(e)]).to(x) if section.array else x
            for section, x in zip(layout.sections, q, strict=True)
            for e in section.entries[:1]
        ]
        sums = torch.stack([whole_n, whole_q])
        return layout.with_totals(n, whole_n), layout.with_totals(arrays_of_q, whole_q), sums

    # What happens to .grad --------------------------------------------------------------------------------------------

    def _follow(self, grads: Vector, now: list[Any], world: World, *, final: bool = False) -> None:
        """Multiply what is kept by ||S||^2 ``now``, of each entry, over ||S||^2 when the last backward ended.

        ``final``: no other backward follows in this step. On ranks with pieces of tensors the ratio is then known after
        the sum over ranks that ends the step.
        """
        layout, self._change = self.layout, None
        if not self._norms or not self._is_written(grads, now, world, final):
            # A factor of -1 leaves the norm as it was, and matters only to what has a sign and is used with .grad.
            signed = (self._copies or self._turned) and not (final and self._metrics.euclidean)
            if not signed or layout.matches(self._samples, grads):
                return
        samples, rows = layout.sample(grads), []
        for e, (old, new) in enumerate(zip(self._samples, samples, strict=True)):
            a, b = old.to(layout.like.dtype), new.to(layout.like.dtype)
            sums = [layout.sums(e, x).to(layout.like.device) for x in (a * b, a * a, b * b)]
            whole = not layout.entries[e].merged and self._norms[e] is not None and now[e] is not None
            lengths = [as_number(x[e], layout.like)[None] for x in (self._norms, now)] if whole else sums[1:]
            rows.append(torch.stack([*sums, *lengths]))
        changes = torch.cat(rows, dim=1)
        if world.spread and not final:
            changes = world.total(layout.params, changes)
        cross, a, b, before, after = changes
        self._change, self._samples, self._norms = (before, after), samples, now
        self._untouched = not self._copies and not self._measured
        self._turned = {}
        if self._host:  # not a multiple of what it was, by cos^2 of the angle
            self.distorted |= bool(((cross.square() < (1 - DISTORTED) * a * b) | ((a == 0) & (b > 0))).any())
        if final and world.spread:
            return
        ratio = _ratio(before, after)
        factor = torch.where(cross < 0, -1, 1) * ratio.sqrt()
        for e, entry in enumerate(layout.entries):
            row = layout.rows(e)
            if e in self._measured:
                factors = layout.spread(e, ratio[row]) if entry.coordinates else ratio[row]
                self._measured[e] = _times(self._measured[e], factors)
            if e in self._copies:
                self._copies[e] = [_times(c, layout.spread(e, factor[row])) for c in self._copies[e]]
        if self._host:
            # A sum of contributions may be 0 by itself: it was thrown away if that is new.
            gone = ((after == 0) & (before > 0)).tolist()
            if any(gone):
                for e, entry in enumerate(layout.entries):
                    if now[e] is None:  # only a sample was compared
                        gone[entry.start] &= not grads[e].any()
                self.thrown_away = True
                self.counts = [0 if away else n for n, away in zip(self.counts, gone, strict=True)]

    def _is_written(self, grads: Vector, now: list[Any], world: World, final: bool) -> bool:
        """Whether ``.grad`` may have been written to since the last backward."""
        if not self._host:  # numbers of an accelerator are not compared
            return True
        if world.spread:  # ranks agree on whether they sum: a piece may be empty or 0, but a write is seen on all
            return final or self._versions != self._current_versions()
        if None not in now:
            return now != self._norms
        same = now == self._norms and self._versions == self._current_versions()
        return not (same and self.layout.matches(self._samples, grads))

    def multiplied(self) -> tuple[float, bool]:
        """The factor on ``.grad`` between the last backward and :meth:`take`; whether it was the same for all tensors.

        The host waits for it.
        """
        if self._change is None:
            return 1.0, True
        before, now = (square.to("cpu", torch.float64) for square in self._change)
        ratio = (now / before)[before > 0]
        if not len(ratio) or not torch.isfinite(ratio).all() or not ratio.any():
            return 1.0, True
        return float((now.sum() / before.sum()).sqrt()), bool(ratio.max() <= (1 + SAME_FACTOR) * ratio.min())


def _ratio(before: Tensor, after: Tensor) -> Tensor:
    return torch.where(before > 0, after / torch.where(before > 0, before, 1), torch.ones_like(after))


def _times(x: Tensor, factor: Tensor) -> Tensor:
    factor = factor.to(x)  # 0 wherever it is 0, also if x is infinite: gradients that overflowed were thrown away
    return torch.where(factor == 0, factor, x * factor)
