"""Parameters as vectors: a short list of tensors, however many parameters a model has.

On small models the time of a step is the number of kernels. So all small tensors of a parameter group lie end to end in
one flat tensor, and each large one is a tensor of its own; every operation on a vector is one kernel per entry. Only
:class:`Layout` knows which tensors lie where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgdol.torch._world import ORDINARY, is_sharded, like_parameter, local, piece_of, real_view, several

__all__ = [
    "CHUNK",
    "Layout",
    "Numbers",
    "Vector",
    "as_number",
    "dot",
    "is_small",
    "pieces",
    "product",
    "sample",
    "scalar_dtype",
    "size",
    "sum_of",
    "total",
    "wide_dtype",
]

Vector = list[Tensor]

Numbers = list[Any]
"""What is known of a vector in numbers. First one number for each tensor, as one float64 tensor; then, for each entry
whose coordinates have step sizes of their own (:attr:`Layout.coordinates`), an array with a number per coordinate."""

_kind = attrgetter("shape", "dtype", "device")

SMALL = 1 << 14
"""Tensors of at most so many numbers are merged."""

CHUNK = 1 << 18
"""Long products are taken in pieces of so many numbers: temporaries stay in the cache, and float32 sums stay exact."""

PIECE = 1 << 16
"""Arrays of coordinates are worked on in parts of so many numbers."""

TINY = 1 << 10
"""Products of at most so many numbers are taken in float64: it costs nothing."""

SAMPLE = 64
"""How many numbers of a large tensor are compared, to notice that it was changed."""

SAFE = (1e-30, 1e30)
"""Sums of products in float32 outside of this range may have lost digits: they are taken again, of multiples."""

MERGED = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
"""Types that are merged. A sum of narrow gradients is rounded to their type; in a wide vector it would not be."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real type in which vectors of this type are kept: float32 or wider."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The type of sums over time: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def size(tensor: Tensor) -> int:
    """How many real numbers a tensor has, over all ranks."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> as a float64 scalar on the device."""
    a, b = a.reshape(-1), b.reshape(-1)
    wide = scalar_dtype(a.device)
    if a.numel() <= TINY and a.dtype == torch.float32:
        return torch.dot(a.to(wide), b.to(wide))
    if a.numel() <= CHUNK:
        total = torch.dot(a, b)
    else:
        parts = [torch.dot(x, y) for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True)]
        total = torch.stack(parts).to(wide).sum()
    # The host may look at a sum of float32 products without waiting; an accelerator would have to be waited for.
    if a.dtype == torch.float32 and total.device.type == "cpu" and not SAFE[0] < abs(total.item()) < SAFE[1]:
        return _scaled_dot(a, b)
    return total.to(wide)


def product(a: Tensor, b: Tensor) -> Any:
    """<a, b>: a Python number on the host, where the usual case is short; elsewhere as :func:`dot`."""
    if a.dim() == 1 and TINY < a.numel() <= CHUNK and a.is_cpu:
        found: float = torch.dot(a, b).item()
        if SAFE[0] < abs(found) < SAFE[1] or a.dtype == torch.float64:
            return found
    square = dot(a, b)
    return square.item() if a.is_cpu else square


def total(x: Tensor) -> Tensor:
    """The sum over a tensor as a float64 scalar on the device."""
    wide = scalar_dtype(x.device)
    if x.dtype == wide or x.device.type != "cpu" or x.numel() <= TINY:
        return x.sum(dtype=wide)
    # sum(dtype=float64) of float32 converts number by number; pieces summed in float32 are ten times faster.
    return torch.stack([piece.sum() for piece in x.reshape(-1).split(CHUNK)]).to(wide).sum()


