"""A small network, spread over gloo ranks in every way that torch has, and its batches."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BATCH = 4
WIDTH = 7
"""Not divisible by the number of ranks; and on four ranks the last bias, of one entry, leaves three without any."""


def model(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
    ).to(dtype)


def batches(step: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return list(torch.randn(count, BATCH, 5, generator=generator, dtype=torch.float64).unbind())


def objective(net, x):
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def shard(net, kind: str, world: int, policy: dict):
    """The model, spread over the ranks."""
    if kind == "flat":
        return fully_shard(net, **policy)
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh, **policy)
        return fully_shard(net, mesh=mesh, **policy)
    if kind == "tensor parallel":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        return parallelize_module(net, mesh, {"2": ColwiseParallel(), "4": RowwiseParallel()})
    if kind == "both":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"2": ColwiseParallel(), "4": RowwiseParallel()})
        return fully_shard(net, mesh=mesh["dp"], **policy)
    for layer in (net[0], net[2], net[4]):
        fully_shard(layer, **policy)
    return fully_shard(net, **policy)


def replicas(kind: str, world: int) -> int:
    """How many ranks have data of their own."""
    return {"tensor parallel": 1, "both": 2}.get(kind, world)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed(net, opt) -> bool:
    """Whether every state is spread as its parameter is."""
    sharded = [p for p in net.parameters() if isinstance(p, DTensor)]
    return all(s.placements == p.placements for p in sharded for s in opt.state.get(p, {}).values() if s.dim())


def copies(params) -> list[torch.Tensor]:
    """The whole values of tensors, of which ranks may have pieces."""
    return [full(p.detach()).clone() for p in params]
