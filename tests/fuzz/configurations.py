"""Random configurations of SGDOL against the independent version, on exact vectors.

    python -m tests.fuzz.configurations --count 10000 --seed 0

Every disagreement beyond rounding is printed with the seed that gives it again, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.fuzz.independent import Group, Independent

from sgdol import SGDOL
from sgdol.learners import FTRL, MeasuredCurvature

TOLERANCE = 1e-7
"""Relative to the largest parameter: a run multiplies rounding of 1e-16 by its condition, and clips can be near."""

SHAPES = [(1,), (3,), (2, 2), (), (5,), (1, 3), (2, 3, 2, 1), (0,)]
LARGE = [(16_385,), (3, 5500)]
"""Of so many numbers that they are not laid end to end with others."""

LEARNERS = {"ftrl": FTRL, "measured": MeasuredCurvature}


class Run:
    """One random configuration, the optimizer and the truth.

    Args:
        seed: of everything that is random.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors = [self.rng.normal(size=shape) for shape in self._shapes()]
        self.sizes = [t.size for t in self.tensors]
        self.groups = self._groups()
        self.source = self.pick("microbatches", "pairs", "closure")
        if any(group.estimator == "paper" for group in self.groups):
            self.source = "pairs"  # the paper's estimator takes one backward per step
        self.on_device = self.pick(False, False, True)
        """Whether ``torch.where`` decides, as on an accelerator."""
        self.comes_and_goes = self.pick(False, False, True) and all(self.sizes)
        """Whether tensors may take no part in some passes, or in a whole update."""
        self.in_a_metric = any(group.metric != "euclidean" for group in self.groups)
        self.truth = Independent([replace(group) for group in self.groups], self.tensors)
        self.params = [torch.nn.Parameter(self._laid_out(t)) for t in self.tensors]
        self.opt = self._optimizer()

    def pick(self, *options: Any) -> Any:
        """One of these."""
        return options[self.rng.integers(len(options))]

    def _shapes(self) -> list[tuple[int, ...]]:
        many = self.pick(False, False, False, True)
        count = int(self.rng.integers(14, 20)) if many else int(self.rng.integers(1, 5))
        shapes = [SHAPES[i] for i in self.rng.integers(len(SHAPES), size=count)]
        if many and self.pick(*[False] * 9, True):
            shapes[int(self.rng.integers(count))] = self.pick(*LARGE)
        return shapes if any(np.prod(shape) for shape in shapes) else [*shapes, (3,)]

    def _laid_out(self, values: np.ndarray) -> torch.Tensor:
        """The values in one of the orders that memory can have."""
        tensor = torch.tensor(values)
        if tensor.dim() == 4 and self.pick(False, True):
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor.mT.contiguous().mT if tensor.dim() >= 2 and self.pick(False, True) else tensor

    def _groups(self) -> list[Group]:
        """Several groups that differ in lr, momentum, decay and sign, and half of the time in everything."""
        count = int(self.rng.integers(1, min(len(self.tensors), 4) + 1))
        places = sorted(self.rng.choice(np.arange(1, len(self.tensors)), size=count - 1, replace=False).tolist())
        members = [part.tolist() for part in np.split(np.arange(len(self.tensors)), places if count > 1 else [])]
        shared = self.pick(None, self._options())
        return [
            Group(
                part,
                lr=float(self.pick(0.01, 0.3, 1.0)),
                momentum=float(self.pick(0.0, 0.5, 0.9)),
                weight_decay=float(self.pick(0.0, 0.0, 0.1)),
                maximize=bool(self.pick(False, False, True)),
                **(shared or self._options()),
            )
            for part in members
        ]

    def _options(self) -> dict[str, Any]:
        alpha, estimator = self.pick(None, None, 10.0, 0.01), self.pick("symmetric", "symmetric", "paper")
        learner = self.pick("ftrl", "measured")
        return {
            "granularity": self.pick("global", "group", "tensor", "coordinate"),
            "estimator": estimator,
            "alpha": alpha,
            "kappa": float(self.pick(1.0, 10.0)) if alpha is None else None,
            "bias_correction": self.pick(True, False),
            "epoch": self.pick(None, 2, 5) if estimator == "symmetric" else None,
            "statistics": self.pick("direction", "gradient"),
            "metric": self.pick("euclidean", "euclidean", "rms", "adagrad"),
            "averaging": self.pick(None, 0.0, 8.0),
            "learner": learner,
        }

    def _optimizer(self) -> SGDOL:
        groups = []
        for group in self.groups:
            learned = ("tensors", "momentum_weight", "moving")
            options = {name: value for name, value in vars(group).items() if name not in learned}
            params = [self.params[t] for t in group.tensors]
            groups.append({**options, "params": params, "learner": LEARNERS[group.learner]()})
        opt = SGDOL(groups, lr=1.0)
        opt._host = not self.on_device
        return opt

    # One update -------------------------------------------------------------------------------------------------------

    def difference(self) -> float:
        """The largest relative difference over the run."""
        worst, total = 0.0, sum(self.sizes)
        centre = self.rng.normal(size=total)
        for _ in range(int(self.rng.integers(3, 12))):
            k = 2 if self.source == "pairs" else int(self.rng.integers(2, 6))
            gradients = centre + float(self.pick(0.0, 0.3, 3.0)) * self.rng.normal(size=(k, total))
            # The host does not know that a device has skipped an update. If it was the first one, the next begins
            # the average of a tensor that has never moved, and a metric has D = 1 instead of one made of the gradient.
            first = self.comes_and_goes or (self.in_a_metric and not self.truth.updates)
            if self.pick(*[False] * 9, True) and not (self.on_device and first):
                gradients[int(self.rng.integers(2)), int(self.rng.integers(total))] = self.pick(np.nan, np.inf)
            self._update(gradients)
            worst = max(worst, self._apart("x"))
            self._resume()
            if self.pick(*[False] * 9, True):
                self._schedule()
        if any(g.averaging is not None for g in self.groups) and self.truth.updates:
            with self.opt.averaged():
                worst = max(worst, self._apart("average"))
        return worst

    def _update(self, gradients: np.ndarray) -> None:
        """Give both the gradients, some of which may be missing and all of which somebody may have clipped."""
        count = len(self.tensors)
        reached = np.ones((len(gradients), count), dtype=bool)
        if self.comes_and_goes:
            reached = self.rng.random((len(gradients), count)) < 0.8
            reached &= self.rng.random(count) < 0.7
            reached[:, int(self.rng.integers(count))] = True
        factor = float(self.pick(1.0, 1.0, 0.25, 0.3))
        self._feed(gradients, reached, factor)
        given = np.where(np.repeat(reached, self.sizes, axis=1), gradients, 0.0) * factor
        self.truth.update(given.tolist(), {int(t) for t in np.flatnonzero(reached.any(axis=0))})

    def _feed(self, gradients: np.ndarray, reached: np.ndarray, factor: float) -> None:
        k = 1 if self.source == "pairs" else len(gradients)

        def one(g: np.ndarray, tensors: np.ndarray) -> None:
            parts = zip(self.params, np.split(g, np.cumsum(self.sizes)[:-1]), tensors, strict=True)
            loss: Any = sum((p * torch.tensor(v).reshape(p.shape)).sum() for p, v, here in parts if here) / k
            loss.backward()

        def clip() -> None:
            for p in self.params:
                if p.grad is not None and factor != 1.0:
                    p.grad.mul_(factor)

        def all_of_them() -> float:
            for g, tensors in zip(gradients, reached, strict=True):
                one(g, tensors)
            clip()
            return 0.0

        if self.source == "pairs":
            for g, tensors in zip(gradients, reached, strict=True):
                one(g, tensors)
                clip()
                self.opt.step()
                self.opt.zero_grad()
                self._resume()
            return
        self.opt.step(all_of_them) if self.source == "closure" else (all_of_them(), self.opt.step())
        self.opt.zero_grad()

    def _schedule(self) -> None:
        """A scheduler moves the momentum."""
        for group, there in zip(self.truth.groups, self.opt.param_groups, strict=True):
            if group.moving or not self.on_device:  # a device does not know whether the first momentum was skipped
                group.momentum = there["momentum"] = float(self.pick(0.0, 0.5, 0.9))

    def _resume(self) -> None:
        """Now and then, go on with a copy, or with another optimizer that loads the state."""
        how = self.pick(*[None] * 18, "copy", "load")
        if how == "copy":
            self.params, self.opt = copy.deepcopy((self.params, self.opt))
        elif how == "load":
            saved = copy.deepcopy(self.opt.state_dict())
            self.params = [torch.nn.Parameter(p.detach().clone()) for p in self.params]
            self.opt = self._optimizer()
            self.opt.load_state_dict(saved)
        self.opt._host = not self.on_device

    def _apart(self, name: str) -> float:
        found = torch.cat([p.detach().reshape(-1) for p in self.params]).numpy()
        values = [getattr(c, name) for c in self.truth.coordinates]
        truth = np.array([c.x if v is None else v for c, v in zip(self.truth.coordinates, values, strict=True)])
        return float(np.max(np.abs(found - truth)) / max(1.0, np.max(np.abs(truth))))

    def __str__(self) -> str:
        options = ("source", "on_device", "comes_and_goes", "groups")
        shapes = [t.shape for t in self.tensors]
        return f"shapes {shapes}, " + ", ".join(f"{name} {getattr(self, name)}" for name in options)


def main(arguments: list[str] | None = None) -> int:
    """Run many; the number of disagreements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wrong, largest = 0, 0.0
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        run = Run(seed)
        difference = run.difference()
        if not difference <= TOLERANCE:
            wrong += 1
            print(f"seed {seed}: differs by {difference:.2g}: {run}")
        else:
            largest = max(largest, difference)
    print(f"{chosen.count} configurations, {wrong} disagree; the largest difference of the others is {largest:.1e}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
