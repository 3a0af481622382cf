"""What the backward passes of a step have added to ``.grad``: how often, and the sum of the squares of what each added.

Pass i adds a contribution c_i. A step needs the sum S = ``.grad`` and Q = sum_i <c_i, D^-1 c_i>:

* merged small tensors: the contributions are copied, and Q is computed at the end of the step;
* large tensors: only Q is kept, or an array of it where every coordinate has a step size;
* while D is not known, in the first update of a metric, all contributions are copied.

A factor on ``.grad`` after a backward (GradScaler, ``clip_grad_norm_``) is a factor on all contributions to it. So
||S||^2 is measured when a backward ends and again before use, and Q is multiplied by the ratio, which is exactly 1 if
nobody wrote to ``.grad``.
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

PREFIX = 16  # so many numbers of a gradient are read to see that it is not 0
SAME_FACTOR = 1e-2  # squared factors that differ by less are the same: gradients in bfloat16 are rounded
DISTORTED = 1e-3  # 1 - cos^2 of a gradient before and after a change that was no factor; bfloat16's rounding makes 1e-5

_NO_GRAD = torch.zeros(())
_version = attrgetter("_version")


class Contributions:
    """The contributions to the gradients of some parameters since the last step.

    Args:
        layout: the parameters.
        metrics: the metrics in which contributions are measured.
    """

    def __init__(self, layout: Layout, metrics: Metrics) -> None:
        self.layout, self._metrics = layout, metrics
        self._smallest_first = sorted(layout.params, key=Tensor.numel)
        self._identity = Operators([IDENTITY] * len(layout.entries)) if metrics.identity else None
        self.thrown_away = False  # True if gradients of passes were set to 0 before they were used
        self.forget()

    def forget(self) -> None:
        self.is_empty = True
        self.counts = [0] * len(self.layout.params)  # how many passes have reached each tensor
        self.without_past: frozenset[int] = frozenset()  # entries whose D is made of the gradients of this step
        self.distorted = False  # True if a gradient was changed after a backward by more than a factor
        # By entry: copies of the contributions; Q, or n - Q where _keeps_cross_terms; and, of entries whose D has a
        # basis of its own, the sum of the contributions in that basis (None if .grad is not that sum any more).
        self._vectors: dict[int, list[Tensor]] = {}
        self._squares: dict[int, Tensor] = {}
        self._rotated_sums: dict[int, Tensor] | None = {}
        # The snapshot of .grad at the end of the last backward; after the first backward only the last two.
        self._samples: Vector = []
        self._norms: list[Any] = []  # ||S||^2 of each entry
        self._versions: list[int] = []
        self._nonzero_param: Tensor | None = None
        # ||S||^2 of each tensor at its use and at the end of the last backward, if these may differ.
        self._change: tuple[Tensor, Tensor] | None = None

    def take_over(self, other: Contributions) -> None:
        self.is_empty = False
        counts = dict(zip(other.layout.params, other.counts, strict=True))
        self.counts = [counts.get(p, n) for p, n in zip(self.layout.params, self.counts, strict=True)]
        self.without_past, self.distorted = self._metrics.without_past(self.layout), other.distorted
        self._rotated_sums = None
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
            for i in range(max((len(vectors.get(p, ())) for p in params), default=0)):
                parts = [vectors[p][i] if i < len(vectors.get(p, ())) else None for p in params]
                self._vectors.setdefault(e, []).append(self.layout.entry(parts, e, copy=True))
        self.take_snapshot()

    # Adding to them ---------------------------------------------------------------------------------------------------

    def begin(self, world: World) -> bool:
        """Prepare for a backward: follow what was done to ``.grad``. True if there are contributions already."""
        grads: Vector = []
        if any(self.counts):
            if self.layout.reshaped() is not None:
                raise RuntimeError(RESHAPED)
            grads = self.layout.gradients()
            self._rescale(grads, world)
        if not any(self.counts):  # asked again: contributions that were set to 0 have been dropped
            if not self.is_empty:
                self.forget()
            if not self._metrics.euclidean:
                self.without_past = self._metrics.without_past(self.layout)
            return False
        self._add_single(grads, world)
        return True

    def keeps_gradient(self, e: int) -> bool:
        """Whether a pass keeps its contribution c to an entry until it ends; else it keeps <c, D^-1 c>."""
        entry = self.layout.entries[e]
        return entry.merged or entry.coordinates or e in self.without_past

    def add(self, gradients: dict[int, Tensor | None], squares: dict[int, Tensor], *, measure: bool) -> None:
        """Add the contributions of a pass.

        Args:
            gradients: by tensor; None for what ``.grad`` tells.
            squares: what :meth:`measure` returned, of large tensors.
            measure: False to count them only.
        """
        layout = self.layout
        self.is_empty = False
        for i in gradients:
            self.counts[i] += 1
        if not measure:
            return
        for e, entry in enumerate(layout.entries):
            in_entry = list(map(gradients.get, range(entry.start, entry.stop)))
            if not entry.merged and entry.start in squares:
                self._add_square(e, squares[entry.start].to(layout.like.device).reshape(1))
            elif any(c is not None for c in in_entry):
                if entry.merged or e in self.without_past:
                    self._vectors.setdefault(e, []).append(layout.entry(in_entry, e, copy=True))
                else:
                    self._add_square(e, self._square(e, layout.entry(in_entry, e), self._metrics.operators(layout)))

    def _add_single(self, grads: Vector, world: World, operators: Operators | None = None) -> None:
        """Measure the contribution to each tensor that has a single one, which nobody has measured: it is ``.grad``.

        Args:
            grads: ``.grad``.
            world: knows where ``.grad`` is not this rank's contribution.
            operators: D of the step; None before the gradients of the step are there, when D may not be known of all.
        """
        layout = self.layout
        # A gradient that was written by hand, which no pass has brought, is a single contribution too.
        is_single = [n <= 1 for n in self.counts]
        if not world.alone:
            is_single = [single and not world.waits(p) for single, p in zip(is_single, layout.params, strict=True)]
        if not any(is_single):
            return
        for e, entry in enumerate(layout.entries):
            in_entry = is_single[entry.start : entry.stop]
            if not any(in_entry):
                continue
            if not entry.merged and self._keeps_cross_terms(e, world):
                self._squares.pop(e, None)  # n - Q = 0
            elif not entry.merged and e not in self.without_past:
                if self._rotated_sums is not None:
                    self._rotated_sums.pop(e, None)
                self._squares[e] = self._square(e, grads[e], operators or self._metrics.operators(layout))
            elif all(in_entry):
                # The vector of several tensors is a copy already; that of one may be .grad itself.
                self._vectors[e] = [grads[e] if len(entry.sizes) > 1 else grads[e].clone()]
            else:  # .grad of these tensors goes into the first vector, and 0 into the others
                mask = layout.spread(e, torch.tensor(in_entry, device=entry.device))
                for number, c in enumerate(self._vectors.setdefault(e, [torch.zeros_like(grads[e])])):
                    c.copy_(torch.where(mask, grads[e] if number == 0 else torch.zeros_like(c), c))

    def _keeps_cross_terms(self, e: int, world: World) -> bool:
        """Whether n - Q is kept of an entry, the sum over the passes of 2 <S, D^-1 c> with S before c is added.

        After two passes it is one inner product, where Q is two squared norms. On several ranks S is their mean, and
        each rank can only square what it has itself.
        """
        entry = self.layout.entries[e]
        return world.alone and not (entry.merged or entry.coordinates or e in self.without_past)

    def _square(self, e: int, c: Tensor, operators: Operators) -> Tensor:
        """<c, D^-1 c> of a large entry, or c D^-1 c of each coordinate."""
        if self.layout.entries[e].coordinates:
            c = c.to(self.layout.precision(e, c))
            return c * operators[e].sharp(c)
        return self.measure(e, c, operators).to(self.layout.like.device).reshape(1)

    def measure(self, e: int, c: Tensor, operators: Operators | None = None, before: Tensor | None = None) -> Tensor:
        """<c, D^-1 c> of a contribution to a large entry; given S ``before`` it is added, 2 <S, D^-1 c>."""
        operator = (operators or self._metrics.operators(self.layout))[e]
        if self._rotated_sums is None or not operator.turns:
            return operator.inner(c, c) if before is None else 2 * operator.inner(before, c)
        # In the basis of D the inner product is cheap, and the sum of the rotated contributions is S rotated: the step
        # needs that too, and rotating costs two matrix products.
        rotated, earlier = operator.turned(c), self._rotated_sums.get(e)
        if earlier is None and before is not None:
            earlier = operator.turned(before)
        self._rotated_sums[e] = rotated if earlier is None else rotated + earlier
        if earlier is None or before is None:
            return dot(rotated, operator.divided(rotated))
        return 2 * dot(earlier, operator.divided(rotated))

    def _add_square(self, e: int, square: Tensor) -> None:
        self._squares[e] = self._squares[e] + square if e in self._squares else square

    # The gradients of a step ------------------------------------------------------------------------------------------

    def take(self, layout: Layout, world: World, *, pooled: bool = False) -> Gradients:
        r"""The gradients of a step in its metric, with :math:`n = \|S\|^2` and :math:`u = \frac{k}{k-1} (n - Q)`.

        Args:
            layout: the parameters that take part: all that are watched, or some.
            world: sums over ranks.
            pooled: whether sums over all tensors are enough: numbers are then Python floats.
        """
        watched, metrics = self.layout, self._metrics
        grads = watched.gradients()
        unscaled = self._rescale(grads, world, final=True)
        k = max(*self.counts, 1) * world.ranks
        operators = self._identity or metrics.operators(watched, grads, layout.params)
        if min(self.counts) <= 1:
            self._add_single(grads, world, operators)
        # With D = 1, n is the ||S||^2 of the snapshot, which _rescale has found unchanged (else it is empty now).
        identity = all(operator.is_identity for operator in operators)
        norms = self._norms if identity and not world.spread else []
        pooled = pooled and layout is watched
        q = self._squares_by_entry(operators, pooled=pooled)
        if world.alone and not metrics.euclidean:
            for e, operator in enumerate(operators):  # S in the basis of D, so that the operator need not rotate it
                operator.cache_turned(grads[e], (self._rotated_sums or {}).get(e))
        n = watched.products_by_entry(grads, grads, operators, norms, pooled=pooled)
        if not all(entry.merged for entry in watched.entries):
            q = [n[e] - value if self._keeps_cross_terms(e, world) else value for e, value in enumerate(q)]
        if pooled:
            square = sum(n)
            u = symmetric_signal(square, sum(q), k)
            return Gradients(k, layout, operators, grads, [square], [u], square, u)
        counts = self.counts
        n, q = watched.joined(n), watched.joined(q)
        if layout is not watched:
            grads = layout.gradients()
            operators = metrics.operators(layout, grads)
            n = layout.products(grads, grads, operators)
            q = layout.remapped(watched, q, n)  # Q = n of a parameter that nobody has watched: a single contribution
            rows = {p: i for i, p in enumerate(watched.params)}
            counts = [counts[rows[p]] if p in rows else 0 for p in layout.params]
            if unscaled is not None:
                blank = torch.zeros_like(unscaled[:, 0])
                unscaled = torch.stack([unscaled[:, rows[p]] if p in rows else blank for p in layout.params], dim=1)
        n, q, (square, squares) = self._over_ranks(layout, world, counts, n, q, unscaled)
        # Arrays of coordinates are as large as the model: their signal is written over Q, which is not used again.
        arrays = [torch.sub(a, b, out=b).mul_(k / (k - 1)) for a, b in zip(n[1:], q[1:], strict=True)]
        signals = [symmetric_signal(n[0], q[0], k), *arrays]
        return Gradients(k, layout, operators, grads, n, signals, square, symmetric_signal(square, squares, k))

    def _squares_by_entry(self, operators: Operators, *, pooled: bool = False) -> list[Any]:
        """Q, or n - Q, of the tensors of each entry, or of its coordinates; ``pooled``: the sum over its tensors."""
        layout = self.layout
        found: list[Any] = []
        for e, entry in enumerate(layout.entries):
            value: Any = self._squares.get(e, 0.0)
            if pooled and e in self._squares:
                value = value.sum().item()
            operator, rotated_sum = operators[e], None
            for c in self._vectors.get(e, ()):
                if entry.coordinates:
                    c = c.to(layout.precision(e, c))
                sharp = c
                if not operator.is_identity:
                    c, sharp = operator.paired(c, c)
                value = value + layout.number(e, c, sharp, pooled)
                if operator.turns:
                    rotated_sum = c if rotated_sum is None else rotated_sum + c
            if rotated_sum is not None and self._rotated_sums is not None:
                self._rotated_sums[e] = rotated_sum
            if not pooled and not isinstance(value, Tensor):
                blank = torch.zeros(entry.shape, dtype=entry.dtype, device=entry.device)
                value = blank if entry.coordinates else layout.like.new_zeros(len(entry.sizes))
            found.append(value)
        return found

    def _over_ranks(
        self, layout: Layout, world: World, counts: Sequence[int], n: Numbers, q: Numbers, unscaled: Tensor | None
    ) -> tuple[Numbers, Numbers, tuple[Tensor, Tensor]]:
        """(n, Q) over all ranks, in the scale of ``.grad``, and the sums of both over all tensors.

        Args:
            layout: the parameters that take part.
            world: sums over ranks.
            counts: how many passes have reached each parameter.
            n: of this rank's pieces.
            q: of this rank's contributions.
            unscaled: what :meth:`_rescale` returned, for these parameters.
        """
        if world.alone:
            return n, q, (layout.totals(n).sum(), layout.totals(q).sum())
        rows = layout.totals(n)[None] if unscaled is None else torch.cat([layout.totals(n)[None], unscaled])
        seen = rows.new_tensor([min(count, 1) for count in counts])
        shared = world.share(layout.params, LocalSums(rows, layout.totals(q), seen, list(q[1:]), max(self.counts)))
        # A gradient that no pass made on any rank, or that nobody averages over the ranks, is a single contribution.
        is_single = shared.seen == 0
        if world.spread:
            is_single |= ~torch.tensor([world.averages(p) for p in layout.params], device=is_single.device)
        factor = torch.ones_like(seen)
        if unscaled is not None:
            self._change = shared.rows[1], shared.rows[2]
            factor = _ratio(shared.rows[1], shared.rows[2])
        whole_n = shared.rows[0]
        whole_q = torch.where(is_single, whole_n, shared.q * factor)
        factors = (layout.spread(e, factor[layout.rows(e)]) for e in layout.coordinates)
        arrays = [a * f.to(a) for a, f in zip(shared.squares, factors, strict=True)]
        n, q = [whole_n[layout.numbered], *n[1:]], [whole_q[layout.numbered], *arrays]
        return n, q, (whole_n.sum(), whole_q.sum())

    # What happens to .grad --------------------------------------------------------------------------------------------

    def take_snapshot(self, *, measure: bool = True) -> None:
        """Remember ``.grad`` as a backward has left it; without ``measure`` only whether it is not 0."""
        self._versions = self._current_versions()
        if not measure:
            self._nonzero_param = next((p for p in self._smallest_first if _starts_nonzero(p)), None)
            return
        grads = self.layout.gradients()
        self._norms = [product(x, x) for x in grads]
        self._samples = self.layout.sample(grads)

    def _current_versions(self) -> list[int]:
        grads: list[Any] = [_NO_GRAD if p.grad is None else p.grad for p in self.layout.params]
        # Ids tell of another tensor in .grad, versions of a write in place. Writing to the local tensor of a DTensor
        # does not raise the version of the DTensor.
        pieces = [] if self.layout.plain else [local(g) for g in grads if is_sharded(g)]
        return [*map(id, grads), *map(_version, grads), *map(_version, pieces)]

    def _may_have_changed(self, grads: Vector, world: World, final: bool) -> bool:
        """Whether ``.grad`` may differ from the snapshot. An accelerator is not asked, so there it always may."""
        untouched = self._versions == self._current_versions()
        if world.spread:  # ranks have to agree on whether they sum: what each sees of its own pieces is not the same
            return final or not untouched
        if not self._samples:  # after the first backward; .grad.data.zero_() leaves the version as it is
            return not untouched or (self._nonzero_param is not None and not _starts_nonzero(self._nonzero_param))
        # Kernels that write without raising the version (GradScaler's) show in ||S||^2 of small tensors, and in the
        # sample of a large one, unless that is all 0.
        for entry, old, x, norm in zip(self.layout.entries, self._samples, grads, self._norms, strict=True):
            if not x.is_cpu or not (entry.merged or torch.equal(old, sample(x))):
                return True
            if (entry.merged or not untouched or not old.any()) and norm != product(x, x):
                return True
        return False

    def _rescale(self, grads: Vector, world: World, *, final: bool = False) -> Tensor | None:
        """Multiply Q by ||S||^2 now over ||S||^2 at the end of the last backward; drop contributions that are now 0.

        Args:
            grads: ``.grad``.
            world: sums over ranks.
            final: whether no other backward follows in this step.

        Returns:
            None, or, of parameters in pieces on several ranks, the rows [now, before] of each tensor: the sum over
            ranks that ends the step is to multiply Q by their ratio, so that there is one message and not two.
        """
        layout, host = self.layout, self.layout.like.device.type == "cpu"
        if not any(self.counts) or not self._may_have_changed(grads, world, final):
            return None
        self._rotated_sums = None
        now = self._norms_by_tensor(grads, [])
        # Of a single contribution nothing was measured: it was what it is now.
        before = self._norms_by_tensor(self._samples, self._norms) if self._samples else now
        if host:
            self.distorted = self.distorted or self._is_distorted(grads)
        if world.spread:
            if final and not self.without_past:
                return torch.stack([now, before])
            now, before = world.total(layout.params, torch.stack([now, before])).unbind()
        if final:
            self._change = now, before
        ratio = _ratio(now, before)
        for e, entry in enumerate(layout.entries):
            factor = layout.spread(e, ratio[layout.rows(e)])
            if e in self._squares:
                self._squares[e] = self._squares[e] * (factor.to(self._squares[e]) if entry.coordinates else factor)
            for c in self._vectors.get(e, ()):
                c.mul_(factor.sqrt().to(c))
        if host:
            # A sum of contributions may be 0 by itself: it was thrown away if that is new. Of a single one, which is
            # not measured before, it is new if anything was changed.
            rows = zip(self.counts, now.tolist(), before.tolist(), strict=True)
            gone = [n > 0 == square and (was > 0 or (n == 1 and not self._samples)) for n, square, was in rows]
            if any(gone):
                self._drop(gone)
        self._samples, self._norms = [], []
        return None

    def _drop(self, gone: list[bool]) -> None:
        self.thrown_away = True
        self.counts = [0 if away else n for n, away in zip(self.counts, gone, strict=True)]
        for e, entry in enumerate(self.layout.entries):
            gone_in_entry = gone[entry.start : entry.stop]
            if any(gone_in_entry):
                self._squares.pop(e, None)
                kept = torch.tensor([not away for away in gone_in_entry], device=entry.device)
                for c in self._vectors.get(e, ()):
                    c.mul_(self.layout.spread(e, kept))

    def _norms_by_tensor(self, grads: Vector, known: list[Any]) -> Tensor:
        """||S||^2 of each tensor, of this rank's pieces; ``known``: of each entry, if large ones are samples only."""
        layout = self.layout
        rows = [
            layout.sums(e, x.to(layout.like.dtype).square())
            if layout.entries[e].merged
            else as_number(known[e] if known else dot(x, x), layout.like)[None]
            for e, x in enumerate(grads)
        ]
        return torch.cat(rows)

    def multiplied(self) -> tuple[float, bool]:
        """The factor on ``.grad`` between the last backward and :meth:`take`; whether it was the same for all tensors.

        The host waits for it.
        """
        if self._change is None:
            return 1.0, True
        now, before = (square.to("cpu", torch.float64) for square in self._change)
        ratio = (now / before)[before > 0]
        if not len(ratio) or not torch.isfinite(ratio).all() or not ratio.any():
            return 1.0, True
        return float((now.sum() / before.sum()).sqrt()), bool(ratio.max() <= (1 + SAME_FACTOR) * ratio.min())

    def _is_distorted(self, grads: Vector) -> bool:
        """Whether any ``.grad`` is not a multiple of its snapshot, by cos^2 of the angle. Only the host looks."""
        # After the first backward there is no sample to compare with.
        for e, (old, new) in enumerate(zip(self._samples, self.layout.sample(grads), strict=False)):
            a, b = old.double(), new.double()
            entry = self.layout.entries[e]
            sums = [self.layout.sums(e, x) if entry.merged else x.sum().reshape(1) for x in (a * b, a * a, b * b)]
            cross, before, after = sums
            if bool(((cross.square() < (1 - DISTORTED) * before * after) | ((before == 0) & (after > 0))).any()):
                return True
        return False


def _ratio(now: Tensor, before: Tensor) -> Tensor:
    return torch.where(before > 0, now / torch.where(before > 0, before, 1), torch.ones_like(now))


def _starts_nonzero(p: Tensor) -> bool:
    grad: Any = p.grad
    if grad is None or not grad.is_cpu or grad.layout is not torch.strided:
        return False  # an accelerator is not asked
    if type(grad) is not Tensor:
        grad = piece_of(grad.detach(), p)
    return bool((grad if grad.numel() <= PREFIX else grad.reshape(-1)[:PREFIX]).any())