def _scaled_dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> of float32 whose products leave the range: of multiples by powers of two, which round as they would."""
    tops = [float(x.abs().max()) if x.numel() else 0.0 for x in (a, b)]
    if not all(0 < top < math.inf for top in tops):
        return torch.dot(a.double(), b.double())
    x, y = (torch.ldexp(v, torch.tensor(-math.frexp(top)[1])) for v, top in zip((a, b), tops, strict=True))
    parts = [torch.dot(u, v) for u, v in zip(x.split(CHUNK), y.split(CHUNK), strict=True)]
    return torch.ldexp(torch.stack(parts).double().sum(), torch.tensor(sum(math.frexp(top)[1] for top in tops)))


class Entry(NamedTuple):
    """One tensor of a vector: tensors ``start`` to ``stop`` of the layout."""

    start: int
    stop: int
    group: int
    """The place of their parameter group among :attr:`Layout.groups`."""
    merged: bool
    coordinates: bool
    """Whether every coordinate has a step size of its own."""
    sizes: list[int]
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    """Of the tensor of the vector."""


class Layout:
    """Where some parameters lie in a vector.

    Args:
        groups: parameter groups, with "granularity".
        members: the parameters that take part, one list per group; groups without any are left out.
        merges: gives the place of a small tensor of a group among those that it may be merged with, or None.
        state: the optimizer's, where vectors are kept.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        members: Sequence[Sequence[Tensor]],
        merges: Callable[[dict[str, Any], Tensor], tuple[int, ...] | None],
        state: dict[Any, Any],
    ) -> None:
        self._state = state
        self._members = members
        self.groups = [group for group, some in zip(groups, members, strict=True) if some]
        self.places = [place for place, some in enumerate(members) if some]
        """The place of each of them among the optimizer's groups."""
        self.params: list[Tensor] = []
        self.group_of: list[int] = []
        """The place of each parameter's group among :attr:`groups`."""
        self.entries: list[Entry] = []
        for place, (group, some) in enumerate(zip(self.groups, filter(len, members), strict=True)):
            for params, merged in _arranged(some, partial(merges, group)):
                start, shapes = len(self.params), [real_view(local(p.detach())).shape for p in params]
                sizes = [shape.numel() for shape in shapes]
                self.params += params
                self.group_of += [place] * len(params)
                self.entries.append(
                    Entry(
                        start,
                        len(self.params),
                        place,
                        merged,
                        group.get("granularity") == "coordinate",
                        sizes,
                        wide_dtype(params[0].dtype),
                        params[0].device,
                        torch.Size([sum(sizes)]) if merged else shapes[0],
                    )
                )
        self.size = sum(size(p) for p in self.params)
        device = self.params[0].device if self.params else torch.device("cpu")
        self.like = torch.zeros((), device=device, dtype=scalar_dtype(device))
        """A number of the kind in which numbers are kept."""
        self.rounding = max((8 * torch.finfo(entry.dtype).eps for entry in self.entries), default=0.0)
        """By how much, relative to it, a squared norm may be off."""
        self.coordinates = [e for e, entry in enumerate(self.entries) if entry.coordinates]
        self.numbered = [i for entry in self.entries if not entry.coordinates for i in range(entry.start, entry.stop)]
        """The tensors that have one number each, in order."""
        self.plain = all(type(p) in ORDINARY and not p.is_complex() for p in self.params)
        self._shapes = [real_view(local(p.detach())).shape for p in self.params]
        self._kinds = list(map(_kind, self.params))
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._parts: dict[int, tuple[Tensor, list[Tensor]]] = {}  # of the merged entries that are kept
        self._buffers: dict[int, Tensor] = {}
        self._precisions: dict[int, torch.dtype] = {}
        self._starts = [np.cumsum([0, *entry.sizes[:-1]]) for entry in self.entries]
        # Which tensor each coordinate of a merged entry belongs to; on the host numpy's reduceat and repeat do without.
        self._index = {
            e: torch.repeat_interleave(torch.arange(len(entry.sizes)), torch.tensor(entry.sizes)).to(entry.device)
            for e, entry in enumerate(self.entries)
            if entry.merged and entry.device.type != "cpu"
        }

    # Tensors and vectors ----------------------------------------------------------------------------------------------

    def gather(self, tensors: Sequence[Tensor | None]) -> Vector:
        """A vector of these tensors, one for each parameter, 0 where there is none. Not to be written to.

        Several small tensors are copied; of a large one it is the tensor itself, unless that is narrow.
        """
        if len(self.entries) == 1:
            return [self.entry(tensors, 0)]
        return [self.entry(tensors[entry.start : entry.stop], e) for e, entry in enumerate(self.entries)]

    def entry(self, tensors: Sequence[Tensor | None], e: int, *, copy: bool = False) -> Tensor:
        """One entry of such a vector, from the tensors that lie in it; ``copy``: in memory of its own."""
        entry = self.entries[e]
        found: Any = tensors
        if not self.plain or set(map(type, tensors)) != {Tensor}:
            found = [self._piece(tensor, entry.start + i) for i, tensor in enumerate(tensors)]
        if entry.merged:
            x = torch._C._nn.flatten_dense_tensors(found)  # of a single tensor it is a view
        else:
            x = found[0] if found[0].dtype == entry.dtype else found[0].to(entry.dtype)
        return x.clone() if copy and len(found) == 1 else x

    def gradients(self) -> Vector:
        """What is in ``.grad``, 0 where nothing is; not to be written to."""
        params = self.params
        return [
            self.entry([p.grad for p in params[entry.start : entry.stop]], e) for e, entry in enumerate(self.entries)
        ]

    def point(self) -> Vector:
        """Where the parameters are: a copy."""
        return self.copy(self.gather([p.detach() for p in self.params]))

    def copy(self, vector: Vector) -> Vector:
        """What :meth:`gather` returned, in memory of its own."""
        return [x if len(entry.sizes) > 1 else x.clone() for entry, x in zip(self.entries, vector, strict=True)]

    def put(self, x: Vector) -> None:
        """Move the parameters there."""
        torch._foreach_copy_(self.own(), self.views(x))

    def own(self) -> list[Tensor]:
        """The parameters' own memory, as real tensors."""
        if self.plain:
            return self.params
        return [real_view(local(p)) for p in self.params]

    def views(self, vector: Vector) -> list[Tensor]:
        """Each parameter's part of a vector, in its (real) shape."""
        return [part for e, x in enumerate(vector) for part in self.parts(e, x)]

    def parts(self, e: int, x: Tensor, *, to_read: bool = False) -> list[Tensor]:
        """The parts of one entry, each in its parameter's (real) shape.

        Args:
            e: the entry.
            x: what lies there.
            to_read: whether they are read at once and not written to, so that they may lie in a buffer.
        """
        entry, kept = self.entries[e], self._parts.get(id(x))
        if not entry.merged:
            return [x]
        if kept is not None and kept[0] is x:
            return kept[1]
        if not to_read or len(entry.sizes) == 1:
            return [part.view(self._shapes[entry.start + i]) for i, part in enumerate(x.split(entry.sizes))]
        buffer = self._buffers.get(e)
        if buffer is None or buffer.dtype != x.dtype:
            buffer = self._buffers[e] = torch.empty_like(x)
            self._parts[id(buffer)] = buffer, self.parts(e, buffer)
        return self._parts[id(buffer.copy_(x))][1]  # one copy is cheaper than hundreds of new views

    def sample(self, vector: Vector) -> Vector:
        """All numbers of small tensors, and a few of each large one, in memory of their own."""
        return [
            x if len(entry.sizes) > 1 else x.clone() if entry.merged else sample(x)
            for x, entry in zip(vector, self.entries, strict=True)
        ]

    def matches(self, kept: Vector, vector: Vector) -> bool:
        """Whether a vector is still what :meth:`sample` was taken of, as far as that tells."""
        each = zip(kept, vector, self.entries, strict=True)
        return all(torch.equal(old, x if entry.merged else sample(x)) for old, x, entry in each)

    def _piece(self, tensor: Tensor | None, i: int) -> Tensor:
        """This rank's real piece of a tensor that belongs to parameter i."""
        if type(tensor) is Tensor and not tensor.is_complex():
            return tensor
        if tensor is None:
            p = self.params[i]
            dtype = wide_dtype(p.dtype) if p.is_complex() else p.dtype
            return torch.zeros(self._shapes[i], dtype=dtype, device=p.device)
        return piece_of(tensor, self.params[i])

    def serves(self, members: Sequence[Sequence[Tensor]]) -> bool:
        """Whether these are the parameters, and still have the shapes and types that they had."""
        for mine, others in zip(self._members, members, strict=True):
            if len(mine) != len(others) or not all(map(is_, mine, others)):
                return False
        return self.reshaped() is None

    def reshaped(self) -> tuple[Tensor, torch.Size] | None:
        """A parameter that has another shape, type or device now, and the shape that it had."""
        if list(map(_kind, self.params)) == self._kinds:
            return None
        return next((p, kind[0]) for p, kind in zip(self.params, self._kinds, strict=True) if _kind(p) != kind)

    # Vectors that are kept in the optimizer's state -------------------------------------------------------------------

    def vector(self, name: str, e: int, fill: Tensor | None = None) -> Tensor:
        """Entry e of a vector whose parts are in the state of each parameter under this name.

        Args:
            name: under which it is kept.
            e: which entry.
            fill: what it is for parameters that have no such state yet, a number or an entry; None for 0.
        """
        kept = self._kept.get((name, e))
        if kept is None:
            kept = self._kept[name, e] = self._kept_entry(name, e, fill)
        return kept

    def keeps(self, name: str) -> bool:
        """Whether all entries of a vector have been made by :meth:`vector`."""
        return all((name, e) in self._kept for e in range(len(self.entries)))

    def holds(self, name: str, e: int) -> bool:
        """Whether the state of any parameter of an entry has this name."""
        return any(name in self._state.get(p, ()) for p in self.params[self.rows(e)])

    def _kept_entry(self, name: str, e: int, fill: Tensor | None) -> Tensor:
        entry, state = self.entries[e], self._state
        held = [state[p].get(name) for p in self.params[entry.start : entry.stop]]
        if not entry.merged and held[0] is not None:
            return real_view(local(held[0]))
        dtype = entry.dtype if fill is None else fill.dtype
        x = torch.zeros(entry.shape, dtype=dtype, device=entry.device)
        if fill is not None:
            x.copy_(fill)
        parts = self.parts(e, x)
        self._parts[id(x)] = x, parts
        for p, part, old in zip(self.params[self.rows(e)], parts, held, strict=True):
            if old is not None:
                part.copy_(real_view(local(old)))
            state[p][name] = like_parameter(part, p)
        return x

    def forget(self) -> None:
        """Another layout has written to the state: vectors are made of it anew."""
        self._kept.clear()
        self._parts.clear()
        self._buffers.clear()

    # Numbers ----------------------------------------------------------------------------------------------------------

    def sums(self, e: int, values: Tensor) -> Tensor:
        """The sum over each tensor of an entry: one float64 number for each."""
        entry = self.entries[e]
        if not entry.merged:
            return total(values).reshape(1)
        if values.device.type == "cpu":
            return torch.from_numpy(np.add.reduceat(values.to(torch.float64).numpy(), self._starts[e]))
        return torch.zeros(len(entry.sizes), device=values.device, dtype=self.like.dtype).index_add_(
            0, self._index[e], values.to(self.like.dtype)
        )

    def number(self, e: int, x: Tensor, y: Tensor, pooled: bool = False) -> Any:
        """<x, y> of one entry: one number for each tensor, or an array of products where coordinates have their own.

        Args:
            e: the entry.
            x: a part of a vector.
            y: another.
            pooled: whether the sum over all tensors is enough: it is a Python number.
        """
        entry = self.entries[e]
        if pooled:
            return product(x, y)
        if entry.coordinates:
            wide = self.precision(e, x)
            return x.to(wide) * y.to(wide)
        if entry.merged:  # in float64, whose range and precision squares of float32 need
            wide_x = x.to(self.like.dtype)
            return self.sums(e, wide_x * (wide_x if x is y else y.to(self.like.dtype)))
        return dot(x, y).to(self.like.device).reshape(1)

    def joined(self, values: Sequence[Any]) -> Numbers:
        """What :meth:`number` has made of each entry, together."""
        entries = list(zip(values, self.entries, strict=True))
        numbers = [value for value, entry in entries if not entry.coordinates]
        arrays = [value for value, entry in entries if entry.coordinates]
        return [torch.cat(numbers) if numbers else self.like.new_zeros(0), *arrays]

    def products(
        self, a: Vector, b: Vector, operators: Sequence[Any] | None = None, *, pooled: bool = False
    ) -> Numbers:
        """<a, D^-1 b> of each tensor, and a D^-1 b of each coordinate; ``pooled``: the sum, a single Python number."""
        values = self.each(a, b, operators, pooled=pooled)
        return [sum(values)] if pooled else self.joined(values)

    def each(
        self,
        a: Vector,
        b: Vector,
        operators: Sequence[Any] | None = None,
        known: Sequence[Any] = (),
        *,
        pooled: bool = False,
    ) -> list[Any]:
        """<a, D^-1 b> of each entry: of each of its tensors, or of each coordinate where these have step sizes.

        Args:
            a: a vector.
            b: another.
            operators: D of each entry (:mod:`sgdol.torch._metric`); None for D = 1.
            known: the product of each entry, summed over its tensors, if it is known already.
            pooled: whether the sum over the tensors of an entry is enough: a Python number.
        """
        if pooled and known:
            return list(known)
        values: list[Any] = []
        for e, entry in enumerate(self.entries):
            x, y = a[e], b[e]
            operator = None if operators is None or operators[e].is_identity else operators[e]
            if entry.merged or entry.coordinates:
                if entry.coordinates:
                    y = y.to(self.precision(e, x))
                if operator is not None:
                    x, y = operator.paired(x, y)
                values.append(self.number(e, x, y, pooled))
            else:
                found = known[e] if known else dot(x, y) if operator is None else operator.inner(x, y)
                values.append(found.item() if pooled else as_number(found, self.like).reshape(1))
        return values

    def precision(self, e: int, x: Tensor) -> torch.dtype:
        """The type of products of single coordinates: float64 also for float32 whose squares leave its range.

        It is that of what has been learned from them, or what the first gradient needs. Ranks have to agree on it, so
        several of them take what the parameter's type says.
        """
        wide = self.entries[e].dtype
        if wide == torch.float64 or x.device.type != "cpu" or several():
            return wide
        if e not in self._precisions:
            held = self._state.get(self.params[self.entries[e].start], {})
            learned = next((v.dtype for key, v in held.items() if key.startswith("learner.") and v.dim()), None)
            largest = float(x.abs().max()) if x.numel() and learned is None else 0.0
            if learned is None and largest == 0:
                return wide
            inside = 1e-11 < largest < 1e15 or not np.isfinite(largest)
            self._precisions[e] = learned or (wide if inside else torch.float64)
        return self._precisions[e]

    def totals(self, numbers: Numbers) -> Tensor:
        """One number for each tensor of the layout, also for those whose coordinates have their own."""
        first, *arrays = numbers
        if not arrays:
            return first
        out = self.like.new_zeros(len(self.params))
        out[self.numbered] = first
        for e, values in zip(self.coordinates, arrays, strict=True):
            out[self.entries[e].start : self.entries[e].stop] = self.sums(e, values)
        return out

    def remapped(self, source: Layout, numbers: Numbers, otherwise: Numbers) -> Numbers:
        """Numbers of another layout for the tensors of this one; ``otherwise`` where that has none."""
        if source is self:
            return numbers
        known = {source.params[i]: numbers[0][row] for row, i in enumerate(source.numbered)}
        for e, values in zip(source.coordinates, numbers[1:], strict=True):
            known.update(zip(source.params[source.rows(e)], source.parts(e, values), strict=True))
        first, *arrays = (values.clone() for values in otherwise)
        for row, i in enumerate(self.numbered):
            first[row] = known.get(self.params[i], first[row])
        for e, values in zip(self.coordinates, arrays, strict=True):
            for p, part in zip(self.params[self.rows(e)], self.parts(e, values), strict=True):
                part.copy_(known.get(p, part))
        return [first, *arrays]

    def by_group(self, values: Sequence[Any]) -> Numbers:
        """One value for each group of the layout, as numbers that go with those of :meth:`products`."""
        first = values[0]
        if len(values) > 1 and any(
            value is not first and (isinstance(value, Tensor) or value != first) for value in values[1:]
        ):
            each = torch.stack([as_number(value, self.like) for value in values])
            first = each[[self.group_of[i] for i in self.numbered]]
        return [first, *(values[self.entries[e].group] for e in self.coordinates)]

    def by_entry(self, value: Any) -> list[Any]:
        """A number, or one for each tensor that has one, by entry: what belongs to its tensors."""
        if isinstance(value, float) or not value.dim():
            return [value] * len(self.entries)
        sizes = [0 if entry.coordinates else len(entry.sizes) for entry in self.entries]
        return list(value.split(sizes))

    def spread(self, e: int, numbers: Tensor) -> Tensor:
        """One number for each tensor of an entry, at each of its coordinates."""
        if not self.entries[e].merged:
            return numbers.reshape(())
        if numbers.device.type == "cpu":
            return torch.from_numpy(np.repeat(numbers.numpy(), self.entries[e].sizes))
        return numbers[self._index[e]]

    def rows(self, e: int) -> slice:
        """The rows of an entry's tensors in a vector with one number for each tensor of the layout."""
        return slice(self.entries[e].start, self.entries[e].stop)


