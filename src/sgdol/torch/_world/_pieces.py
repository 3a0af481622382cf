"""Pieces of tensors: a DTensor's on this rank; an ordinary tensor is its own piece.

Every rank works on its own piece of each tensor. The optimizer's own tensors (momentum, held gradient, per-coordinate
sums, the metric's roots) are DTensors like the parameter, so that they are sharded, saved and loaded like it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = [
    "ORDINARY",
    "fitted",
    "is_sharded",
    "like_parameter",
    "local",
    "piece_of",
    "placed_like",
    "plain",
    "real_view",
    "whole",
]

ORDINARY = frozenset({Tensor, Parameter})
"""What most tensors are: these are let through first, on the way of every parameter in every step."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor: a piece of a tensor that several ranks have together."""
    return type(tensor) not in ORDINARY and hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Any:
    """The same tensor, as a DTensor; importing that class takes its time, so that nobody does who has none."""
    return tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, for reading and writing; an ordinary tensor is its own piece. To be called without grad."""
    if type(tensor) in ORDINARY:
        return tensor
    return whole(tensor).to_local() if is_sharded(tensor) else plain(tensor)


def plain(tensor: Tensor) -> Tensor:
    """The same memory without a subclass that only adds methods; one with kernels of its own stays what it is."""
    bare = type(tensor) not in ORDINARY and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return tensor.as_subclass(Tensor) if bare else tensor


def placed_like(tensor: Tensor, owner: Tensor) -> Tensor:
    """This rank's piece of a tensor, cut as the owner is: tensor parallelism leaves some gradients as partial sums."""
    if not is_sharded(tensor):
        return tensor
    if is_sharded(owner) and whole(tensor).placements != whole(owner).placements:
        tensor = whole(tensor).redistribute(whole(owner).device_mesh, whole(owner).placements)
    piece = local(tensor)
    return piece.wait() if hasattr(piece, "wait") else piece


def real_view(tensor: Tensor) -> Tensor:
    """The tensor, complex numbers seen as pairs of real ones; writing to the view writes to the tensor."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def piece_of(tensor: Tensor, param: Tensor) -> Tensor:
    """This rank's real piece of a tensor that belongs to the parameter, such as its gradient; not to be written to."""
    piece = plain(placed_like(tensor, param))
    return real_view(piece.resolve_conj())  # autograd may leave a complex gradient as a lazy conjugate


def like_parameter(piece: Tensor, param: Tensor) -> Tensor:
    """A tensor of this piece on this rank, spread over the ranks as the parameter is.

    It has the parameter's shape, or, for a complex parameter whose real and imaginary parts are apart, one dimension
    more.
    """
    if not is_sharded(param):
        return piece
    from torch.distributed.tensor import DTensor

    shape, stride = param.shape, param.stride()
    if piece.dim() > param.dim():
        shape, stride = torch.Size([*shape, 2]), (*(2 * s for s in stride), 1)
    mesh, placements = whole(param).device_mesh, whole(param).placements
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def fitted(value: Tensor, param: Tensor) -> Tensor:
    """A copy of a loaded value, spread over the ranks as the parameter is; a single number stays one."""
    if is_sharded(value) and not is_sharded(param):
        value = whole(value).full_tensor()
    if is_sharded(param) and value.dim():
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = whole(param).device_mesh, whole(param).placements
        if not is_sharded(value):
            value = distribute_tensor(value.to(param.device), mesh, placements, src_data_rank=None)
        elif (whole(value).device_mesh, whole(value).placements) != (mesh, placements):
            value = whole(value).redistribute(mesh, placements)
    return value.detach().to(device=param.device, copy=True)
