"""Parameters that are spread over ranks: DTensors, as fully_shard (FSDP2) and tensor parallelism make them.

Every rank works on its own piece of each tensor, and sums over a whole tensor are sums over the pieces: one all-reduce
of a few numbers per tensor. The optimizer's own tensors (momentum, held gradient, per-coordinate sums) are DTensors
like the parameter, so that they are sharded, saved and loaded like it.

Under fully_shard a module computes with unsharded parameters, ordinary leaves of the autograd graph that are
registered in the module while it runs. A hook in front of such a leaf's gradient accumulator sees what every backward
computed on this rank, before the gradients of all ranks are averaged and scattered: each rank is one independent
gradient, as it is under DistributedDataParallel, whether the backward communicates or not.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Shards", "fitted", "is_sharded", "like_parameter", "local", "local_gradient", "placed_like"]

Follow = Callable[[Tensor, Tensor], None]
"""What is told (leaf, parameter) when a module starts to compute with the leaf in place of the parameter."""


_ORDINARY = frozenset({Tensor, Parameter})
"""What most tensors are: these are let through first, on the way of every parameter in every step."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor: a piece of a tensor that several ranks have together."""
    return type(tensor) not in _ORDINARY and hasattr(tensor, "device_mesh")


def _whole(tensor: Tensor) -> Any:
    """The same tensor, as a DTensor; importing that class takes its time, so that nobody does who has none."""
    return tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, for reading and writing; an ordinary tensor is its own piece. To be called without grad."""
    return tensor if type(tensor) in _ORDINARY or not is_sharded(tensor) else _whole(tensor).to_local()


def placed_like(tensor: Tensor, owner: Tensor) -> Tensor:
    """This rank's piece of a tensor, cut as the owner is: tensor parallelism leaves some gradients as partial sums."""
    if not is_sharded(tensor):
        return tensor
    if is_sharded(owner) and _whole(tensor).placements != _whole(owner).placements:
        tensor = _whole(tensor).redistribute(_whole(owner).device_mesh, _whole(owner).placements)
    piece = local(tensor)
    return piece.wait() if hasattr(piece, "wait") else piece


def local_gradient(param: Tensor) -> Tensor:
    """This rank's piece of the parameter's gradient, zero if it has none in this step."""
    grad = param.grad
    if type(grad) in _ORDINARY:
        return grad  # type: ignore[return-value]
    return torch.zeros_like(local(param)) if grad is None else placed_like(grad, param)


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
    mesh, placements = _whole(param).device_mesh, _whole(param).placements
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def fitted(value: Tensor, param: Tensor) -> Tensor:
    """A copy of a loaded value, spread over the ranks as the parameter is; a single number stays one."""
    if is_sharded(value) and not is_sharded(param):
        value = _whole(value).full_tensor()
    if is_sharded(param) and value.dim():
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = _whole(param).device_mesh, _whole(param).placements
        if not is_sharded(value):
            value = distribute_tensor(value.to(param.device), mesh, placements, src_data_rank=None)
        elif (_whole(value).device_mesh, _whole(value).placements) != (mesh, placements):
            value = _whole(value).redistribute(mesh, placements)
    return value.detach().to(device=param.device, copy=True)


class _Spread(NamedTuple):
    """How one parameter lies on the ranks."""

    pieces: int
    """On how many ranks the distinct pieces of the parameter are."""
    ranks: int
    """How many ranks have a gradient of their own data; 0 if nobody averages them."""
    measured: int
    """On how many ranks the distinct pieces of one rank's own gradient are: more than one for tensor parallelism."""
    module: Any
    """The module that averages them."""


