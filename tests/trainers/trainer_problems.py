"""What the tests of several trainers train."""

import torch

from sgdol import SGDOL, SGDOLFree
from sgdol.learners import FTRL

BATCHES, BATCH = 12, 16


class Loader:
    """Batches in a fixed order, which remembers its place, as Lightning wants it for resuming within an epoch."""

    def __init__(self, digits, batches=BATCHES):
        images, labels = digits
        self.batches = [(images[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, batches * BATCH, BATCH)]
        self.place = 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.place %= len(self.batches)
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def build() -> torch.nn.Sequential:
    """The same weights each time; dropout goes on with the random numbers of the test."""
    layers = [torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.ReLU()]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 16), *layers, torch.nn.Linear(16, 10))


def noise_averse(params, lr=0.5, **options):
    """SGDOL by the paper's rule, whose step size falls as soon as it sees noise, whatever the defaults are."""
    return SGDOL(params, lr=lr, **{"momentum": 0.0, "learner": FTRL(), **options})


def make(kind, params):
    """The optimizer without a base rate, or the one with it."""
    return SGDOLFree(params) if kind == "free" else SGDOL(params, lr=0.5, momentum=0.5, averaging=8)


def step_by_hand(kind, opt, parts, weights, objective):
    """A step of which every part is a backward pass of its weight times its loss; returns the loss of them all."""

    def closure():
        opt.zero_grad()
        total = 0.0
        for part, weight in zip(parts, weights, strict=True):
            loss = objective(*part) * weight
            loss.backward()
            total = total + loss.detach()
        return total

    if kind == "free":
        return opt.step(closure)
    loss = closure()
    opt.step()
    return loss


def by_samples(parts):
    """The share of each part in the samples of them all."""
    return [len(labels) / sum(len(each) for _, each in parts) for _, labels in parts]
