"""Parameters as vectors: a short list of tensors, however many parameters a model has.

On small models the time of a step is the number of kernels. So all small tensors of a parameter group lie end to end in
one flat tensor, and each large one is a tensor of its own; every operation on a vector is one kernel per entry. Only
:class:`Layout` knows which tensors lie where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgdol.torch._rounding import NARROW, kept_dtype, rounded, seed_of
from sgdol.torch._world import ORDINARY, is_sharded, like_parameter, local, piece_of, real_view, several

__all__ = [
    "CHUNK",
    "PIECE",
    "Layout",
    "Numbers",
    "Section",
    "Vector",
    "as_number",
    "dot",
    "pieces",
    "product",
    "sample",
    "scalar_dtype",
    "size",
    "total",
    "wide_dtype",
]

Vector = list[Tensor]

# Products of two vectors, one for each section (Layout.sections): a float64 tensor with a number per parameter, or an
# array with one per coordinate. In place of all that, a single Python float: the sum over everything.
Numbers = list[Any]

_kind = attrgetter("shape", "dtype", "device")

SMALL = 1 << 14  # tensors of at most this many numbers are merged
CHUNK = 1 << 18  # numbers per partial sum of a product: float32 sums of so many keep their digits
PIECE = 1 << 16  # numbers that stay in the cache while several operations are done with them
TINY = 1 << 10  # products of at most this many numbers are taken in float64, at no cost
SAMPLE = 64  # numbers of a large tensor that are compared to notice that it was written to

# Outside this range a float32 sum of products may have underflowed or overflowed on the way: scale and sum again.
SAFE = (1e-30, 1e30)

# Narrow types are not merged: a sum of bfloat16 gradients in .grad is rounded to bfloat16, in a wide vector it is not.
MERGED = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    # Vectors are real, and never narrower than float32.
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def scalar_dtype(device: torch.device) -> torch.dtype:
    # Sums over time need float64; Apple's GPUs do not have it.
    return torch.float32 if device.type == "mps" else torch.float64


def size(tensor: Tensor) -> int:
    # Of real numbers, over all ranks: a DTensor's numel() is that of the whole tensor.
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> as a float64 scalar tensor on the device of a."""
    a, b = a.reshape(-1), b.reshape(-1)
    wide = scalar_dtype(a.device)
    if a.numel() <= TINY and a.dtype == torch.float32:
        return torch.dot(a.to(wide), b.to(wide))
    if a.numel() <= CHUNK:
        total = torch.dot(a, b)
    else:
        parts = [torch.dot(x, y) for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True)]
        total = torch.stack(parts).to(wide).sum()
    # Reading the sum costs nothing on the host; on an accelerator it would wait for the device, so it is not checked.
    if a.dtype == torch.float32 and total.device.type == "cpu" and not SAFE[0] < abs(total.item()) < SAFE[1]:
        return _scaled_dot(a, b)
    return total.to(wide)


def product(a: Tensor, b: Tensor) -> Any:
    """<a, b> as a Python float on the host; on an accelerator as :func:`dot` returns it."""
    if TINY < a.numel() <= CHUNK and a.is_cpu:  # the usual case
        value: float = (torch.dot(a, b) if a.dim() == 1 else torch.dot(a.reshape(-1), b.reshape(-1))).item()
        if SAFE[0] < abs(value) < SAFE[1] or a.dtype == torch.float64:
            return value
    scalar = dot(a, b)
    return scalar.item() if a.is_cpu else scalar


def total(x: Tensor) -> Tensor:
    wide = scalar_dtype(x.device)
    if x.dtype == wide or x.device.type != "cpu" or x.numel() <= TINY:
        return x.sum(dtype=wide)
    # sum(dtype=float64) of float32 converts number by number; pieces summed in float32 are ten times faster.
    if x.numel() <= CHUNK:
        return x.sum().to(wide)
    return torch.stack([piece.sum() for piece in x.reshape(-1).split(CHUNK)]).to(wide).sum()