class Shards:
    """The ranks over which some parameters are spread.

    Args:
        params: all parameters of the optimizer; some or all are DTensors.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = list(params)
        self._spread = {p: _Spread(_pieces(p), 0, 0, None) for p in self._params}
        self._owned = _owned_parameters({id(p) for p in self._params})
        self.managed = {p for owned in self._owned.values() for *_, p in owned}
        """The parameters that fully_shard manages."""
        self._handles: list[Any] = []
        self._group: tuple[dist.ProcessGroup | None, int] | None = None
        weakref.finalize(self, _remove, self._handles)
        for p in self._params:
            if is_sharded(p) and any(placement.is_partial() for placement in _whole(p).placements):
                raise ValueError(
                    f"SGDOL needs parameters that are sharded or replicated, got a DTensor of shape {tuple(p.shape)} "
                    f"with placements {_whole(p).placements}"
                )

    def follow(self, tell: Follow) -> None:
        """Tell which leaves the modules compute with, whenever they start to."""
        _remove(self._handles)
        listener = weakref.WeakMethod(tell)  # a module may outlive its optimizer
        for module, owned in self._owned.items():
            # fully_shard's own hook, which registers the unsharded parameters, was there first and so runs first.
            self._handles.append(module.register_forward_pre_hook(_on_forward(weakref.ref(self), owned, listener)))

    def _found(self, module: Any, param: Tensor, leaf: Tensor) -> None:
        others = _whole(leaf).device_mesh.size() if is_sharded(leaf) else 1
        ranks = _whole(param).device_mesh.size() // others
        self._spread[param] = _Spread(_pieces(param), ranks, _pieces(leaf), module)

    def reshard(self) -> None:
        """Let every module gather its parameters anew: they have been written to, and some may have kept a copy."""
        for module in self._owned:
            module.reshard()

    @property
    def count(self) -> int:
        """How many ranks have an independent gradient in each backward."""
        return max((s.ranks for s in self._spread.values()), default=1) or 1

    @property
    def size(self) -> int:
        """Over how many ranks the sums go."""
        return self._reduction()[1]

    def averaged(self, params: list[Tensor]) -> list[bool]:
        """Whether the gradient of each parameter is the mean of what the ranks had."""
        return [self._spread[p].ranks > 0 for p in params]

    def sums(self, params: list[Tensor], rows: Tensor, contributions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sums over whole tensors and over ranks, by one all-reduce.

        Args:
            params: the parameters that the columns belong to.
            rows: shape (any, parameters): sums over this rank's pieces.
            contributions: shape (any, parameters): the first row is Q, the sum of the squares of this rank's own
                gradients; others are summed over the ranks as they are.

        Returns:
            The rows over all pieces, each counted once, and the contributions over all ranks, Q in the scale of the
            averaged gradient.
        """
        group, size = self._reduction()
        spread = [self._spread[p] for p in params]
        pieces = rows.new_tensor([s.pieces / size for s in spread])
        extra = rows[:0] if contributions is None else contributions.to(rows, copy=True)
        if len(extra):
            extra[0] *= rows.new_tensor([_weight(s) / size for s in spread])
        flat = torch.cat([rows * pieces, extra])
        if size > 1:
            device = _reduction_device(self._params, flat.device)
            moved = flat.to(device)
            dist.all_reduce(moved, group=group)
            flat = moved.to(flat.device)
        return flat[: len(rows)], flat[len(rows) :]

    def _reduction(self) -> tuple[dist.ProcessGroup | None, int]:
        """The process group of all ranks that have pieces, and its size."""
        if self._group is None:
            meshes = [_whole(p).device_mesh for p in self._params if is_sharded(p)]
            ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
            whole = [mesh for mesh in meshes if mesh.ndim == 1 and mesh.size() == len(ranks)]
            if whole:
                self._group = whole[0].get_group(), len(ranks)
            elif len(ranks) == dist.get_world_size():
                self._group = None, len(ranks)
            else:
                self._group = dist.new_group(ranks, use_local_synchronization=True), len(ranks)
        return self._group


def _pieces(tensor: Tensor) -> int:
    """How many distinct pieces a tensor has."""
    if not is_sharded(tensor):
        return 1
    mesh, product = _whole(tensor).device_mesh, 1
    for dimension, placement in enumerate(_whole(tensor).placements):
        product *= 1 if placement.is_replicate() else mesh.size(dimension)
    return product


def _weight(spread: _Spread) -> float:
    """What the sum over all ranks of their own sums of squares is to be multiplied by, but for the number of ranks."""
    if not spread.ranks:
        return spread.pieces
    return spread.ranks * spread.measured / _divisor(spread) ** 2


def _divisor(spread: _Spread) -> float:
    """What the sum of the ranks' gradients has been divided by: their number, unless the user has said otherwise."""
    try:
        groups = spread.module._get_fsdp_state()._fsdp_param_groups
    except AttributeError:  # how set_gradient_divide_factor keeps its value is torch's own business
        return spread.ranks
    factors = [getattr(group, "gradient_divide_factor", None) for group in groups]
    return spread.ranks if not factors or factors[0] is None else factors[0]


def _reduction_device(params: list[Tensor], device: torch.device) -> torch.device:
    """Where numbers have to be to be reduced: on the mesh's kind of device, also if parameters are offloaded."""
    kinds = {_whole(p).device_mesh.device_type for p in params if is_sharded(p)}
    return device if device.type in kinds else torch.device(kinds.pop())


def _owned_parameters(ids: set[int]) -> dict[Any, list[tuple[torch.nn.Module, str, Tensor]]]:
    """Which of these parameters each fully_shard module has to itself: (module, name of the attribute, parameter).

    An optimizer is given parameters, not modules; the garbage collector knows every live module.
    """
    if not dist.is_available():
        return {}
    from torch.distributed.fsdp import FSDPModule

    modules = [m for m in gc.get_objects() if issubclass(type(m), FSDPModule)]
    owned: dict[Any, list[tuple[torch.nn.Module, str, Tensor]]] = {}
    for module in modules:
        for owner in _within(module, FSDPModule):
            for name, param in owner.named_parameters(recurse=False):
                if id(param) in ids and is_sharded(param):
                    owned.setdefault(module, []).append((owner, name, param))
    return owned


def _within(module: torch.nn.Module, kind: type) -> list[torch.nn.Module]:
    """The module and those inside it, but for other modules of this kind and what is inside them."""
    found = [module]
    for child in module.children():
        if not isinstance(child, kind):
            found += _within(child, kind)
    return found


def _on_forward(shards: weakref.ref[Shards], owned: list[tuple[torch.nn.Module, str, Tensor]], listener: Any) -> Any:
    @torch.compiler.disable  # bookkeeping: nothing to trace
    def before_forward(module: torch.nn.Module, _: Any) -> None:
        recorder, tell = shards(), listener()
        if recorder is None or tell is None or torch.is_inference_mode_enabled():
            return
        for owner, name, param in owned:
            leaf = getattr(owner, name)
            if leaf is not param:
                recorder._found(module, param, leaf)
                tell(leaf, param)

    return before_forward


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
