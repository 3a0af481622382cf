"""What the tests of several trainers train."""

import functools

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
    """The optimizer without a base rate; the one with it, and averages; or that of batches that stay whole."""
    if kind == "whole":
        return noise_averse(params)
    return SGDOLFree(params) if kind == "free" else SGDOL(params, lr=0.5, momentum=0.5, averaging=8)


def step_by_hand(kind, opt, parts, weights, objective, before_the_step=lambda: None):
    """A step of which every part is a backward pass of its weight times its loss; returns the loss of them all."""

    def passes():
        total = 0.0
        for part, weight in zip(parts, weights, strict=True):
            loss = objective(*part) * weight
            loss.backward()
            total = total + loss.detach()
        return total

    def closure():
        opt.zero_grad()
        return passes()

    if kind == "free":
        return opt.step(closure)
    loss = passes()
    before_the_step()
    opt.step()
    opt.zero_grad()
    return loss


def by_samples(parts):
    """The share of each part in the samples of them all."""
    sizes = [len(labels) for _, labels, *_ in parts]
    return [size / sum(sizes) for size in sizes]


def by_hand(kind, steps, objective, clip=None):
    """The loop that is promised, written out: each step has its parts, of which objective(model, *part) is the loss.

    Returns the model, the optimizer, the losses and the step sizes.
    """
    net = build()
    opt = make(kind, net.parameters())
    losses, step_sizes, norms = [], [], []

    def clipped():
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip).item())

    for parts in steps:
        losses.append(step_by_hand(kind, opt, parts, by_samples(parts), functools.partial(objective, net), clipped))
        step_sizes.append(opt.diagnostics()["step_size"][0])
    assert clip is None or max(norms) > clip, "nothing was clipped"
    return net, opt, losses, step_sizes


def halves(batch):
    """The two parts into which a batch is split."""
    images, labels = batch
    cut = len(labels) // 2
    return [(images[:cut], labels[:cut]), (images[cut:], labels[cut:])]


def language_model(dropout=0.0, **size):
    """A language model of digits, 64 pixels of which each is a word of 17; the same weights each time."""
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds, so not when tests are collected

    shape = {"vocab_size": 17, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 2}
    shape |= {"bos_token_id": 0, "eos_token_id": 0}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**{**shape, **drop, **size}))


def arguments(folder, kind=None, **options):
    """Quiet TrainingArguments: transformers' own with a constant rate, or of another kind with its own defaults."""
    constant = {}
    if kind is None:
        from transformers import TrainingArguments as kind

        constant = {"lr_scheduler_type": "constant"}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "use_cpu": True}
    return kind(str(folder), **{**quiet, **constant, "per_device_train_batch_size": 8, "seed": 0, **options})


def logged(trainer, name="loss"):
    """What Hugging Face's Trainer has logged of each training step."""
    return [row[name] for row in trainer.state.log_history if "loss" in row]