def _scaled_dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> of float32 vectors whose products leave the range of float32.

    Both are divided by a power of two near their largest entry, which changes no digit, and the sum is multiplied back.
    """
    largest = [float(x.abs().max()) if x.numel() else 0.0 for x in (a, b)]
    if not all(0 < value < math.inf for value in largest):  # 0, infinite or not a number: nothing to scale by
        return torch.dot(a.double(), b.double())
    exponents = [math.frexp(value)[1] for value in largest]
    x, y = (torch.ldexp(v, torch.tensor(-exponent)) for v, exponent in zip((a, b), exponents, strict=True))
    parts = [torch.dot(u, v) for u, v in zip(x.split(CHUNK), y.split(CHUNK), strict=True)]
    return torch.ldexp(torch.stack(parts).double().sum(), torch.tensor(sum(exponents)))


class Entry(NamedTuple):
    """One tensor of a vector: tensors ``start`` to ``stop`` of the layout."""

    start: int
    stop: int
    group: int  # index into Layout.groups
    merged: bool
    coordinates: bool  # whether every coordinate has a step size of its own
    sizes: list[int]
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size  # of the tensor of the vector: flat if merged

    @property
    def alone(self) -> bool:
        """Whether the entry is a single tensor with a single number in products."""
        return not (self.merged or self.coordinates)


class Section(NamedTuple):
    """Entries whose numbers lie together: those of a group, or a single one whose coordinates have step sizes."""

    group: int  # index into Layout.groups
    entries: list[int]
    array: bool  # whether it is a single entry whose coordinates have step sizes
    params: int  # how many parameters


class Layout:
    """Which parameters lie where in a vector, and the operations that need to know it.

    Args:
        groups: the optimizer's parameter groups.
        members: the parameters that take part, one list per group; groups without any are left out.
        merges: ``merges(group, p)`` is the sort key of a small tensor among those that it is merged with; None if it
            must not be merged.
        state: the optimizer's state, in which the parts of vectors such as the momentum are kept.
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
        self.groups = [group for group, params in zip(groups, members, strict=True) if params]
        self.places = [place for place, params in enumerate(members) if params]  # of self.groups in the optimizer's
        self.params: list[Tensor] = []
        self.entries: list[Entry] = []
        self._shapes: list[torch.Size] = []  # of this rank's real piece of each parameter
        for place, (group, of_group) in enumerate(zip(self.groups, filter(len, members), strict=True)):
            for params, merged in _group_entries(of_group, partial(merges, group)):
                start, shapes = len(self.params), [real_view(local(p.detach())).shape for p in params]
                sizes = [shape.numel() for shape in shapes]
                self.params += params
                self._shapes += shapes
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
        self.like = torch.zeros((), device=device, dtype=scalar_dtype(device))  # a template for products and sums
        # The relative error of a squared norm is at most this.
        self.rounding = max((8 * torch.finfo(entry.dtype).eps for entry in self.entries), default=0.0)
        # An entry whose coordinates have step sizes is a section by itself; the others of its group, if any, are too.
        together = groupby(enumerate(self.entries), lambda pair: (pair[1].group, pair[1].coordinates and pair[0]))
        self.sections: list[Section] = []
        for (group_of_section, _), pairs in together:
            places, entries = zip(*pairs, strict=True)
            count = sum(len(entry.sizes) for entry in entries)
            self.sections.append(Section(group_of_section, list(places), entries[0].coordinates, count))
        self.everything = [Section(0, list(range(len(self.entries))), False, len(self.params))]
        self.plain = all(type(p) in ORDINARY and not p.is_complex() for p in self.params)
        self._kinds = list(map(_kind, self.params))
        self._vectors: dict[tuple[str, int], Tensor] = {}  # by name and entry
        # Views of the parts of merged entries that live long: hundreds of views would be made in each step.
        self._parts: dict[Tensor, list[Tensor]] = {}
        self._buffers: dict[int, Tensor] = {}
        self._precisions: dict[int, torch.dtype] = {}
        self._starts = [np.cumsum([0, *entry.sizes[:-1]]) for entry in self.entries]
        # The tensor that each coordinate of a merged entry belongs to. On the host numpy's reduceat and repeat are
        # faster and need only where tensors begin.
        self._index = {
            e: torch.repeat_interleave(torch.arange(len(entry.sizes)), torch.tensor(entry.sizes)).to(entry.device)
            for e, entry in enumerate(self.entries)
            if entry.merged and entry.device.type != "cpu"
        }

    # Tensors and vectors ----------------------------------------------------------------------------------------------

    def gather(self, tensors: Sequence[Tensor | None]) -> Vector:
        """These tensors, one for each parameter, as a vector; None counts as 0.

        Read-only: merged entries are copies, but the entry of a large float32 tensor is that tensor itself.
        """
        return [self.entry(tensors[entry.start : entry.stop], e) for e, entry in enumerate(self.entries)]

    def entry(self, tensors: Sequence[Tensor | None], e: int) -> Tensor:
        """Entry e of :meth:`gather`, from its own tensors."""
        entry = self.entries[e]
        pieces: Any = tensors
        if not self.plain or set(map(type, tensors)) != {Tensor}:
            pieces = [self._piece(tensor, entry.start + i) for i, tensor in enumerate(tensors)]
        if entry.merged:
            return torch._C._nn.flatten_dense_tensors(pieces)  # of a single tensor it is a view
        return pieces[0] if pieces[0].dtype == entry.dtype else pieces[0].to(entry.dtype)

    def own(self, e: int, x: Tensor) -> Tensor:
        # Entry e of a result of gather(), or a copy of it: that of a single tensor may share its memory.
        return x if len(self.entries[e].sizes) > 1 else x.clone()

    def gradients(self) -> Vector:
        params = self.params
        return [self.entry([p.grad for p in params[x.start : x.stop]], e) for e, x in enumerate(self.entries)]

    def parameters(self) -> Vector:
        return self.gather([p.detach() for p in self.params])

    def here(self, e: int) -> Tensor:
        # Entry e of parameters().
        return self.entry([p.detach() for p in self.params[self.rows(e)]], e)

    def point(self) -> Vector:
        return self.copy(self.parameters())

    def copy(self, vector: Vector) -> Vector:
        return [self.own(e, x) for e, x in enumerate(vector)]

    def put(self, x: Iterable[Tensor]) -> None:
        # Entry by entry, so that of a generator only one is in memory at a time.
        memory = self.real_parameters()
        for e, part in enumerate(x):
            torch._foreach_copy_(memory[self.rows(e)], self.parts(e, part))

    def real_parameters(self) -> list[Tensor]:
        # Views of the parameters' own memory: writing to them writes to the parameters.
        if self.plain:
            return self.params
        return [real_view(local(p)) for p in self.params]

    def parts(self, e: int, x: Tensor, *, to_read: bool = False) -> list[Tensor]:
        """Entry x of a vector cut into one part per parameter, each in the parameter's (real) shape.

        ``to_read=True`` if they are read at once and never written to: they may then be views of a buffer that the next
        call overwrites.
        """
        entry = self.entries[e]
        if not entry.merged:
            return [x]
        if x in self._parts:
            return self._parts[x]
        if not to_read or len(entry.sizes) == 1:
            return [part.view(self._shapes[entry.start + i]) for i, part in enumerate(x.split(entry.sizes))]
        buffer = self._buffers.get(e)
        if buffer is None or buffer.dtype != x.dtype:
            buffer = self._buffers[e] = torch.empty_like(x)
            self._parts[buffer] = self.parts(e, buffer)
        return self._parts[buffer.copy_(x)]  # one copy is cheaper than hundreds of new views of x

    def sample(self, vector: Vector) -> Vector:
        """A copy of all numbers of merged entries and of about ``SAMPLE`` numbers of each large one."""
        entries = zip(vector, self.entries, strict=True)  # gather() has copied what is of several tensors
        return [x if entry.sizes[1:] else x.clone() if entry.merged else sample(x) for x, entry in entries]

    def matches(self, sampled: Vector, vector: Vector) -> bool:
        entries = zip(sampled, vector, self.entries, strict=True)
        return all(torch.equal(old, x if entry.merged else sample(x)) for old, x, entry in entries)

    def _piece(self, tensor: Tensor | None, i: int) -> Tensor:
        if type(tensor) is Tensor and not tensor.is_complex():  # by far the most common case
            return tensor
        if tensor is None:
            p = self.params[i]
            dtype = wide_dtype(p.dtype) if p.is_complex() else p.dtype
            return torch.zeros(self._shapes[i], dtype=dtype, device=p.device)
        return piece_of(tensor, self.params[i])

    def serves(self, members: Sequence[Sequence[Tensor]]) -> bool:
        # Whether this layout is of these parameters, in their present shapes and types.
        for known, others in zip(self._members, members, strict=True):
            if len(known) != len(others) or not all(map(is_, known, others)):
                return False
        return self.reshaped() is None

    def reshaped(self) -> tuple[Tensor, torch.Size] | None:
        # The first parameter whose shape, type or device has changed, and the shape that it had.
        if list(map(_kind, self.params)) == self._kinds:
            return None
        return next((p, kind[0]) for p, kind in zip(self.params, self._kinds, strict=True) if _kind(p) != kind)

    # Vectors that are kept in the optimizer's state -------------------------------------------------------------------

    def vector(self, name: str, e: int, fill: Tensor | None = None) -> Tensor:
        """Entry e of the vector whose parts are ``state[p][name]``. After writing to it, call :meth:`store`.

        Parameters whose state has no such key begin with ``fill``, a number or an entry; None for 0.
        """
        x = self._vectors.get((name, e))
        if x is None:
            x = self._vectors[name, e] = self._vector_of_state(name, e, fill)
        return x.to(self.entries[e].dtype) if x.dtype == NARROW else x

    def store(self, name: str, e: int, x: Tensor, draw: int = 0) -> None:
        """Write to the state what was done to ``x = vector(name, e)``: state in bfloat16 is not that memory.

        ``draw`` is another number for every time that the vector is stored in one step.
        """
        kept = self._vectors[name, e]
        if kept is not x:
            entry = self.entries[e]
            kept.copy_(rounded(x, seed_of(self.groups[entry.group], self.params[entry.start], name, e, draw)))

    def has_state(self, name: str, e: int) -> bool:
        return any(name in self._state.get(p, ()) for p in self.params[self.rows(e)])

    def _vector_of_state(self, name: str, e: int, fill: Tensor | None) -> Tensor:
        entry, state = self.entries[e], self._state
        saved = [state[p].get(name) for p in self.params[entry.start : entry.stop]]
        dtype = kept_dtype(self.groups[entry.group], name, entry.dtype if fill is None else fill.dtype)
        if not entry.merged and saved[0] is not None and (saved[0].dtype == NARROW) == (dtype == NARROW):
            return real_view(local(saved[0]))
        x = torch.zeros(entry.shape, dtype=dtype, device=entry.device)
        if fill is not None:
            x.copy_(fill)
        parts = self.parts(e, x)
        self._parts[x] = parts
        for p, part, old in zip(self.params[self.rows(e)], parts, saved, strict=True):
            if old is not None:
                part.copy_(real_view(local(old)))
            state[p][name] = like_parameter(part, p)  # from now on the state is a view of the merged entry
        return x

    def forget(self) -> None:
        # Another layout has written to the state since: its tensors are not views of this layout's entries any more.
        self._vectors.clear()
        self._parts.clear()
        self._buffers.clear()

    # Numbers ----------------------------------------------------------------------------------------------------------

    def sums(self, e: int, values: Tensor) -> Tensor:
        """The sums of ``values`` over each tensor of entry e: a float64 tensor with one number per tensor."""
        entry = self.entries[e]
        if not entry.merged:
            return total(values).reshape(1)
        if values.device.type == "cpu":
            return torch.from_numpy(np.add.reduceat(values.to(torch.float64).numpy(), self._starts[e]))
        return torch.zeros(len(entry.sizes), device=values.device, dtype=self.like.dtype).index_add_(
            0, self._index[e], values.to(self.like.dtype)
        )

    def number(self, e: int, x: Tensor, y: Tensor, pooled: bool = False) -> Any:
        """<x, y> of entry e: one number per tensor, or x y where every coordinate has a step size of its own.

        ``pooled=True``: the sum over all tensors of the entry, as a Python number.
        """
        entry = self.entries[e]
        if pooled:
            return product(x, y)
        if entry.coordinates:
            wide = self.precision(e, x)
            return x.to(wide) * y.to(wide)
        if entry.merged:  # in float64: squares of float32 leave its range
            wide_x = x.to(self.like.dtype)
            return self.sums(e, wide_x * (wide_x if x is y else y.to(self.like.dtype)))
        return dot(x, y).to(self.like.device).reshape(1)

    def joined(self, values: Sequence[Any], pooled: bool = False) -> Numbers:
        """Results of :meth:`number` for all entries as :data:`Numbers`; None for a section where they are None."""
        numbers: Numbers = []
        for section in self.everything if pooled else self.sections:
            some = [values[e] for e in section.entries]
            one = len(some) == 1 or some[0] is None
            numbers.append(some[0] if one else sum(some) if pooled else torch.cat(some))
        return numbers

    def products(
        self,
        a: Vector,
        b: Vector,
        operators: Sequence[Any],
        *,
        known: Sequence[Any] = (),
        pooled: bool = False,
    ) -> Numbers:
        """<a, D^-1 b> as :data:`Numbers`.

        Args:
            a: a vector.
            b: another vector.
            operators: D of each entry (:mod:`sgdol.torch._operators`).
            known: <a, b> of each entry, a sum over its tensors, if the caller has it already.
            pooled: True for the sum over all tensors, as a Python number.
        """
        values = []
        for e, entry in enumerate(self.entries):
            if known and operators[e].is_identity and (pooled or entry.alone):
                values.append(known[e] if pooled else as_number(known[e], self.like).reshape(1))
            else:
                values.append(self.inner(e, a[e], b[e], operators[e], pooled))
        return self.joined(values, pooled)

    def inner(self, e: int, a: Tensor, b: Tensor, operator: Any, pooled: bool = False) -> Any:
        # <a, D^-1 b> of entry e in the form of number().
        entry = self.entries[e]
        if operator.is_identity:
            return self.number(e, a, b, pooled)
        if entry.alone:
            value = operator.inner(a, b)
            return value.item() if pooled else value.to(self.like).reshape(1)
        x, y = operator.paired(a, b.to(self.precision(e, a)) if entry.coordinates else b)
        return self.number(e, x, y, pooled)

    def precision(self, e: int, x: Tensor) -> torch.dtype:
        """The type of products of single coordinates of entry e: float64 if squares of x leave the range of float32.

        It is decided once, by the saved state of the learner or else by the first gradient that is not 0.
        """
        wide = self.entries[e].dtype
        if wide == torch.float64 or x.device.type != "cpu" or several():  # ranks have to agree, and devices do not wait
            return wide
        if e not in self._precisions:
            saved = self._state.get(self.params[self.entries[e].start], {})
            learned = next((v.dtype for key, v in saved.items() if key.startswith("learner.") and v.dim()), None)
            largest = float(x.abs().max()) if x.numel() and learned is None else 0.0
            if learned is None and largest == 0:
                return wide
            inside = 1e-11 < largest < 1e15 or not np.isfinite(largest)
            self._precisions[e] = learned or (wide if inside else torch.float64)
        return self._precisions[e]

    def totals(self, numbers: Numbers) -> Tensor:
        """One number per parameter, in the order of ``params``: arrays per coordinate are summed, None counts as 0."""
        rows = [
            self.like.new_zeros(section.params)
            if x is None
            else self.sums(section.entries[0], x).to(self.like)
            if section.array
            else x
            for section, x in zip(self.sections, numbers, strict=True)
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def with_totals(self, numbers: Numbers, totals: Tensor) -> Numbers:
        """The numbers with these totals in place of theirs, but for arrays, which stay."""
        rows = totals.split([section.params for section in self.sections])
        both = zip(self.sections, numbers, rows, strict=True)
        return [x if section.array or x is None else row for section, x, row in both]

    def remapped(self, source: Layout, numbers: Numbers, like: Numbers) -> Numbers:
        """Numbers of the layout ``source`` in the form of ``like``; 0 for parameters that it has not."""
        if source is self:
            return numbers
        known, remapped = dict(source._by_parameter(numbers)), [torch.zeros_like(x) for x in like]
        for p, part in self._by_parameter(remapped):
            if p in known:
                part.copy_(known[p])
        return remapped

    def _by_parameter(self, numbers: Numbers) -> Iterator[tuple[Tensor, Tensor]]:
        # Views: writing to them writes to the numbers.
        for section, x in zip(self.sections, numbers, strict=True):
            start = self.entries[section.entries[0]].start
            parts = self.parts(section.entries[0], x) if section.array else x.unbind()
            yield from zip(self.params[start : start + section.params], parts, strict=True)

    def spread(self, e: int, numbers: Tensor) -> Tensor:
        # One number per tensor of entry e -> one per coordinate.
        if not self.entries[e].merged:
            return numbers.reshape(())
        if numbers.device.type == "cpu":
            return torch.from_numpy(np.repeat(numbers.numpy(), self.entries[e].sizes))
        return numbers[self._index[e]]

    def rows(self, e: int) -> slice:
        # Of the parameters of entry e, in self.params and in results of totals().
        return slice(self.entries[e].start, self.entries[e].stop)


def pieces(arrays: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Arrays of one shape cut into pieces: yields the first piece of each, then the second of each, and so on.

    On the host a computation of several steps is faster piece by piece, because a piece stays in the cache.
    """
    if arrays[0].device.type != "cpu" or not all(a.is_contiguous() for a in arrays):
        return [tuple(arrays)]
    return zip(*(a.view(-1).split(PIECE) for a in arrays), strict=True)


def as_number(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(like)
    return torch.scalar_tensor(value, dtype=like.dtype, device=like.device)  # torch's default would be float32


def sample(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)  # evenly spaced numbers, copied
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()


def _group_entries(
    params: Iterable[Tensor], merges: Callable[[Tensor], tuple[int, ...] | None]
) -> list[tuple[list[Tensor], bool]]:
    # For each entry its parameters and whether they are merged. A merged entry is known by its device and type, a
    # tensor that lies alone by its id.
    entries: dict[Any, list[tuple[tuple[int, ...], Tensor]]] = {}
    for p in params:
        small = 0 < p.numel() <= SMALL and p.dtype in MERGED and not is_sharded(p)
        place = merges(p) if small else None
        entries.setdefault(id(p) if place is None else (p.device, wide_dtype(p.dtype)), []).append((place or (), p))
    ordered = ((kind, sorted(pairs, key=lambda pair: pair[0])) for kind, pairs in entries.items())
    return [([p for _, p in pairs], not isinstance(kind, int)) for kind, pairs in ordered]
