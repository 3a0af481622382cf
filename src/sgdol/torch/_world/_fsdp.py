"""Sharded parameters: DTensors, as fully_shard (FSDP2) and tensor parallelism make them.

A sum over a tensor is the sum over its pieces: one all-reduce of a few numbers per tensor.

Under fully_shard a module computes with unsharded parameters. These are ordinary leaves of the autograd graph, and are
registered in the module while it runs. A hook in front of such a leaf's gradient accumulator sees what a backward has
computed on this rank, before the gradients of all ranks are averaged and scattered. So each rank is one independent
gradient, as under DistributedDataParallel, whether the backward communicates or not.

What is measured of such a gradient is one of three (:data:`Measured`):

* "whole": the sum over the rank's whole gradient, in Euclid's norm.
* "piece": in a metric, whose diagonal is sharded like the parameter, the sum over the rank's piece of the parameter,
  times the number of pieces. The ranks draw their data from one distribution, so the estimate is unbiased whichever
  rank measures a coordinate, and it costs no message.
* "mean": what each backward adds to the sharded ``.grad``. Then a backward is one gradient, whatever the number of
  ranks. This is for one step size per coordinate, and for the paper's estimator.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sgdol.torch._world._alone import LocalSums, Tap, World
from sgdol.torch._world._ddp import check_counts
from sgdol.torch._world._pieces import is_sharded, local, placed_like, plain, whole

__all__ = ["Measured", "Sharded"]

Measured = Literal["whole", "piece", "mean"]


class _Distribution(NamedTuple):
    """How one parameter is distributed over the ranks."""

    pieces: int  # distinct pieces of the parameter
    ranks: int  # ranks whose gradients fully_shard averages; 0 if it does not manage the parameter
    measured: int  # distinct pieces of what is measured of one rank's gradient
    module: Any  # the fully_shard module


class Sharded(World):
    """The ranks that have the pieces of sharded parameters.

    Args:
        params: all parameters of the optimizer; at least one is a DTensor.
        measured: what is measured of gradients.
        name: the name of the optimizer, for messages.
    """

    spread, alone = True, False

    def __init__(self, params: list[Tensor], measured: Measured, name: str) -> None:
        self._params = params
        self._measured, self._per_rank = measured, measured != "mean"
        self._distributions = {p: _Distribution(_pieces(p), 0, 0, None) for p in params}
        self._modules = _owned_parameters({id(p) for p in params})
        self._managed = {p for owned in self._modules.values() for *_, p in owned}
        self._listeners: dict[Tensor, Any] = {}
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

    def tap(self, param: Tensor, listener: Any) -> None:
        # _leaf_found() taps the leaves that the parameter's module computes with.
        if param not in self._listeners and param.requires_grad:
            self._listeners[param] = listener
            if not self._per_rank:
                self._handles.append(param.register_post_accumulate_grad_hook(listener.reduced))

    def _leaf_found(self, module: Any, param: Tensor, leaf: Tensor) -> None:
        # The module is about to compute with the unsharded leaf. With tensor parallelism that is a DTensor itself, over
        # ``others`` ranks that compute one gradient together.
        others = whole(leaf).device_mesh.size() if is_sharded(leaf) else 1
        ranks = whole(param).device_mesh.size() // others
        self._distributions[param] = _Distribution(
            _pieces(param), ranks, _pieces(leaf if self._measured == "whole" else param), module
        )
        listener = self._listeners.get(param)
        if listener is not None and leaf.requires_grad:
            cut = _cut(param, leaf) if self._measured == "piece" else None
            tap = self._leaves.setdefault(param, Tap())
            tap.attach(leaf, _arrival_hook(listener, leaf, cut) if self._per_rank else listener.begun)

    def reduces(self, param: Tensor) -> bool:
        return param in self._managed

    def waits(self, param: Tensor) -> bool:
        return param in self._managed and self._per_rank

    @property
    def ranks(self) -> int:  # type: ignore[override]
        return max([1, *(d.ranks for d in self._distributions.values())]) if self._per_rank else 1

    def averages(self, param: Tensor) -> bool:
        return self.ranks == 1 or self._distributions[param].ranks > 0  # parameters that are not managed may be here

    def reshard(self) -> None:
        for module in self._modules:
            module.reshard()

    def mean(self, *values: float) -> list[float]:
        # Over all ranks: those that compute one gradient together have the same loss.
        like = torch.tensor(values, dtype=torch.float64)
        return (self._sum(like) / self._reduction()[1]).tolist()

    def total(self, params: list[Tensor], rows: Tensor) -> Tensor:
        size = self._reduction()[1]
        # Each distinct piece is on size/pieces ranks, and has to be counted once.
        pieces = rows.new_tensor([self._distributions[p].pieces / size for p in params])
        return self._sum(rows * pieces)

    def share(self, params: list[Tensor], sums: LocalSums) -> LocalSums:
        # sums.squares, per coordinate, are those of averaged gradients (measured="mean") and stay as they are.
        size = self._reduction()[1]
        distributions = [self._distributions[p] for p in params]
        pieces = sums.rows.new_tensor([d.pieces / size for d in distributions])
        weights = sums.rows.new_tensor([_weight(d) / size for d in distributions]) if self._per_rank else pieces
        passes = torch.full_like(sums.q, sums.passes)
        flat = self._sum(torch.stack([*(sums.rows * pieces), sums.q * weights, sums.seen, passes, passes.square()]))
        check_counts(flat[-2:, 0], size)
        *rows, q, seen, _, _ = flat.unbind()
        return sums._replace(rows=torch.stack(rows), q=q, seen=seen)

    def _sum(self, flat: Tensor) -> Tensor:
        group, size = self._reduction()
        if size == 1:
            return flat
        moved = flat.to(_reduction_device(self._params, flat.device), copy=True)  # all_reduce writes to it
        dist.all_reduce(moved, group=group)
        return moved.to(flat.device)

    def _reduction(self) -> tuple[dist.ProcessGroup | None, int]:
        if self._group is None:
            meshes = [whole(p).device_mesh for p in self._params if is_sharded(p)]
            ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
            whole_meshes = [mesh for mesh in meshes if mesh.ndim == 1 and mesh.size() == len(ranks)]
            if whole_meshes:
                self._group = whole_meshes[0].get_group(), len(ranks)
            elif len(ranks) == dist.get_world_size():
                self._group = None, len(ranks)  # the default group
            else:
                self._group = dist.new_group(ranks, use_local_synchronization=True), len(ranks)
        return self._group


def _pieces(tensor: Tensor) -> int:
    if not is_sharded(tensor):
        return 1
    mesh, product = whole(tensor).device_mesh, 1
    for dimension, placement in enumerate(whole(tensor).placements):
        product *= 1 if placement.is_replicate() else mesh.size(dimension)
    return product


def _arrival_hook(listener: Any, leaf: Tensor, cut: list[tuple[int, int, int]] | None) -> Any:
    """Hook in front of a leaf's accumulator, which gives this rank's piece of each gradient to the listener."""
    owner = weakref.ref(leaf)  # weak: the leaf's accumulator has this hook

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        gradient, leaf = gradients[0], owner()
        if gradient is None or leaf is None:
            return
        piece = plain(placed_like(gradient, leaf))
        for dimension, start, length in cut or ():
            piece = piece.narrow(dimension, start, length)
        listener((piece if cut is None else piece.clone(),))  # a view would keep the whole gradient alive

    return hook


def _cut(param: Tensor, leaf: Tensor) -> list[tuple[int, int, int]]:
    """Where this rank's piece of a parameter is in the leaf: (dimension, start, length) of each cut."""
    dtensor, cuts = whole(param), []
    inner = whole(leaf).device_mesh.ndim if is_sharded(leaf) else 0  # fully_shard cuts what tensor parallelism has cut
    for d, placement in enumerate(dtensor.placements[: dtensor.device_mesh.ndim - inner]):
        if not placement.is_replicate():
            size = local(leaf.detach()).shape[placement.dim]
            # As torch.chunk does it: pieces of ceil(size/ranks), the last ones shorter or empty.
            share = -(-size // dtensor.device_mesh.size(d))
            start = min(share * dtensor.device_mesh.get_local_rank(d), size)
            cuts.append((placement.dim, start, min(share, size - start)))
    return cuts


def _weight(distribution: _Distribution) -> float:
    """The factor of the mean over all ranks of their q: ranks * measured / divisor^2.

    A contribution to ``.grad`` is 1/divisor of the rank's gradient, and each rank measures 1/measured of it.
    """
    if not distribution.ranks:
        return distribution.pieces
    return distribution.ranks * distribution.measured / _divisor(distribution) ** 2


def _divisor(distribution: _Distribution) -> float:
    # fully_shard divides the sum over the ranks by their number, unless set_gradient_divide_factor() was called.
    try:
        groups = distribution.module._get_fsdp_state()._fsdp_param_groups
    except AttributeError:  # torch keeps that factor in a private place, which may change
        return distribution.ranks
    factors = [getattr(group, "gradient_divide_factor", None) for group in groups]
    return distribution.ranks if not factors or factors[0] is None else factors[0]


def _reduction_device(params: list[Tensor], device: torch.device) -> torch.device:
    # The process groups of a mesh reduce tensors of its kind of device; offloaded parameters are on the host.
    kinds = {whole(p).device_mesh.device_type for p in params if is_sharded(p)}
    return device if device.type in kinds else torch.device(kinds.pop())


def _owned_parameters(ids: set[int]) -> dict[Any, list[tuple[torch.nn.Module, str, Tensor]]]:
    """For each fully_shard module the parameters that it manages, as (owning submodule, attribute name, parameter).

    An optimizer is given parameters, not modules: the garbage collector, which knows every live object, is asked.
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
    # Without submodules of this kind, which manage their own parameters.
    modules = [module]
    for child in module.children():
        if not isinstance(child, kind):
            modules += _within(child, kind)
    return modules


def _on_forward(world: weakref.ref[Sharded], owned: list[tuple[torch.nn.Module, str, Tensor]]) -> Any:
    @torch.compiler.disable  # bookkeeping: nothing to trace
    def before_forward(module: torch.nn.Module, _: Any) -> None:
        here = world()  # a module may outlive its optimizer
        if here is None or torch.is_inference_mode_enabled():
            return
        for owner, name, param in owned:
            leaf = getattr(owner, name)
            if leaf is not param:
                here._leaf_found(module, param, leaf)

    return before_forward


def _remove(handles: list[Any], leaves: dict[Tensor, Tap]) -> None:
    for handle in [*handles, *leaves.values()]:
        handle.remove()
    handles.clear()
    leaves.clear()
