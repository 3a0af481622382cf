"""This rank's pieces of tensors: of a DTensor its local tensor; an ordinary tensor is its own piece.

Every rank computes with its own piece of each tensor. The optimizer's state of a sharded parameter consists of DTensors
like the parameter, so that it is saved and loaded as the parameter is.
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
    "shard_of",
    "whole",
]

# The usual types, which are asked for first, because this is done for every parameter in every step.
ORDINARY = frozenset({Tensor, Parameter})


def is_sharded(tensor: Tensor) -> bool:
    # Whether it is a DTensor, without importing that class, which takes time.
    return type(tensor) not in ORDINARY and hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Any:
    # For type checkers: a DTensor has attributes that Tensor has not.
    return tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, for reading and writing. To be called under ``torch.no_grad()``."""
    if type(tensor) in ORDINARY:
        return tensor
    return whole(tensor).to_local() if is_sharded(tensor) else plain(tensor)


def plain(tensor: Tensor) -> Tensor:
    """The tensor as a ``torch.Tensor`` if its class only adds methods; one with kernels of its own stays as it is."""
    bare = type(tensor) not in ORDINARY and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return tensor.as_subclass(Tensor) if bare else tensor


def placed_like(tensor: Tensor, owner: Tensor) -> Tensor:
    """This rank's piece of a tensor such as a gradient, distributed as the parameter ``owner`` is."""
    if not is_sharded(tensor):
        return tensor
    if is_sharded(owner) and whole(tensor).placements != whole(owner).placements:
        # Tensor parallelism leaves some gradients as partial sums.
        tensor = whole(tensor).redistribute(whole(owner).device_mesh, whole(owner).placements)
    piece = local(tensor)
    return piece.wait() if hasattr(piece, "wait") else piece  # it may still be on its way


def real_view(tensor: Tensor) -> Tensor:
    # A complex tensor as pairs of real numbers in the same memory.
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def piece_of(tensor: Tensor, param: Tensor) -> Tensor:
    """This rank's real piece of a tensor that belongs to a parameter, such as its gradient. Read-only."""
    piece = plain(placed_like(tensor, param))
    return real_view(piece.resolve_conj())  # autograd may leave a complex gradient as a lazy conjugate


def like_parameter(piece: Tensor, param: Tensor) -> Tensor:
    """A tensor distributed as the parameter is, of which ``piece`` is this rank's piece.

    It has the parameter's shape, or one more dimension of 2 if the pieces of a complex parameter are pairs of reals.
    """
    if not is_sharded(param):
        return piece
    from torch.distributed.tensor import DTensor

    shape, stride = param.shape, param.stride()
    if piece.dim() > param.dim():
        shape, stride = torch.Size([*shape, 2]), (*(2 * s for s in stride), 1)
    mesh, placements = whole(param).device_mesh, whole(param).placements
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def shard_of(param: Tensor) -> tuple[int, ...]:
    """Which of the pieces of a sharded parameter this rank has. Replicas have the same; () of an ordinary parameter."""
    if not is_sharded(param):
        return ()
    coordinates = whole(param).device_mesh.get_coordinate() or ()
    placed = zip(coordinates, whole(param).placements, strict=False)
    return tuple(coordinate for coordinate, placement in placed if not placement.is_replicate())


def fitted(value: Tensor, param: Tensor) -> Tensor:
    """A copy of a loaded value on the parameter's device, distributed as the parameter is; a scalar stays a scalar."""
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
