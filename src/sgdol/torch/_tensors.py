"""Types, real views and the few kernels that everything else is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "inner",
    "norm",
    "product_dtype",
    "real_gradient",
    "real_view",
    "scalar_dtype",
    "size",
    "squared_norms",
    "stacked",
    "wide_dtype",
]

NARROW = frozenset({torch.float16, torch.bfloat16})

SAFE = (1e-15, 1e15)
"""Lengths between which squares in float32 neither overflow nor lose digits; outside they are taken in float64."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real type in which sums over a tensor of this type are kept: float32 or wider."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The type of the sums over time: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def real_view(tensor: Tensor) -> Tensor:
    """The tensor, complex numbers seen as pairs of real ones; writing to the view writes to the tensor."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_gradient(gradient: Tensor) -> Tensor:
    """The same for a gradient, which autograd may leave as a lazy conjugate; not to be written to."""
    return real_view(gradient.resolve_conj()) if gradient.is_complex() else gradient


def size(tensor: Tensor) -> int:
    """How many real numbers a tensor has, over all ranks."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def norm(tensor: Tensor) -> Tensor:
    """||tensor||, in float32 or wider: unsquared, because squares leave float32's range first."""
    length = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.dtype in NARROW else None)
    if _may_look(length) and not SAFE[0] < _number(length) < SAFE[1]:
        return torch.linalg.vector_norm(tensor.to(torch.complex128 if tensor.is_complex() else torch.float64))
    return length


def squared_norms(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """The squared norm of each tensor, as one vector of the type of ``like``."""
    if not tensors:
        return like.new_zeros(0)
    first = tensors[0]
    dtype, device = first.dtype, first.device
    plain = dtype not in NARROW and not first.is_complex()
    if len(tensors) > 1 and plain and all(t.dtype == dtype and t.device == device for t in tensors):
        lengths = torch._foreach_norm(list(tensors))
        together = stacked(lengths, like)
        if _may_look(lengths[0]):
            numbers: list[float] = together.tolist()
            if not (SAFE[0] < min(numbers) and max(numbers) < SAFE[1]):
                return stacked([norm(t) for t in tensors], like).square_()
        return together.square_()
    return stacked([norm(t) for t in tensors], like).square_()


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>, in float32 or wider."""
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else wide_dtype(a.dtype)
    if a.dtype != wide or b.dtype != wide:
        a, b = a.to(wide), b.to(wide)
    a, b = a.reshape(-1), b.reshape(-1)
    product = torch.dot(a, b)
    if _may_look(product) and not SAFE[0] ** 2 < abs(_number(product)) < SAFE[1] ** 2:
        return torch.dot(a.to(torch.float64), b.to(torch.float64))
    return product


def product_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type in which squares of single entries are kept, float32 or wider; None if all entries are 0."""
    wide = wide_dtype(tensor.dtype)
    if wide == torch.float64 or tensor.device.type != "cpu" or type(tensor) is not Tensor or not tensor.numel():
        return wide
    largest = _number(torch.linalg.vector_norm(tensor, torch.inf))
    if largest == 0:
        return None
    return wide if SAFE[0] ** 0.75 < largest < SAFE[1] or not math.isfinite(largest) else torch.float64


def _number(scalar: Tensor) -> float:
    number: Any = scalar.tolist()
    return number


def _may_look(number: Tensor) -> bool:
    """Whether a number is on the host, and of a type that a square may leave."""
    return number.dtype == torch.float32 and number.device.type == "cpu" and type(number) is Tensor


def stacked(scalars: Sequence[Any], like: Tensor) -> Tensor:
    """These numbers on their devices as one new vector of the type of ``like``."""
    if not scalars:
        return like.new_zeros(0)
    first = scalars[0]
    if all(s.dtype == first.dtype and s.device == first.device for s in scalars):
        together = torch.stack(list(scalars))
        return together if together.dtype == like.dtype and together.device == like.device else together.to(like)
    return torch.stack([s.to(like) for s in scalars])
