"""What SGDOLFree loses if its state is rounded to bfloat16 after every step, which would halve its memory.

    python scripts/measure_narrow_state.py --networks lstm-english vae-mnist gpt-python --seeds 1 2

Rounding is stochastic: up or down with the probability that makes it right on average. Nothing is saved by this
program: the tensors stay float32, and their values are those that bfloat16 has.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from benchmarks.networks import get_network, run
from benchmarks.quality import methods
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from sgdol import SGDOLFree

METHOD = replace(methods.get("sgdol-free"), options={"metric": "rms"})

KEPT = {
    "float32": ((), 16),
    "average in float32": (("momentum", "metric.square", "step"), 10),
    "last point as it is": (("momentum", "metric.square", "previous"), 10),
    "all in bfloat16": (("momentum", "metric.square", "step", "average"), 8),
}
"""What is rounded, and the bytes that would be kept per parameter; "step" is the last point minus the present one."""


def rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    """The number above or below that bfloat16 has, by chance, so that the mean is x."""
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32)
    return ((bits + noise) & -(1 << 16)).view(torch.float32)


def train(name: str, kept: str, seed: int, share: float) -> tuple[float, float]:
    """The training loss and the validation loss of the average."""
    generator, names = torch.Generator().manual_seed(seed), KEPT[kept][0]

    @torch.no_grad()
    def narrow(opt: Any, *_: Any) -> None:
        for p, state in opt.state.items() if isinstance(opt, SGDOLFree) else ():
            for one in names:
                if one == "step":
                    state["previous"].copy_(p + rounded(state["previous"] - p, generator))
                else:
                    state[one].copy_(rounded(state[one], generator))

    hook = register_optimizer_step_post_hook(narrow)
    try:
        network = get_network(name)
        result = run(network, METHOD, seed=seed, rate=None, budget=round(share * network.budget))
    finally:
        hook.remove()
    curve = result.curves["average"]
    return curve.end, curve.validation


parser = argparse.ArgumentParser()
parser.add_argument("--networks", nargs="+", default=["lstm-english", "vae-mnist", "gpt-python"])
parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
parser.add_argument("--kept", nargs="+", choices=KEPT, default=list(KEPT))
parser.add_argument("--share", type=float, default=0.5, help="of each network's budget of gradients")
arguments = parser.parse_args()

print("| network | seed | kept | bytes | training loss | validation loss |\n|---|---|---|---:|---:|---:|")
for network in arguments.networks:
    for seed in arguments.seeds:
        for kept in arguments.kept:
            loss, validation = train(network, kept, seed, arguments.share)
            print(f"| {network} | {seed} | {kept} | {KEPT[kept][1]} | {loss:.4f} | {validation:.4f} |", flush=True)
