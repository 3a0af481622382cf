"""Parameters that are spread over ranks: DTensors, as fully_shard (FSDP2) and tensor parallelism make them.

Sums over a whole tensor are sums over its pieces: one all-reduce of a few numbers per tensor.

Under fully_shard a module computes with unsharded parameters, ordinary leaves of the autograd graph that are
registered in the module while it runs. A hook in front of such a leaf's gradient accumulator sees what every backward
computed on this rank, before the gradients of all ranks are averaged and scattered: each rank is one independent
gradient, as it is under DistributedDataParallel, whether the backward communicates or not.

What is measured of such a gradient is one of three (:data:`Measured`, known here and nowhere else):

* "whole": the sum over the rank's whole gradient, in Euclid's norm.
* "piece": in a metric, whose diagonal is in pieces like the parameter, the sum over the piece that the rank has of the
  parameter, times the number of pieces. Ranks draw their data from one distribution, so which of them measures a
  coordinate makes no difference to the mean: the estimate is unbiased, and costs no message.
* "mean": what each backward adds to the sharded ``.grad``. Then a backward is one gradient, whatever the number of
  ranks. For what has to be known per coordinate, and for the paper's two gradients.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sgdol.torch._world._alone import Listener, Own, Tap, World, arriving
from sgdol.torch._world._ddp import check_counts
from sgdol.torch._world._pieces import is_sharded, local, whole

__all__ = ["Measured", "Sharded"]

Measured = Literal["whole", "piece", "mean"]


class _Spread(NamedTuple):
    """How one parameter lies on the ranks."""

    pieces: int
    """On how many ranks the distinct pieces of the parameter are."""
    ranks: int
    """How many ranks have a gradient of their own data; 0 if nobody averages them."""
    measured: int
    """On how many ranks the distinct pieces of what is measured of one rank's own gradient are."""
    module: Any
    """The module that averages them."""


class Sharded(World):
    """The ranks over which some parameters are spread.

    Args:
        params: all parameters of the optimizer; some or all are DTensors.
        measured: what is measured of gradients.
        name: of the optimizer, for what the user is told.
    """

    spread, alone = True, False

    def __init__(self, params: list[Tensor], measured: Measured, name: str) -> None:
        self._params = params
        self._measured, self._own = measured, measured != "mean"
        self._spread = {p: _Spread(_pieces(p), 0, 0, None) for p in params}
        self._modules = _owned_parameters({id(p) for p in params})
        self._managed = {p for owned in self._modules.values() for *_, p in owned}
        self._listeners: dict[Tensor, Listener] = {}
        self._leaves: dict[Tensor, Tap] = {}
        self._handles: list[Any] = []
        self._group: tuple[dist.ProcessGroup | None, int] | None = None
        for p in params:
            if is_sharded(p) and any(placement.is_partial() for placement in whole(p).placements):
                raise ValueError(
                    f"{name} needs parameters that are sharded or replicated, got a DTensor of shape {tuple(p.shape)} "
                    f"with placements {whole(p).placements}"
                )
        for module, owned in self._modules.items():
            # fully_shard's own hook, which registers the unsharded parameters, was there first and so runs first.
            self._handles.append(module.register_forward_pre_hook(_on_forward(weakref.ref(self), owned)))
        weakref.finalize(self, _remove, self._handles, self._leaves)

    def tap(self, param: Tensor, tap: Tap, listener: Listener) -> None:
        """Of a parameter that fully_shard manages: at the leaves that its module computes with."""
        if param not in self._managed:
            super().tap(param, tap, listener)
        elif param not in self._listeners and param.requires_grad:
            self._listeners[param] = listener
            if not self._own:
                self._handles.append(param.register_post_accumulate_grad_hook(lambda _: listener.reduced()))

    def _found(self, module: Any, param: Tensor, leaf: Tensor) -> None:
        """A module starts to compute with the leaf in place of the parameter."""
        others = whole(leaf).device_mesh.size() if is_sharded(leaf) else 1
        ranks = whole(param).device_mesh.size() // others
        self._spread[param] = _Spread(
            _pieces(param), ranks, _pieces(leaf if self._measured == "whole" else param), module
        )
        listener = self._listeners.get(param)
        if listener is not None and leaf.requires_grad:
            cut = _cut(param, leaf) if self._measured == "piece" else None
            tap = self._leaves.setdefault(param, Tap())
            tap.attach(leaf, arriving(listener, leaf, cut) if self._own else lambda _: listener.begun())

    def reduces(self, param: Tensor) -> bool:
        """fully_shard keeps what it has not reduced yet to itself."""
        return param in self._managed

    def waits(self, param: Tensor) -> bool:
        """``.grad`` is, or will be, the mean over the ranks."""
        return param in self._managed and self._own

    @property
    def ranks(self) -> int:  # type: ignore[override]
        """How many ranks have an independent gradient in each backward."""
        return (max((s.ranks for s in self._spread.values()), default=1) or 1) if self._own else 1

    def averages(self, param: Tensor) -> bool:
        """Whether fully_shard does: also parameters that it does not manage may be here."""
        return self.ranks == 1 or self._spread[param].ranks > 0

    def reshard(self) -> None:
        """Let every module gather its parameters anew: some may have kept a copy."""
        for module in self._modules:
            module.reshard()

    def mean(self, *values: float) -> list[float]:
        """Over all ranks: of those that share one gradient all have the same loss, up to rounding."""
        like = torch.tensor(values, dtype=torch.float64)
        return (self._sum(like) / self._reduction()[1]).tolist()

    def total(self, params: list[Tensor], rows: Tensor) -> Tensor:
        """Over all pieces, each counted once."""
        size = self._reduction()[1]
        pieces = rows.new_tensor([self._spread[p].pieces / size for p in params])
        return self._sum(rows * pieces)

    def share(self, params: list[Tensor], own: Own) -> Own:
        """One all-reduce for everything; squares per coordinate are those of averaged gradients already."""
        size = self._reduction()[1]
        spread = [self._spread[p] for p in params]
        pieces = own.rows.new_tensor([s.pieces / size for s in spread])
        weights = own.rows.new_tensor([_weight(s) / size for s in spread]) if self._own else pieces
        passes = torch.full_like(own.q, own.passes)
        flat = self._sum(torch.stack([*(own.rows * pieces), own.q * weights, own.seen, passes, passes.square()]))
        check_counts(flat[-2:, 0], size)
        *rows, q, seen, _, _ = flat.unbind()
        return own._replace(rows=torch.stack(rows), q=q, seen=seen)

    def _sum(self, flat: Tensor) -> Tensor:
        group, size = self._reduction()
        if size == 1:
            return flat
        moved = flat.to(_reduction_device(self._params, flat.device), copy=True)
        dist.all_reduce(moved, group=group)
        return moved.to(flat.device)

    def _reduction(self) -> tuple[dist.ProcessGroup | None, int]:
        """The process group of all ranks that have pieces, and its size."""
        if self._group is None:
            meshes = [whole(p).device_mesh for p in self._params if is_sharded(p)]
            ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
            alike = [mesh for mesh in meshes if mesh.ndim == 1 and mesh.size() == len(ranks)]
            if alike:
                self._group = alike[0].get_group(), len(ranks)
            elif len(ranks) == dist.get_world_size():
                self._group = None, len(ranks)
            else:
                self._group = dist.new_group(ranks, use_local_synchronization=True), len(ranks)
        return self._group


