"""A problem: an objective with a budget and units, and for each seed a first point and the noise of its steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.quality import objectives
from benchmarks.quality.objectives import Evaluation, Objective

__all__ = ["FLOOR", "HALVES", "KINDS", "NETWORKS", "Half", "Instance", "Problem", "Scales"]

Half = Literal["development", "held-out"]
HALVES: tuple[Half, ...] = ("development", "held-out")
NETWORKS = (
    "mlp", "cnn", "resnet", "transformer", "sequence", "embedding", "physics", "adapter", "generative", "graph",
    "policy",
)  # fmt: skip
KINDS = ("rosenbrock", "quadratic", "adult", "regression", "factorisation", *NETWORKS)

FLOOR = 1e-6
"""A gap below this share of the starting gap counts as this share: the problem is solved."""


@dataclass(frozen=True)
class Scales:
    """Natural units of a problem, measured once: at its first point (seed 0), on all data, with exact derivatives.

    Learning-rate grids are powers of ten times these units, themselves rounded to powers of ten, so that a problem in
    other units has the same grid in its own units.
    """

    gradient: float
    """1/M_0, with M_0 = ||H g|| / ||g||: the unit of the learning rate of SGD and of SGDOL."""
    step: float
    """||g|| / (M_0 sqrt(d)), the size per coordinate of that gradient step: the unit of Adam's learning rate."""


@dataclass(frozen=True)
class Problem:
    """One line of the suite."""

    name: str
    kind: str
    half: Half
    budget: int
    """In gradient evaluations: one is a pass over one whole batch, in one part or in several."""
    build: Callable[..., Objective] = field(repr=False)
    options: dict[str, Any] = field(default_factory=dict)
    optimum: float | None = None
    """f*, where the objective does not know it: what L-BFGS or Newton find (``minimum``)."""
    loss_scale: float = 1.0
    parameter_scale: float = 1.0

    @property
    def network(self) -> bool:
        """Whether it is a network: its gap is its training loss, and its held-out accuracy is reported."""
        return self.kind in NETWORKS

    def make(self, seed: int, steps: int | None = None) -> Instance:
        """The problem with one seed's first point, order of the data and noise; ``steps`` limits what is drawn."""
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)  # initial weights
            objective = self.build(seed=seed, **self.options)
        if self.optimum is not None:
            objective.optimum = self.optimum
        if (self.loss_scale, self.parameter_scale) != (1.0, 1.0):
            objective = objectives.Rescaled(objective, self.loss_scale, self.parameter_scale)
        generator = torch.Generator().manual_seed(2000 + seed)
        return Instance(self, objective, objective.draw(generator, self.budget if steps is None else steps))

    @functools.cached_property
    def scales(self) -> Scales:
        """The units of its learning rates."""
        objective = self.make(seed=0, steps=1).objective
        objective.eval() if not self._normalised(objective) else objective.train()
        params = list(objective.parameters())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            grads = torch.autograd.grad(objective.full(), params, create_graph=True)
            along = [g.detach() for g in grads]
            products = torch.autograd.grad(grads, params, along)
        size = math.sqrt(sum(float(g.square().sum()) for g in along))
        curvature = math.sqrt(sum(float(h.square().sum()) for h in products)) / size
        dimension = sum(p.numel() for p in params)
        return Scales(_decade(1 / curvature), _decade(size / curvature / math.sqrt(dimension)))

    @staticmethod
    def _normalised(objective: Objective) -> bool:
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in objective.modules())

    def specification(self) -> dict[str, Any]:
        """What makes its numbers beside its code."""
        return {
            "name": self.name,
            "options": repr(sorted(self.options.items())),
            "loss_scale": self.loss_scale,
            "parameter_scale": self.parameter_scale,
            "optimum": self.optimum,
        }


class Instance:
    """A problem with a seed: parameters to move, and the stochastic losses of its steps."""

    def __init__(self, problem: Problem, objective: Objective, drawn: Tensor) -> None:
        self.problem, self.objective, self.drawn = problem, objective, drawn
        objective.train()

    @property
    def steps(self) -> int:
        """How many steps have been drawn."""
        return len(self.drawn)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer gets."""
        return self.objective.parameters()

    def loss(self, step: int, part: int = 0, parts: int = 1) -> Tensor:
        """F(x, xi) at the present x on the batch of ``step``, or on one of its ``parts`` halves (their mean is F)."""
        return self.objective(self.objective.part(self.drawn[step], part, parts))

    def gap(self, evaluation: Evaluation) -> float:
        """Loss over the optimum in the units of the problem that is not rescaled; the training loss of a network."""
        return evaluation.loss - self.objective.optimum

    def constant(self, start: float) -> float:
        """The gap of the best constant predictor, or of the first point where that is better or nothing predicted."""
        known = self.objective.constant
        return start if known is None else min(start, known - self.objective.optimum)


def _decade(value: float) -> float:
    return 10.0 ** round(math.log10(value))
