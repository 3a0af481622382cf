"""Random configurations of SGDOL against the independent version, on exact vectors.

    python -m tests.fuzz.configurations --count 10000 --seed 0

Every disagreement beyond rounding is printed with the seed that gives it again, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import numpy as np
import torch
from tests.fuzz.independent import Group, Independent

from sgdol import SGDOL
from sgdol.learners import FTRL, MeasuredCurvature

TOLERANCE = 1e-9
"""Relative to the largest parameter: a run multiplies rounding of 1e-16 by its condition, and clips can be near."""

SHAPES = [(1,), (3,), (2, 2), (), (5,), (1, 3)]


def run(seed: int) -> tuple[float, dict[str, Any]]:
    """The largest relative difference over one run, and its configuration."""
    rng = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    tensors = [rng.normal(size=SHAPES[i]) for i in rng.integers(len(SHAPES), size=rng.integers(1, 5))]
    count = int(rng.integers(1, len(tensors) + 1))
    places = sorted(rng.choice(np.arange(1, len(tensors)), size=count - 1, replace=False).tolist()) if count > 1 else []
    members = [list(part) for part in np.split(np.arange(len(tensors)), places)]
    groups = [
        Group(
            [int(t) for t in part],
            lr=float(pick(0.01, 0.3, 1.0)),
            momentum=float(pick(0.0, 0.5, 0.9)),
            weight_decay=float(pick(0.0, 0.0, 0.1)),
            maximize=bool(pick(False, False, True)),
        )
        for part in members
    ]
    alpha = pick(None, None, 10.0, 0.01)
    shared: dict[str, Any] = {
        "granularity": pick("global", "group", "tensor", "coordinate"),
        "estimator": pick("symmetric", "paper"),
        "alpha": alpha,
        "kappa": float(pick(1.0, 10.0)) if alpha is None else 1.0,
        "statistics": pick("direction", "gradient"),
        "metric": pick("euclidean", "rms", "adagrad"),
        "averaging": pick(None, 0.0, 8.0),
    }
    learner, foreach, source = (
        pick("ftrl", "measured"),
        pick(None, True, False),
        pick("microbatches", "pairs", "closure"),
    )
    configuration = {**shared, "learner": learner, "foreach": foreach, "source": source, "groups": groups}
    truth = Independent(groups, tensors, learner=learner, **shared)
    params = [torch.nn.Parameter(torch.tensor(t)) for t in tensors]
    opt = SGDOL(
        [
            {
                "params": [params[t] for t in g.tensors],
                "lr": g.lr,
                "momentum": g.momentum,
                "weight_decay": g.weight_decay,
                "maximize": g.maximize,
            }
            for g in groups
        ],
        learner=MeasuredCurvature() if learner == "measured" else FTRL(),
        foreach=foreach,
        **shared,
    )
    worst, sizes = 0.0, [t.size for t in tensors]
    centre = rng.normal(size=sum(sizes))
    for _ in range(int(rng.integers(3, 12))):
        k = 2 if source == "pairs" else int(rng.integers(2, 5))
        gradients = centre + float(pick(0.0, 0.3, 3.0)) * rng.normal(size=(k, sum(sizes)))
        if pick(*[False] * 9, True):
            gradients[int(rng.integers(2)), 0] = pick(np.nan, np.inf)
        _feed(opt, params, gradients, sizes, source)
        truth.update(gradients.tolist())
        worst = max(worst, _difference(params, [c.x for c in truth.coordinates]))
    if shared["averaging"] is not None and truth.updates:
        with opt.averaged():
            worst = max(worst, _difference(params, [c.average for c in truth.coordinates]))  # type: ignore[misc]
    return worst, configuration


def _feed(opt: SGDOL, params: list[Any], gradients: np.ndarray, sizes: list[int], source: str) -> None:
    k = 1 if source == "pairs" else len(gradients)

    def one(g: np.ndarray) -> None:
        parts = zip(params, np.split(g, np.cumsum(sizes)[:-1]), strict=True)
        loss = sum((p * torch.tensor(v).reshape(p.shape)).sum() for p, v in parts) / k
        loss.backward()  # type: ignore[union-attr]

    def all_of_them() -> float:
        for g in gradients:
            one(g)
        return 0.0

    if source == "pairs":
        for g in gradients:
            one(g)
            opt.step()
            opt.zero_grad()
        return
    opt.step(all_of_them) if source == "closure" else (all_of_them(), opt.step())
    opt.zero_grad()


def _difference(params: list[Any], expected: list[float]) -> float:
    found = torch.cat([p.detach().reshape(-1) for p in params]).numpy()
    truth = np.array(expected)
    return float(np.max(np.abs(found - truth)) / max(1.0, np.max(np.abs(truth))))


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
        difference, configuration = run(seed)
        if not difference <= TOLERANCE:
            wrong += 1
            print(f"seed {seed}: differs by {difference:.2g}: {configuration}")
        else:
            largest = max(largest, difference)
    print(f"{chosen.count} configurations, {wrong} disagree; the largest difference of the others is {largest:.1e}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
