"""DistributedDataParallel: an unchanged loop, in which every rank's gradient is one of the independent ones.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sgdol import SGDOL

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1500, len(images) - 1500])
data = TensorDataset(images[train], labels[train])
sampler: DistributedSampler = DistributedSampler(
    data
)  # each rank its own batches: without it the gradients are not independent
loader = DataLoader(data, batch_size=16, sampler=sampler)

net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = DistributedDataParallel(net)
criterion = torch.nn.CrossEntropyLoss()
opt = SGDOL(model.parameters(), lr=0.05)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        criterion(model(x), y).backward()
        opt.step()
    if dist.get_rank() == 0:
        accuracy = (net(images[test]).argmax(1) == labels[test]).float().mean()
        report = opt.diagnostics()
        print(f"epoch {epoch}  test accuracy {accuracy:.3f}  {report['gradients']} gradients per update")
dist.destroy_process_group()
