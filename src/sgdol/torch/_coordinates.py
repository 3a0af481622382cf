"""One step size per coordinate: learning and moving in few passes over memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.learners import FTRL, LARGEST_MULTIPLIER, Learner, uses_hindsight
from sgdol.torch._blocks import LARGEST, tensor_state
from sgdol.torch._moves import move_guarded
from sgdol.torch._statistics import Coordinate
from sgdol.torch._tensors import inner, real_view
from sgdol.torch._world import local

__all__ = ["Sums", "update_tensor"]

CHUNK = 1 << 18
"""How many scalars are handled at once: temporaries do not grow with the model."""

SMALL = 1 << 12
"""Below so many scalars new memory is cheaper than a view of old memory."""


class Sums(NamedTuple):
    """What the records need of one tensor, of this rank's piece."""

    su: Tensor
    """<s, u>."""
    ssn: Tensor
    """<s^2, n>."""
    moved: Tensor
    """||s d||^2: of the move, in units of lr."""
    length: Tensor | None
    """||d||^2, if it is not n."""


class _Piece(NamedTuple):
    """What one chunk of a tensor is made of."""

    x: Tensor
    d: Tensor
    left: Tensor
    right: Tensor
    base: Tensor
    last: Tensor | float


def update_tensor(
    learner: Learner,
    group: dict[str, Any],
    owner: dict[str, Any],
    param: Tensor,
    direction: Tensor,
    scale: Any,
    coordinate: Coordinate,
    rate: Any,
    alpha: tuple[Any, Any],
    ok: Tensor | None,
    scratch: dict[torch.dtype, Tensor],
) -> Sums:
    """Learn a multiplier for each coordinate of a tensor and move it along ``scale * direction``.

    Args:
        learner: the online learner.
        group: the parameter's group.
        owner: where its state is.
        param: the parameter.
        direction: D^-1 times a vector, this rank's piece.
        scale: of the direction.
        coordinate: n and u.
        rate: lr.
        alpha: the regulariser's, before and after this update.
        ok: None, or whether the update counts, on the device.
        scratch: memory to be used again, by type.
    """
    base = coordinate.signal.base
    alpha = (_representable(alpha[0], base.dtype), _representable(alpha[1], base.dtype))
    state = tensor_state(learner, owner, param, base)
    last = coordinate.last if isinstance(coordinate.last, Tensor) else base
    tensors = [real_view(local(param)), direction, coordinate.left, coordinate.right, base, last, *state]
    chunked = tensors[0].numel() > CHUNK and all(t.is_contiguous() for t in tensors)
    pieces = zip(*(t.view(-1).split(CHUNK) for t in tensors), strict=True) if chunked else [tensors]
    same = direction is coordinate.left is coordinate.right
    sums: list[Sums] = []
    for x, vector, left, right, known, behind, *fields in pieces:
        d = _scaled(vector, scale, known)
        piece = _Piece(x, d, left, right, known, behind if last is not base else coordinate.last)
        here = type(state)(*fields)
        if type(learner) is FTRL and ok is None and same:
            multiplier, su = _learn_in_place(learner, here, piece, coordinate, alpha[0], _scratch(scratch, known))
            ssn = None
        else:
            n = d.square() if same else _product(piece, coordinate.scale)
            multiplier, su = _learn(learner, here, piece, n, coordinate, alpha, ok)
            ssn = None if same else inner(multiplier.square(), n)
        length = None if same else inner(d, d)
        moved = _move(group, x, d, multiplier, rate, ok)
        sums.append(Sums(su, moved if ssn is None else ssn, moved, length))
    return sums[0] if len(sums) == 1 else Sums(*(_total(parts) for parts in zip(*sums, strict=True)))


def _representable(alpha: Any, dtype: torch.dtype) -> Any:
    """Alpha as a number of the type of the sums, which stay finite beside it: a larger one would not count for more."""
    largest = torch.finfo(dtype).max * (2.0**-12 if dtype == torch.float64 else LARGEST)  # 1e150 squared is in range
    return alpha.clamp(max=largest) if isinstance(alpha, Tensor) else min(alpha, largest)


def _total(parts: tuple[Any, ...]) -> Any:
    return None if parts[0] is None else sum(parts[1:], parts[0])


def _product(piece: _Piece, scale: Any) -> Tensor:
    """N of each coordinate, in a metric or of another vector than the direction."""
    wide = piece.base.dtype
    scale = scale * scale if isinstance(scale, float) else (scale * scale).to(wide)
    return piece.left.to(wide) * piece.right.to(wide) * scale


def _scaled(vector: Tensor, scale: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(scale, float) and scale == 1.0:
        return vector if vector.dtype == like.dtype else vector.to(like)
    return vector.to(like) * (scale if isinstance(scale, float) else scale.to(like))


def _learn(
    learner: Learner,
    state: Any,
    piece: _Piece,
    n: Tensor,
    coordinate: Coordinate,
    alpha: tuple[Any, Any],
    ok: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The multipliers and <s, u>; the state is written to."""
    _, a, b = coordinate.signal
    u = piece.base if b == 1.0 else piece.base * b
    u = u + n * a if a else u
    multiplier = learner.predict(state, alpha[0]).clone()  # it may be the state itself
    hindsight = {"last": piece.last} if uses_hindsight(learner) else {}
    observed = learner.observe(state, multiplier, u, n, alpha[1], **hindsight)
    fresh = [new.clone() if any(new is old for old in state) else new for new in observed]
    for field, new in zip(state, fresh, strict=True):
        field.copy_(new if ok is None else torch.where(ok, new, field))
    return multiplier, inner(multiplier, u)


def _learn_in_place(
    learner: FTRL, state: Any, piece: _Piece, coordinate: Coordinate, alpha: float, memory: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The same as ``_learn`` for FTRL, in fewer passes over memory and without new memory."""
    weight = learner.strength * alpha
    multiplier = torch.add(state.u_sum, weight * learner.center, out=memory[0])
    denominator = torch.add(state.n_sum, weight, out=memory[1])
    multiplier.div_(denominator)
    if weight == 0:
        multiplier.masked_fill_(denominator == 0, learner.center)
    multiplier.clamp_(0.0, LARGEST_MULTIPLIER)
    base, d, (_, a, b) = piece.base, piece.d, coordinate.signal
    if a:
        base.addcmul_(d, d, value=a / b)  # now u / b
    state.n_sum.addcmul_(d, d)
    state.u_sum.add_(base, alpha=b)
    return multiplier, b * inner(multiplier, base)


def _move(group: dict[str, Any], x: Tensor, d: Tensor, multiplier: Tensor, rate: Any, ok: Tensor | None) -> Tensor:
    """Move x along d; returns ||s d||^2. The multipliers are written to."""
    if group["weight_decay"] or x.dtype != d.dtype or isinstance(rate, Tensor):
        move_guarded(group, x, d, 1.0, multiplier * rate, ok)
        scaled = multiplier.mul_(d)
    else:
        scaled = multiplier.mul_(d)
        x.add_(scaled, alpha=rate if group["maximize"] else -rate)
    return inner(scaled, scaled)


def _scratch(kept: dict[torch.dtype, Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors like this one, from memory that is used again and again where allocating it would cost more."""
    if not SMALL < like.numel() <= CHUNK:
        return torch.empty_like(like), torch.empty_like(like)
    if like.dtype not in kept:
        kept[like.dtype] = torch.empty(2, CHUNK, dtype=like.dtype, device=like.device)
    first, second = kept[like.dtype][:, : like.numel()].unbind()
    return first.view(like.shape), second.view(like.shape)