def _pieces(tensor: Tensor) -> int:
    """How many distinct pieces a tensor has."""
    if not is_sharded(tensor):
        return 1
    mesh, product = whole(tensor).device_mesh, 1
    for dimension, placement in enumerate(whole(tensor).placements):
        product *= 1 if placement.is_replicate() else mesh.size(dimension)
    return product


def _cut(param: Tensor, leaf: Tensor) -> list[tuple[int, int, int]]:
    """Where this rank's piece of a parameter is in the leaf: (dimension, start, length) of each cut."""
    dtensor, found = whole(param), []
    inner = whole(leaf).device_mesh.ndim if is_sharded(leaf) else 0  # fully_shard cuts what tensor parallelism has cut
    for d, placement in enumerate(dtensor.placements[: dtensor.device_mesh.ndim - inner]):
        if not placement.is_replicate():
            size = local(leaf.detach()).shape[placement.dim]
            share = -(-size // dtensor.device_mesh.size(d))
            start = min(share * dtensor.device_mesh.get_local_rank(d), size)
            found.append((placement.dim, start, min(share, size - start)))
    return found


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
    kinds = {whole(p).device_mesh.device_type for p in params if is_sharded(p)}
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


def _on_forward(world: weakref.ref[Sharded], owned: list[tuple[torch.nn.Module, str, Tensor]]) -> Any:
    @torch.compiler.disable  # bookkeeping: nothing to trace
    def before_forward(module: torch.nn.Module, _: Any) -> None:
        here = world()  # a module may outlive its optimizer
        if here is None or torch.is_inference_mode_enabled():
            return
        for owner, name, param in owned:
            leaf = getattr(owner, name)
            if leaf is not param:
                here._found(module, param, leaf)

    return before_forward


def _remove(handles: list[Any], leaves: dict[Tensor, Tap]) -> None:
    for handle in [*handles, *leaves.values()]:
        handle.remove()
    handles.clear()
    leaves.clear()
