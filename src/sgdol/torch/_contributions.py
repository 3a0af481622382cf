"""What is known of the contributions of backward passes: the squares of what each of them brought.

Contributions c_1, ..., c_k to small tensors are kept themselves, because that is cheap. Of a large tensor only
Q = sum <c_i, D^-1 c_i> is kept, or an array of it where coordinates have step sizes of their own. Before D of a step is
known, in the first update of a metric, all contributions are kept.

Whatever multiplies ``.grad`` after a backward (GradScaler, ``clip_grad_norm_``) multiplies the contributions to it. So
what a backward leaves is noted, and compared with ``.grad`` before that is used: contributions follow the ratio of the
squared norms, which is exactly 1 if nobody wrote to ``.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from sgdol.surrogate import symmetric_signal
from sgdol.torch._gradients import Gradients
from sgdol.torch._metric import Metrics
from sgdol.torch._operators import IDENTITY, Operators
from sgdol.torch._vectors import Layout, Numbers, Vector, as_number, dot, product, sample
from sgdol.torch._world import LocalSums, World, is_sharded, local, piece_of

__all__ = ["RESHAPED", "Contributions"]

RESHAPED = (
    "parameters or their gradients got another shape or type between the backward passes of one step: call zero_grad() "
    "of the optimizer after replacing a parameter's data"
)

FEW = 16
"""So many numbers of a gradient are looked at, to tell that it is not 0."""

NONE = torch.zeros(())
"""Stands for a gradient that is not there."""

_version = attrgetter("_version")

ALIKE = 1e-2
"""By what share squares of factors may differ that are the same: gradients in bfloat16 are rounded."""

BENT = 1e-3
"""By how much the squared cosine of a gradient with what it was may miss 1: rounding in bfloat16 makes 1e-5."""


class Contributions:
    """The contributions to the gradients of some parameters since the last step.

    Args:
        layout: the parameters.
        metrics: in which contributions are measured.
    """

    late: frozenset[int]
    fresh = False
    """Whether there is nothing to forget."""

    def __init__(self, layout: Layout, metrics: Metrics) -> None:
        self.layout, self._metrics = layout, metrics
        self._smallest = sorted(layout.params, key=Tensor.numel)
        self._identity = Operators([IDENTITY] * len(layout.entries)) if metrics.identity else None
        self.thrown_away = False
        """Whether gradients of passes were set to 0 before they were used."""
        self.forget()

    def found(self, i: int) -> None:
        """A gradient that is there before anybody watches is a contribution to tensor i."""
        self.counts[i], self.fresh = 1, False

    def forget(self) -> None:
        """There are none."""
        self.fresh = True
        self.counts = [0] * len(self.layout.params)
        """How many passes have reached each tensor."""
        self._vectors: dict[int, list[Tensor]] = {}
        """The contributions themselves, by entry: of small tensors, or of all while D is not known."""
        self._squares: dict[int, Tensor] = {}
        """Of the other entries <c, D^-1 c>, summed over the contributions; where :meth:`_crosses`, n - Q."""
        self._turned: dict[int, Tensor] | None = {}
        """The sum of the contributions to entries that D turns, in its coordinates; None if ``.grad`` is not that."""
        self._samples: Vector = []
        """A sample of what the last backward left in ``.grad``, unless that was the first..."""
        self._lengths: list[Any] = []
        """...and ||S||^2 of each entry of it."""
        self._versions: list[int] = []
        self._witness: Tensor | None = None
        """A parameter whose gradient was not 0 after the first backward."""
        self.late = frozenset()
        """The entries of which D of the step is not known before its gradients are."""
        self.bent = False
        """Whether a gradient was changed, after a backward, by more than a factor."""
        self._change: tuple[Tensor, Tensor] | None = None
        """||S||^2 of each tensor when it was used and when the last backward ended, if that may not be the same."""

    def go_on_from(self, other: Contributions) -> None:
        """Take over what is known of the parameters that another layout has, too."""
        self.fresh = False
        counts = dict(zip(other.layout.params, other.counts, strict=True))
        self.counts = [counts.get(p, n) for p, n in zip(self.layout.params, self.counts, strict=True)]
        self.late, self.bent, self._turned = self._metrics.without_past(self.layout), other.bent, None
        squares: dict[Tensor, Tensor] = {}
        vectors: dict[Tensor, list[Tensor]] = {}
        for e, entry in enumerate(other.layout.entries):
            params = other.layout.params[entry.start : entry.stop]
            if e in other._squares:
                squares[params[0]] = other._squares[e]
            for c in other._vectors.get(e, ()):
                for p, part in zip(params, other.layout.parts(e, c), strict=True):
                    vectors.setdefault(p, []).append(part)
        for e, entry in enumerate(self.layout.entries):
            params = self.layout.params[entry.start : entry.stop]
            if params[0] in squares:
                self._squares[e] = squares[params[0]]
            count = max((len(vectors.get(p, ())) for p in params), default=0)
            for i in range(count):
                parts = [vectors[p][i] if i < len(vectors.get(p, ())) else None for p in params]
                self._vectors.setdefault(e, []).append(self.layout.entry(parts, e, copy=True))
        self.note()

    # Adding to them ---------------------------------------------------------------------------------------------------

    def begin(self, world: World) -> bool:
        """A backward begins: follow what has happened to ``.grad``; whether there are contributions already."""
        s: Vector = []
        if any(self.counts):
            if self.layout.reshaped() is not None:
                raise RuntimeError(RESHAPED)
            s = self.layout.gradients()
            self._follow(s, world)
        if not any(self.counts):
            if not self.fresh:
                self.forget()
            if not self._metrics.euclidean:
                self.late = self._metrics.without_past(self.layout)
            return False
        # The only contribution to a tensor is what is in .grad, until the second comes.
        self._adopt(s, world)
        return True

    def keeps(self, e: int) -> bool:
        """Whether what a pass brings to an entry is needed until the pass ends; else its length is."""
        entry = self.layout.entries[e]
        return entry.merged or entry.coordinates or e in self.late

    def add(self, gradients: dict[int, Tensor | None], lengths: dict[int, Tensor], *, measure: bool) -> None:
        """Add what a pass has brought, by tensor: gradients, and <c, D^-1 c> of large ones; or only count it."""
        layout = self.layout
        self.fresh = False
        for i in gradients:
            self.counts[i] += 1
        if not measure:
            return
        for e, entry in enumerate(layout.entries):
            mine = list(map(gradients.get, range(entry.start, entry.stop)))
            if not entry.merged and entry.start in lengths:
                self._add_square(e, lengths[entry.start].to(layout.like.device).reshape(1))
            elif any(c is not None for c in mine):
                if entry.merged or e in self.late:
                    self._vectors.setdefault(e, []).append(layout.entry(mine, e, copy=True))
                else:
                    self._add_square(e, self._square(e, layout.entry(mine, e), self._metrics.operators(layout)))

    def _adopt(self, s: Vector, world: World, operators: Operators | None = None) -> None:
        """Take what is in ``.grad`` of tensors that have a single contribution for that contribution.

        Args:
            s: what is in ``.grad``.
            world: knows where ``.grad`` is not this rank's contribution.
            operators: D of the step; None before the gradients of the step are there, when D may not be known of all.
        """
        layout = self.layout
        # A gradient that was written by hand, which no pass has brought, is a single contribution too.
        single = [n <= 1 for n in self.counts]
        if not world.alone:
            single = [one and not world.waits(p) for one, p in zip(single, layout.params, strict=True)]
        if not any(single):
            return
        for e, entry in enumerate(layout.entries):
            mine = single[entry.start : entry.stop]
            if not any(mine):
                continue
            if not entry.merged and self._crosses(e, world):
                self._squares.pop(e, None)  # Q = n
            elif not entry.merged and e not in self.late:
                if self._turned is not None:
                    self._turned.pop(e, None)
                self._squares[e] = self._square(e, s[e], operators or self._metrics.operators(layout))
            elif all(mine):
                self._vectors[e] = [s[e] if len(entry.sizes) > 1 else s[e].clone()]  # several were copied already
            else:
                mask = layout.spread(e, torch.tensor(mine, device=entry.device))
                for number, c in enumerate(self._vectors.setdefault(e, [torch.zeros_like(s[e])])):
                    c.copy_(torch.where(mask, s[e] if number == 0 else torch.zeros_like(c), c))

    def _square(self, e: int, c: Tensor, operators: Operators) -> Tensor:
        """<c, D^-1 c> of a large entry, or c D^-1 c of each coordinate."""
        if self.layout.entries[e].coordinates:
            c = c.to(self.layout.precision(e, c))
            return c * operators[e].sharp(c)
        return self.measure(e, c, operators).to(self.layout.like.device).reshape(1)

    def _crosses(self, e: int, world: World) -> bool:
        """Whether n - Q is kept of an entry, not Q: the sum of 2 <S, D^-1 c> with S before c is added, read once.

        On several ranks S is their mean, and each can only square what it has itself.
        """
        entry = self.layout.entries[e]
        return world.alone and not (entry.merged or entry.coordinates or e in self.late)

    def measure(self, e: int, c: Tensor, operators: Operators | None = None, before: Tensor | None = None) -> Tensor:
        """<c, D^-1 c> of a contribution to a large entry; with S ``before`` it is added, 2 <S, D^-1 c>."""
        operator = (operators or self._metrics.operators(self.layout))[e]
        if self._turned is None or not operator.turns:
            return operator.inner(c, c) if before is None else 2 * operator.inner(before, c)
        h, turned = operator.turned(c), self._turned.get(e)
        if turned is None and before is not None:
            turned = operator.turned(before)
        self._turned[e] = h if turned is None else h + turned
        return dot(h, operator.divided(h)) if turned is None or before is None else 2 * dot(turned, operator.divided(h))

    def _add_square(self, e: int, square: Tensor) -> None:
        self._squares[e] = self._squares[e] + square if e in self._squares else square

    # The gradients of a step ------------------------------------------------------------------------------------------

    def take(self, layout: Layout, world: World, *, pooled: bool = False) -> Gradients:
        """All gradients of these parameters, of all that are watched or of some, in the metric of the step.

        Args:
            layout: the parameters that take part.
            world: sums over ranks.
            pooled: whether sums over all tensors are enough: numbers are Python's then.
        """
        watched, metrics = self.layout, self._metrics
        s = watched.gradients()
        pieces = self._follow(s, world, final=True)
        k = max(*self.counts, 1) * world.ranks
        operators = self._identity or metrics.operators(watched, s, layout.params)
        if min(self.counts) <= 1:
            self._adopt(s, world, operators)
        # ||S||^2 was measured when the last backward ended, and is known not to have changed since.
        identity = all(operator.is_identity for operator in operators)
        lengths = self._lengths if identity and not world.spread else []
        pooled = pooled and layout is watched
        q = self._squares_in(operators, pooled=pooled)
        if world.alone and not metrics.euclidean:
            # Let D know what .grad is in its coordinates, where that is the sum of what contributions were there.
            for e, operator in enumerate(operators):
                operator.cache_turned(s[e], (self._turned or {}).get(e))
        each = watched.products_by_entry(s, s, operators, lengths, pooled=pooled)
        if not all(entry.merged for entry in watched.entries):
            q = [each[e] - value if self._crosses(e, world) else value for e, value in enumerate(q)]
        if pooled:
            square = sum(each)
            u = symmetric_signal(square, sum(q), k)
            return Gradients(k, layout, operators, s, [square], [u], square, u)
        counts = self.counts
        n, q = watched.joined(each), watched.joined(q)
        if layout is not watched:
            s = layout.gradients()
            operators = metrics.operators(layout, s)
            n = layout.products(s, s, operators)
            q = layout.remapped(watched, q, n)  # of a parameter that nobody has watched: a single contribution
            rows = {p: i for i, p in enumerate(watched.params)}
            counts = [counts[rows[p]] if p in rows else 0 for p in layout.params]
            if pieces is not None:
                blank = torch.zeros_like(pieces[:, 0])
                pieces = torch.stack([pieces[:, rows[p]] if p in rows else blank for p in layout.params], dim=1)
        n, q, (square, squares) = self._over_ranks(layout, world, counts, n, q, pieces)
        # Arrays of coordinates are as large as the model: their signal is written over Q, which is not used again.
        arrays = [torch.sub(a, b, out=b).mul_(k / (k - 1)) for a, b in zip(n[1:], q[1:], strict=True)]
        signals = [symmetric_signal(n[0], q[0], k), *arrays]
        return Gradients(k, layout, operators, s, n, signals, square, symmetric_signal(square, squares, k))

    def _squares_in(self, operators: Operators, *, pooled: bool = False) -> list[Any]:
        """What is known of each entry, Q or n - Q: of its tensors, or of its coordinates; ``pooled``: their sum."""
        layout = self.layout
        found: list[Any] = []
        for e, entry in enumerate(layout.entries):
            value: Any = self._squares.get(e, 0.0)
            if pooled and e in self._squares:
                value = value.sum().item()
            operator, turned = operators[e], None
            for c in self._vectors.get(e, ()):
                if entry.coordinates:
                    c = c.to(layout.precision(e, c))
                sharp = c
                if not operator.is_identity:
                    c, sharp = operator.paired(c, c)
                value = value + layout.number(e, c, sharp, pooled)
                if operator.turns:
                    turned = c if turned is None else turned + c
            if turned is not None and self._turned is not None:
                self._turned[e] = turned
            if not pooled and not isinstance(value, Tensor):
                blank = torch.zeros(entry.shape, dtype=entry.dtype, device=entry.device)
                value = blank if entry.coordinates else layout.like.new_zeros(len(entry.sizes))
            found.append(value)
        return found

    def _over_ranks(
        self, layout: Layout, world: World, counts: Sequence[int], n: Numbers, q: Numbers, pieces: Tensor | None
    ) -> tuple[Numbers, Numbers, tuple[Tensor, Tensor]]:
        """(n, Q) over all ranks, in the scale of ``.grad``, and their sums over everything.

        Args:
            layout: the parameters that take part.
            world: sums over ranks.
            counts: how many passes have reached each.
            n: of this rank's pieces.
            q: of this rank's contributions.
            pieces: None, or [now, before], ||S||^2 of pieces, by whose ratio over all ranks Q is still to be scaled.
        """
        if world.alone:
            return n, q, (layout.totals(n).sum(), layout.totals(q).sum())
        rows = layout.totals(n)[None] if pieces is None else torch.cat([layout.totals(n)[None], pieces])
        seen = rows.new_tensor([min(count, 1) for count in counts])
        shared = world.share(layout.params, LocalSums(rows, layout.totals(q), seen, list(q[1:]), max(self.counts)))
        # A gradient that no pass made on any rank, or that nobody averages over the ranks, is a single contribution.
        alone = shared.seen == 0
        if world.spread:
            alone |= ~torch.tensor([world.averages(p) for p in layout.params], device=alone.device)
        factor = torch.ones_like(seen)
        if pieces is not None:
            self._change = shared.rows[1], shared.rows[2]
            factor = _quotient(shared.rows[1], shared.rows[2])
        whole_n = shared.rows[0]
        whole_q = torch.where(alone, whole_n, shared.q * factor)
        factors = (layout.spread(e, factor[layout.rows(e)]) for e in layout.coordinates)
        arrays = [a * f.to(a) for a, f in zip(shared.squares, factors, strict=True)]
        n, q = [whole_n[layout.numbered], *n[1:]], [whole_q[layout.numbered], *arrays]
        return n, q, (whole_n.sum(), whole_q.sum())

    # What happens to .grad --------------------------------------------------------------------------------------------

    def note(self, *, measure: bool = True) -> None:
        """Note what a backward has left in ``.grad``; of a first one, which is ``.grad``, only that it is not 0."""
        self._versions = self._versions_now()
        if not measure:
            self._witness = next((p for p in self._smallest if _nonzero(p)), None)
            return
        s = self.layout.gradients()
        self._lengths = [product(x, x) for x in s]
        self._samples = self.layout.sample(s)

    def _versions_now(self) -> list[int]:
        """Which tensor each ``.grad`` is, and how often it was written to, also behind the back of a DTensor."""
        grads: list[Any] = [NONE if p.grad is None else p.grad for p in self.layout.params]
        pieces = [] if self.layout.plain else [local(g) for g in grads if is_sharded(g)]
        return [*map(id, grads), *map(_version, grads), *map(_version, pieces)]

    def _may_have_changed(self, s: Vector, world: World, final: bool) -> bool:
        """Whether ``.grad`` may not be what the last backward left; see :meth:`_follow`. A device is not asked."""
        untouched = self._versions == self._versions_now()
        if world.spread:  # ranks have to agree on whether they sum: what each sees of its own pieces is not the same
            return final or not untouched
        if not self._samples:  # after the first backward; .grad.data.zero_() leaves the version as it is
            return not untouched or (self._witness is not None and not _nonzero(self._witness))
        # Kernels that write without raising the version (GradScaler's) show in ||S||^2 of small tensors, and in the
        # sample of a large one, unless that is all 0.
        for entry, kept, x, length in zip(self.layout.entries, self._samples, s, self._lengths, strict=True):
            if not x.is_cpu or not (entry.merged or torch.equal(kept, sample(x))):
                return True
            if (entry.merged or not untouched or not kept.any()) and length != product(x, x):
                return True
        return False

    def _follow(self, s: Vector, world: World, *, final: bool = False) -> Tensor | None:
        """Follow what has happened to ``.grad`` since the last backward.

        Args:
            s: what is in ``.grad``.
            world: sums over ranks.
            final: whether no other backward follows. Sharded pieces are then left to the sum over all ranks that
                follows as well.

        Returns:
            None, or [now, before], ||S||^2 of pieces by whose ratio over all ranks squares are still to be scaled.
        """
        layout, host = self.layout, self.layout.like.device.type == "cpu"
        if not any(self.counts):
            return None
        if not self._may_have_changed(s, world, final):
            return None
        self._turned = None
        now = self._lengths_by_tensor(s, [])
        # Of a single contribution nothing was measured: it was what it is now.
        before = self._lengths_by_tensor(self._samples, self._lengths) if self._samples else now
        if host:
            self.bent = self.bent or self._is_bent(s)
        if world.spread:
            if final and not self.late:
                return torch.stack([now, before])
            now, before = world.total(layout.params, torch.stack([now, before])).unbind()
        if final:
            self._change = now, before
        ratio = _quotient(now, before)
        for e, entry in enumerate(layout.entries):
            mine = layout.spread(e, ratio[layout.rows(e)])
            if e in self._squares:
                self._squares[e] = self._squares[e] * (mine.to(self._squares[e]) if entry.coordinates else mine)
            for c in self._vectors.get(e, ()):
                c.mul_(mine.sqrt().to(c))
        if host:
            # A sum of contributions may be 0 by itself: it was thrown away if that is new. Of a single one, which is
            # not measured before, it is new if anything was changed.
            rows = zip(self.counts, now.tolist(), before.tolist(), strict=True)
            gone = [n > 0 == square and (was > 0 or (n == 1 and not self._samples)) for n, square, was in rows]
            if any(gone):
                self._drop(gone)
        self._samples, self._lengths = [], []
        return None

    def _drop(self, gone: list[bool]) -> None:
        """Forget the contributions to some tensors, whose gradients were thrown away."""
        self.thrown_away = True
        self.counts = [0 if away else n for n, away in zip(self.counts, gone, strict=True)]
        for e, entry in enumerate(self.layout.entries):
            mine = gone[entry.start : entry.stop]
            if any(mine):
                self._squares.pop(e, None)
                kept = torch.tensor([not away for away in mine], device=entry.device)
                for c in self._vectors.get(e, ()):
                    c.mul_(self.layout.spread(e, kept))

    def _lengths_by_tensor(self, s: Vector, known: list[Any]) -> Tensor:
        """||S||^2 of each tensor, of this rank's pieces; ``known``: of large entries, of which s is a sample."""
        layout = self.layout
        rows = [
            layout.sums(e, x.to(layout.like.dtype).square())
            if layout.entries[e].merged
            else as_number(known[e] if known else dot(x, x), layout.like)[None]
            for e, x in enumerate(s)
        ]
        return torch.cat(rows)

    def multiplied(self) -> tuple[float, bool]:
        """By what gradients were multiplied between the last backward and :meth:`take`; whether all were by the same.

        The host waits for it.
        """
        if self._change is None:
            return 1.0, True
        now, before = (square.to("cpu", torch.float64) for square in self._change)
        ratio = (now / before)[before > 0]
        if not len(ratio) or not torch.isfinite(ratio).all() or not ratio.any():
            return 1.0, True
        return float((now.sum() / before.sum()).sqrt()), bool(ratio.max() <= (1 + ALIKE) * ratio.min())

    def _is_bent(self, s: Vector) -> bool:
        """Whether any gradient is no longer a multiple of what the last backward left. Only the host looks."""
        for e, (old, new) in enumerate(zip(self._samples, self.layout.sample(s), strict=False)):
            a, b = old.double(), new.double()
            entry = self.layout.entries[e]
            sums = [self.layout.sums(e, x) if entry.merged else x.sum().reshape(1) for x in (a * b, a * a, b * b)]
            cross, before, after = sums
            if bool(((cross.square() < (1 - BENT) * before * after) | ((before == 0) & (after > 0))).any()):
                return True
        return False


def _quotient(now: Tensor, before: Tensor) -> Tensor:
    """By what squares have been multiplied."""
    return torch.where(before > 0, now / torch.where(before > 0, before, 1), torch.ones_like(now))


def _nonzero(p: Tensor) -> bool:
    """Whether the first numbers of a gradient are not all 0; an accelerator is not waited for."""
    grad: Any = p.grad
    if grad is None or not grad.is_cpu or grad.layout is not torch.strided:
        return False
    if type(grad) is not Tensor:
        grad = piece_of(grad.detach(), p)
    return bool((grad if grad.numel() <= FEW else grad.reshape(-1)[:FEW]).any())
