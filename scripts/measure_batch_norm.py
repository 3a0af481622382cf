"""What splitting a batch does to a network with BatchNorm: a sentence of docs/guide/troubleshooting.md.

    python scripts/measure_batch_norm.py

The same batches of 64 digits, split into k microbatches each, on the same network with BatchNorm, with LayerNorm (which
does not look at the batch) and with BatchNorm under SGD. Test error in percent, mean over three seeds.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from sgdol import SGDOL

BATCH, EPOCHS, SEEDS, LR = 64, 10, 3, 0.05


def error(norm: type[torch.nn.Module], optimizer: type[torch.optim.Optimizer], k: int, seed: int) -> float:
    """Test error after training with batches split into k."""
    torch.manual_seed(seed)
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = torch.randperm(len(images)).split([1408, len(images) - 1408])
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), norm(64), torch.nn.ReLU(), torch.nn.Linear(64, 64), norm(64), torch.nn.ReLU()
    ).append(torch.nn.Linear(64, 10))
    opt = optimizer(model.parameters(), lr=LR, momentum=0.9)  # type: ignore[call-arg]
    for _ in range(EPOCHS):
        for rows in train[torch.randperm(len(train))].split(BATCH):
            for part in rows.chunk(k):
                (cross_entropy(model(images[part]), labels[part]) / k).backward()
            opt.step()
            opt.zero_grad()
    model.eval()
    return 100 * (model(images[test]).argmax(1) != labels[test]).float().mean().item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    digits = load_digits()
    rows = [
        ("BatchNorm, SGDOL", torch.nn.BatchNorm1d, SGDOL),
        ("LayerNorm, SGDOL", torch.nn.LayerNorm, SGDOL),
        ("BatchNorm, SGD", torch.nn.BatchNorm1d, torch.optim.SGD),
    ]
    splits = (2, 8, 32)
    print("test error, %".ljust(20) + "".join(f"{k:3d} x {BATCH // k:<4d}" for k in splits))
    for label, norm, optimizer in rows:
        errors = [sum(error(norm, optimizer, k, seed) for seed in range(SEEDS)) / SEEDS for k in splits]
        print(label.ljust(20) + "".join(f"{value:6.1f}    " for value in errors))
