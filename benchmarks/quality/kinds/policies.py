r"""Policy gradients as stochastic losses.

An action is where its probability plus a fixed random number falls (the inverse of the distribution function), so that
a batch is the same function of the policy each time. The loss is -(return - baseline) w + (-baseline) with
w = exp(log pi - log pi.detach()), which is 1: its value is minus the return of what was sampled, and its gradient is
REINFORCE's; both have the expected return's as their means, which ``full`` computes exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import data
from benchmarks.quality.data import Samples
from benchmarks.quality.networks import MLP
from benchmarks.quality.objectives import Evaluation, Finite, Objective

__all__ = ["bandit", "gridworld"]


def _sample(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Actions from numbers in [0, 1], and the logarithms of their probabilities."""
    logs = logits.log_softmax(-1)
    below = logs.detach().exp().cumsum(-1)
    action = (uniform[..., None] > below[..., :-1]).sum(-1)
    return action, logs.gather(-1, action[..., None]).squeeze(-1)


def _surrogate(gain: Tensor, logs: Tensor, baseline: float) -> Tensor:
    weight = torch.exp(logs - logs.detach())
    return -((gain - baseline) * weight + baseline)


class GridWorld(Objective):
    """Walks on a square with a slippery floor from the corner to the goal, by a network that sees where it is.

    A step costs, the goal pays and ends the walk. f is minus the expected return; f* comes from dynamic programming.
    """

    def __init__(self, side: int, horizon: int, slip: float, hidden: int, walks: int) -> None:
        super().__init__()
        self.horizon, self.walks, self.slip = horizon, walks, slip
        n = side * side
        rows, columns = torch.arange(n) // side, torch.arange(n) % side
        moves = []
        for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            moves.append((rows + down).clamp(0, side - 1) * side + (columns + right).clamp(0, side - 1))
        self.next = torch.stack(moves, 1)  # of a state and an action
        self.next[n - 1] = n - 1  # the goal is not left
        self.reward = torch.full((n,), -0.04)  # of being somewhere after a move, if one was not at the goal before
        self.reward[n - 1] = 1.0
        chances = (1 - slip) * torch.eye(4) + slip / 4
        self.transition = torch.einsum("ab,sbt->sat", chances, F.one_hot(self.next, n).float())
        self.alive = torch.ones(n)
        self.alive[n - 1] = 0.0
        self.pay = (self.transition @ self.reward) * self.alive[:, None]
        where = torch.stack([rows, columns], 1) / (side - 1)
        self.register_buffer("features", torch.cat([where, F.one_hot(rows), F.one_hot(columns)], 1).float())
        self.network = MLP((2 + 2 * side, hidden, 4), nn.Tanh)
        value = torch.zeros(n)
        for _ in range(horizon):
            value = (self.pay + self.transition @ value).max(1).values
        self.optimum = -float(value[0])

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        return torch.rand(steps, self.walks, self.horizon, 2, generator=generator)

    def part(self, row: Tensor, part: int, parts: int) -> Tensor:
        return row if parts == 1 else row.reshape(parts, -1, *row.shape[1:])[part]

    def forward(self, uniform: Tensor) -> Tensor:
        logits = self.network(self.features)
        state = torch.zeros(len(uniform), dtype=torch.long)
        gain, logs = torch.zeros(len(uniform)), torch.zeros(len(uniform))
        for t in range(self.horizon):
            action, log = _sample(logits[state], uniform[:, t, 0])
            alive = self.alive[state]
            slipped = uniform[:, t, 1] < self.slip
            other = (uniform[:, t, 1] / self.slip * 4).long().clamp(max=3)
            state = self.next[state, torch.where(slipped, other, action)]
            gain = gain + alive * self.reward[state]
            logs = logs + alive * log
        return _surrogate(gain, logs, baseline=0.0).mean()

    def full(self) -> Tensor:
        policy = self.network(self.features).softmax(1)
        step = torch.einsum("sa,sat->st", policy, self.transition)
        pay = (policy * self.pay).sum(1)
        value = torch.zeros_like(pay)
        for _ in range(self.horizon):
            value = pay + step @ value
        return -value[0]


def gridworld(seed: int, side: int, horizon: int, slip: float, hidden: int, walks: int) -> Objective:
    """See :class:`GridWorld`."""
    return GridWorld(side, horizon, slip, hidden, walks)


class Bandit(Finite):
    """Guesses the digit on an image and is told whether that is right: f is the chance of being wrong; f* = 0."""

    def __init__(self, network: nn.Module, samples: Samples, batch: int) -> None:
        super().__init__(len(samples.targets), batch)
        self.network, self.samples = network, samples
        self.constant = 1 - float(samples.targets.bincount().max()) / self.rows

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        rows = super().draw(generator, steps).double()  # float64 holds them exactly
        return torch.stack([rows, torch.rand(rows.shape, generator=generator, dtype=torch.float64)], -1)

    def forward(self, drawn: Tensor) -> Tensor:
        rows = drawn[:, 0].long()
        action, logs = _sample(self.network(self.samples.inputs[rows]), drawn[:, 1])
        right = (action == self.samples.targets[rows]).float()
        return 1 + _surrogate(right, logs, baseline=0.1).mean()

    def full(self) -> Tensor:
        chances = self.network(self.samples.inputs).softmax(1)
        return 1 - chances.gather(1, self.samples.targets[:, None]).mean()

    def evaluate(self) -> Evaluation:
        with torch.no_grad():
            right = self.network(self.samples.test_inputs).argmax(1) == self.samples.test_targets
            return Evaluation(float(self.full()), float(right.double().mean()))


def bandit(seed: int, part: str, hidden: tuple[int, ...], batch: int) -> Objective:
    """On the 8 x 8 digits."""
    samples = data.digits(part)
    return Bandit(MLP((64, *hidden, 10)), samples, batch)
