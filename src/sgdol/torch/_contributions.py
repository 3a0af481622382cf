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
from typing import Any

import torch
from torch import Tensor

from sgdol.torch._metric import Metrics
from sgdol.torch._operators import Operators
from sgdol.torch._vectors import Layout, Numbers, Vector, dot, sample
from sgdol.torch._world import World, is_sharded, local, piece_of

__all__ = ["Contributions", "quotient", "scaled"]

BENT = 1e-3
"""By how much the squared cosine of a gradient with what it was may miss 1: rounding in bfloat16 makes 1e-5."""


class Contributions:
    """The contributions to the gradients of some parameters since the last step.

    Args:
        layout: the parameters.
        metrics: in which contributions are measured.
    """

    def __init__(self, layout: Layout, metrics: Metrics) -> None:
        self.layout, self._metrics = layout, metrics
        self.forget()

    def forget(self) -> None:
        """There are none."""
        self._vectors: dict[int, list[Tensor]] = {}
        """The contributions themselves, by entry: of small tensors, or of all while D is not known."""
        self._squares: dict[int, Tensor] = {}
        """<c, D^-1 c> of the other entries, summed over the contributions."""
        self._left: list[tuple[Tensor, Tensor]] = []
        """What the last backward left in ``.grad``: a sample of each entry, and ||S||^2 if it is large."""
        self._versions: list[tuple[int, int]] = []
        self._nonzero: int | None = None
        """A tensor whose gradient is not 0 after a first backward."""
        self.late = False
        """Whether D of the step is not known before its gradients are."""
        self.bent = False
        """Whether a gradient was changed, after a backward, by more than a factor."""

    def go_on_from(self, other: Contributions) -> None:
        """Take over what is known of the parameters that another layout has, too."""
        self.late, self.bent = other.late, other.bent
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
                self._vectors.setdefault(e, []).append(self.layout.copied(e, self.layout.entry(parts, e)))
        self.note()

    # Adding to them ---------------------------------------------------------------------------------------------------

    def keeps(self, e: int) -> bool:
        """Whether what a pass brings to an entry is needed until the pass ends; else its length is."""
        entry = self.layout.entries[e]
        return self.late or entry.merged or entry.coordinates

    def add(self, gradients: dict[int, Tensor], lengths: dict[int, Tensor]) -> None:
        """Add what a pass has brought, by tensor: gradients, and <c, D^-1 c> of large ones."""
        layout = self.layout
        for e, entry in enumerate(layout.entries):
            rows = range(entry.start, entry.stop)
            if not entry.merged and entry.start in lengths:
                self._add_square(e, lengths[entry.start].to(layout.like.device).reshape(1))
            elif any(i in gradients for i in rows):
                c = layout.entry([gradients.get(i) for i in rows], e)
                if entry.merged or self.late:
                    self._vectors.setdefault(e, []).append(layout.copied(e, c))
                else:
                    self._add_square(e, self._square(e, c, self._metrics.operators(layout)))

    def adopt(self, s: Vector, single: Sequence[bool], operators: Operators | None) -> None:
        """Take what is in ``.grad`` of tensors that have a single contribution for that contribution."""
        layout = self.layout
        for e, entry in enumerate(layout.entries):
            mine = single[entry.start : entry.stop]
            if not any(mine):
                continue
            if not entry.merged and not self.late:
                assert operators is not None
                self._squares[e] = self._square(e, s[e], operators)
            elif all(mine):
                self._vectors[e] = [layout.copied(e, s[e])]
            else:
                mask = layout.spread(e, torch.tensor(mine, device=entry.device))
                for number, c in enumerate(self._vectors.setdefault(e, [torch.zeros_like(s[e])])):
                    c.copy_(torch.where(mask, s[e] if number == 0 else torch.zeros_like(c), c))

    def _square(self, e: int, c: Tensor, operators: Operators) -> Tensor:
        """<c, D^-1 c> of a large entry, or c D^-1 c of each coordinate."""
        if self.layout.entries[e].coordinates:
            c = c.to(self.layout.precision(e, c))
            return c * operators[e].sharp(c)
        return operators[e].inner(c, c).to(self.layout.like.device).reshape(1)

    def _add_square(self, e: int, square: Tensor) -> None:
        self._squares[e] = self._squares[e] + square if e in self._squares else square

    # Their squares ----------------------------------------------------------------------------------------------------

    def total(self, operators: Operators) -> float:
        """Q, summed over all tensors: a Python number."""
        found: float = sum(square.sum().item() for square in self._squares.values())
        for e, vectors in self._vectors.items():
            found += sum(dot(c, operators[e].sharp(c)).item() for c in vectors)
        return found

    def squares(self, operators: Operators) -> Numbers:
        """Q of each tensor, and of each coordinate where these have step sizes of their own."""
        layout = self.layout
        numbers: list[Tensor] = []
        arrays: list[Tensor] = []
        for e, entry in enumerate(layout.entries):
            found = self._squares.get(e)
            for c in self._vectors.get(e, ()):
                if entry.coordinates:
                    c = c.to(layout.precision(e, c))
                    product = c * operators[e].sharp(c)
                else:
                    product = layout.sums(e, c.to(layout.like.dtype) * operators[e].sharp(c).to(layout.like.dtype))
                found = product if found is None else found + product
            if found is None:
                blank = torch.zeros(entry.shape, dtype=entry.dtype, device=entry.device)
                found = blank if entry.coordinates else layout.like.new_zeros(len(entry.sizes))
            (arrays if entry.coordinates else numbers).append(found)
        return [torch.cat(numbers) if numbers else layout.like.new_zeros(0), *arrays]

    # What happens to .grad --------------------------------------------------------------------------------------------

    def note(self, *, measure: bool = True) -> None:
        """Note what a backward has left in ``.grad``; of a first one only which tensors that are."""
        layout = self.layout
        self._versions = [_version(p) for p in layout.params]
        if not measure:
            self._nonzero = next((i for i, p in enumerate(layout.params) if _nonzero(p)), None)
        else:
            s = layout.gradients()
            lengths = [layout.like if entry.merged else dot(x, x) for entry, x in zip(layout.entries, s, strict=True)]
            self._left = list(zip(layout.sample(s), lengths, strict=True))

    @property
    def lengths(self) -> list[Tensor]:
        """||S||^2 of the large entries, if ``.grad`` is what was noted."""
        return [length for _, length in self._left]

    def changed(self, s: Vector) -> bool:
        """Whether ``.grad`` is not what the last backward left.

        A kernel that writes without raising a tensor's version (GradScaler's) shows in the sample, unless that is all
        0; ``.grad.data.zero_()`` after a first backward shows because nothing is left.
        """
        untouched = self._untouched()
        if not self._left:
            return not untouched or (self._nonzero is not None and not _nonzero(self.layout.params[self._nonzero]))
        for (kept, length), x, entry in zip(self._left, s, self.layout.entries, strict=True):
            if kept.device.type != "cpu" or not torch.equal(kept, x if entry.merged else sample(x)):
                return True
            if not entry.merged and (not untouched or not kept.any()) and not torch.equal(length, dot(x, x)):
                return True
        return False

    def _untouched(self) -> bool:
        """Whether ``.grad`` is what the last backward left, as far as versions tell."""
        return self._versions == [_version(p) for p in self.layout.params]

    def follow(self, s: Vector, counts: list[int], world: World, *, final: bool) -> tuple[list[bool], Tensor | None]:
        """Follow what has happened to ``.grad`` since the last backward.

        Args:
            s: what is in ``.grad``.
            counts: how many contributions each tensor has.
            world: sums over ranks.
            final: whether no other backward follows. Sharded pieces are then left to the sum over all ranks that
                follows as well.

        Returns:
            Which tensors' gradients were thrown away, and None, or [now, before], ||S||^2 of pieces by whose ratio over
            all ranks squares are still to be scaled.
        """
        layout, host = self.layout, self.layout.like.device.type == "cpu"
        none = [False] * len(counts)
        # Ranks have to agree on whether they sum: what a rank sees of its own pieces is not the same for all.
        unchanged = (not final and self._untouched()) if world.spread else not self.changed(s)
        if unchanged:
            return none, None
        now = self._lengths_of(s)
        before = self._lengths_before(now)
        if host:
            self.bent = self.bent or self._is_bent(s)
        if world.spread:
            if final and not self.late:
                return none, torch.stack([now, before])
            now, before = world.total(layout.params, torch.stack([now, before])).unbind()
        ratio = quotient(now, before)
        for e, entry in enumerate(layout.entries):
            mine = layout.spread(e, ratio[layout.rows(e)])
            if e in self._squares:
                self._squares[e] = self._squares[e] * (mine.to(self._squares[e]) if entry.coordinates else mine)
            for c in self._vectors.get(e, ()):
                c.mul_(mine.sqrt().to(c))
        if not host:
            return none, None
        # A sum of contributions may be 0 by itself: it was thrown away if that is new. Of a single one, which is not
        # measured before, it is new if anything was changed.
        rows = zip(counts, now.tolist(), before.tolist(), strict=True)
        gone = [n > 0 == square and (was > 0 or (n == 1 and not self._left)) for n, square, was in rows]
        self._left = []
        if any(gone):
            self._drop(gone)
        return gone, None

    def _drop(self, gone: list[bool]) -> None:
        """Forget the contributions to some tensors."""
        for e, entry in enumerate(self.layout.entries):
            mine = gone[entry.start : entry.stop]
            if any(mine):
                self._squares.pop(e, None)
                kept = torch.tensor([not away for away in mine], device=entry.device)
                for c in self._vectors.get(e, ()):
                    c.mul_(self.layout.spread(e, kept))

    def _lengths_of(self, s: Vector) -> Tensor:
        """||S||^2 of each tensor, of this rank's pieces."""
        layout = self.layout
        rows = [
            layout.sums(e, x.to(layout.like.dtype).square()) if entry.merged else dot(x, x).to(layout.like.device)[None]
            for e, (entry, x) in enumerate(zip(layout.entries, s, strict=True))
        ]
        return torch.cat(rows)

    def _lengths_before(self, now: Tensor) -> Tensor:
        """The same of what the last backward left; that of a single contribution is what it is now."""
        layout = self.layout
        if not self._left:
            return now
        rows = [
            layout.sums(e, kept.to(layout.like.dtype).square()) if layout.entries[e].merged else length.to(now)[None]
            for e, (kept, length) in enumerate(self._left)
        ]
        return torch.cat(rows)

    def _is_bent(self, s: Vector) -> bool:
        """Whether any gradient is no longer a multiple of what the last backward left. Only the host looks."""
        for e, ((old, _), new) in enumerate(zip(self._left, self.layout.sample(s), strict=False)):
            a, b = old.double(), new.double()
            entry = self.layout.entries[e]
            sums = [self.layout.sums(e, x) if entry.merged else x.sum().reshape(1) for x in (a * b, a * a, b * b)]
            cross, before, after = sums
            if bool(((cross.square() < (1 - BENT) * before * after) | ((before == 0) & (after > 0))).any()):
                return True
        return False


def scaled(layout: Layout, q: Numbers, ratio: Tensor) -> Numbers:
    """Squares, multiplied by a ratio for each tensor."""
    factors = [ratio[layout.numbered], *(layout.spread(e, ratio[layout.rows(e)]) for e in layout.coordinates)]
    return [a * f.to(a) for a, f in zip(q, factors, strict=True)]


def quotient(now: Tensor, before: Tensor) -> Tensor:
    """By what squares have been multiplied."""
    return torch.where(before > 0, now / torch.where(before > 0, before, 1), torch.ones_like(now))


def _version(p: Tensor) -> tuple[int, int]:
    """Which tensor ``.grad`` is, and how often it was written to, also behind the back of a DTensor."""
    grad: Any = p.grad
    if grad is None:
        return 0, 0
    if type(grad) is Tensor:
        return id(grad), grad._version
    return id(grad), grad._version + (local(grad)._version if is_sharded(grad) else 0)


def _nonzero(p: Tensor) -> bool:
    """Whether the first numbers of a gradient are not all 0; an accelerator is not waited for."""
    grad: Any = p.grad
    if grad is None or grad.layout != torch.strided or not grad.is_cpu:
        return False
    return bool(piece_of(grad.detach(), p).reshape(-1)[:16].any())
