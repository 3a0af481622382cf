"""PPO's loop, as in cleanrl: the loss of a minibatch is a function of the indices of its samples. CartPole, made here.

The four lines marked "sgdol" are what changes in a loop that has Adam and a function for its loss. --adamw trains
with cleanrl's: lr 2.5e-4, which falls linearly to 0. While training, actions are drawn with the latest weights.
"""

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from sgdol.torch import SGDOLFree, backward  # sgdol

parser = argparse.ArgumentParser()
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--iterations", type=int, default=60)
args = parser.parse_args()
torch.manual_seed(args.seed)
envs, steps, gamma, trace, clip = 8, 64, 0.99, 0.95, 0.2


def move(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """One time step of every cart: position, velocity, angle, angular velocity; the last is the time."""
    x, v, angle, spin, time = state.unbind(1)
    cos, sin = angle.cos(), angle.sin()
    push = (20.0 * action - 10.0 + 0.05 * spin.square() * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
    new = torch.stack([x + 0.02 * v, v + 0.02 * (push - 0.05 * turn * cos / 1.1), angle + 0.02 * spin, spin], 1)
    new[:, 3] += 0.02 * turn
    fell = (new[:, 0].abs() > 2.4) | (new[:, 2].abs() > 0.2095) | (time >= 499)
    return torch.cat([new, time[:, None] + 1], 1), fell


def start(count: int) -> Tensor:
    return torch.cat([torch.rand(count, 4) * 0.1 - 0.05, torch.zeros(count, 1)], 1)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, state: Tensor) -> tuple[Categorical, Tensor]:
        return Categorical(logits=self.actor(state[..., :4])), self.critic(state[..., :4]).squeeze(-1)


agent = Agent()
opt: Any = torch.optim.AdamW(agent.parameters(), lr=2.5e-4, eps=1e-5)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 - t / args.iterations)
if not args.adamw:
    opt = SGDOLFree(agent.parameters())  # sgdol
now, lengths = start(envs), list[float]()
for _ in range(args.iterations):
    columns: list[list[Tensor]] = [[] for _ in range(5)]
    S, A, L, V, D = columns  # states, actions, their log-probabilities, values, ends
    for _ in range(steps):
        with torch.no_grad():
            policy, value = agent(now)
        action = policy.sample()
        after, fell = move(now, action)
        for column, item in zip(columns, (now, action, policy.log_prob(action), value, fell), strict=True):
            column.append(item)
        lengths += after[fell, 4].tolist()
        now = torch.where(fell[:, None], start(envs), after)
    with torch.no_grad():
        V.append(agent(now)[1])
    gain, advantages = torch.zeros(envs), list[Tensor]()
    for t in reversed(range(steps)):
        goes_on = ~D[t]
        gain = 1 + gamma * V[t + 1] * goes_on - V[t] + gamma * trace * goes_on * gain
        advantages.insert(0, gain)
    states, actions, logs = torch.cat(S), torch.cat(A), torch.cat(L)
    advantage = torch.cat(advantages)
    returns = advantage + torch.cat(V[:-1])
    scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    def loss_of(rows: Tensor) -> Tensor:
        policy, value = agent(states[rows])
        ratio = (policy.log_prob(actions[rows]) - logs[rows]).exp()
        surrogate = torch.min(scaled[rows] * ratio, scaled[rows] * ratio.clamp(1 - clip, 1 + clip))
        return -surrogate.mean() + 0.25 * (value - returns[rows]).square().mean() - 0.01 * policy.entropy().mean()

    for _ in range(4):
        for rows in torch.randperm(envs * steps).chunk(4):
            opt.zero_grad()
            backward(loss_of, rows)  # sgdol: in place of loss_of(rows).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()
    if args.adamw:
        schedule.step()
print(f"mean length of the last 20 episodes {sum(lengths[-20:]) / 20:.0f} of 500")

now, alive, played = start(40), torch.ones(40, dtype=torch.bool), torch.zeros(40)
with torch.no_grad(), nullcontext() if args.adamw else opt.averaged():  # sgdol
    while alive.any():
        played += alive
        now, fell = move(now, agent(now)[0].logits.argmax(1))
        alive &= ~fell
print(f"mean length of 40 episodes with the best actions {played.mean():.0f} of 500")
