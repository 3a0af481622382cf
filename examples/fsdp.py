"""FSDP2: parameters, gradients and the optimizer's state sharded over the ranks, microbatches, and a checkpoint.

torchrun --nproc-per-node 2 examples/fsdp.py
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sgdol import SGDOL

torch.set_num_threads(1)
dist.init_process_group("gloo")
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order.split([1500, len(images) - 1500])
data = TensorDataset(images[train], labels[train])
sampler: DistributedSampler = DistributedSampler(data)  # each rank its own batches
loader = DataLoader(data, batch_size=16, sampler=sampler)
criterion = torch.nn.CrossEntropyLoss()


def build() -> tuple[torch.nn.Module, SGDOL]:
    """The same model on every rank, then sharded; the optimizer comes after."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    fully_shard(model[0])
    fully_shard(model)
    return model, SGDOL(model.parameters(), lr=0.05)


def run(model: torch.nn.Module, opt: SGDOL, epoch: int) -> None:
    """One epoch: two microbatches on each rank, four gradients in every update on two ranks."""
    sampler.set_epoch(epoch)
    for x, y in loader:
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (criterion(model(part), target) / 2).backward()
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    if dist.get_rank() == 0:
        report = opt.diagnostics()
        print(f"epoch {epoch}  test accuracy {accuracy:.3f}  {report['gradients']} gradients per update")


model, opt = build()
for epoch in range(3):
    run(model, opt, epoch)

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
weights, state = get_state_dict(model, opt)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])

model, opt = build()  # in another job this may be another number of ranks
weights, state = get_state_dict(model, opt)
checkpoint: dict[str, Any] = {"model": weights, "optimizer": state}
dcp.load(checkpoint, checkpoint_id=folder[0])
set_state_dict(model, opt, model_state_dict=checkpoint["model"], optim_state_dict=checkpoint["optimizer"])
if dist.get_rank() == 0:
    print(f"resumed after {opt.diagnostics()['updates']} updates, step size {opt.param_groups[0]['step_size']:.4f}")
for epoch in range(3, 5):
    run(model, opt, epoch)
dist.destroy_process_group()
