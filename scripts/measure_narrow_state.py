"""What SGDOLFree loses with state_dtype=torch.bfloat16, which keeps its state in less memory.

For example ``python scripts/measure_narrow_state.py --networks lstm-english vae-mnist gpt-python --seeds 1 2``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from benchmarks.networks import get_network, run
from benchmarks.quality import methods

parser = argparse.ArgumentParser()
parser.add_argument("--networks", nargs="+", default=["lstm-english", "vae-mnist", "gpt-python"])
parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
parser.add_argument("--metrics", nargs="+", default=["rms", "kronecker"])
parser.add_argument("--share", type=float, default=0.5, help="of each network's budget of gradients")
arguments = parser.parse_args()

print("| network | metric | seed | state | training loss | validation loss |\n|---|---|---|---|---:|---:|")
for seed in arguments.seeds:
    for metric in arguments.metrics:
        for name in arguments.networks:
            for state, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
                method = replace(methods.get("sgdol-free"), options={"metric": metric, "state_dtype": dtype})
                network = get_network(name)
                result = run(network, method, seed=seed, rate=None, budget=round(arguments.share * network.budget))
                curve = result.curves["average"]
                row = name, metric, seed, state, f"{curve.end:.4f}", f"{curve.validation:.4f}"
                print(f"| {' | '.join(map(str, row))} |", flush=True)