def pieces(arrays: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """The same part of each array, one part after the other: on the host, what is computed of a part fits the cache."""
    if arrays[0].device.type != "cpu" or not all(a.is_contiguous() for a in arrays):
        return [tuple(arrays)]
    return zip(*(a.view(-1).split(PIECE) for a in arrays), strict=True)


def as_number(value: Any, like: Tensor) -> Tensor:
    """A number as a tensor of the type and on the device of ``like``; torch would make a float32 of a Python float."""
    if isinstance(value, Tensor):
        return value.to(like)
    return torch.scalar_tensor(value, dtype=like.dtype, device=like.device)


def sample(tensor: Tensor) -> Tensor:
    """A few numbers of a tensor, spread over it, in memory of their own."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()


def is_small(p: Tensor) -> bool:
    """Whether a parameter is merged with others, where the metric allows it."""
    return 0 < p.numel() <= SMALL and p.dtype in MERGED and not is_sharded(p)


def sum_of(x: Tensor, small: bool) -> Tensor:
    """The sum over a tensor, to the last bit what :meth:`Layout.sums` makes of it."""
    if small and x.device.type == "cpu":
        return torch.from_numpy(np.add.reduceat(x.reshape(-1).to(torch.float64).numpy(), [0]))[0]
    return total(x)


def _arranged(
    params: Iterable[Tensor], merges: Callable[[Tensor], tuple[int, ...] | None]
) -> list[tuple[list[Tensor], bool]]:
    """The parameters of a group, entry by entry, and whether an entry is merged: small tensors of one kind together."""
    found: dict[Any, list[tuple[tuple[int, ...], Tensor]]] = {}
    for p in params:
        place = merges(p) if is_small(p) else None
        found.setdefault(id(p) if place is None else (p.device, wide_dtype(p.dtype)), []).append((place or (), p))
    ordered = ((kind, sorted(some, key=lambda each: each[0])) for kind, some in found.items())
    return [([p for _, p in some], not isinstance(kind, int)) for kind, some in ordered]
