"""SGDOL beside SGD + momentum at the same rate: the best constant one, a third of it and three times it.

    make bench-same-rate

The rates are those that benchmarks.quality tuned for SGD + momentum, from its saved runs (tuning seed 0); the seeds
are those that it reports on. Ratios of gaps are paired by problem
and seed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.quality import get_method, get_problem, run
from benchmarks.quality.tables import read_runs
from benchmarks.timing import machine

RESULTS = Path(__file__).parent / "results"
FACTORS = (1 / 3, 1.0, 3.0)
SEEDS = (1, 2, 3)
RELIEF = 1.02
"""By how much more than this a problem counts as worse."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=("development", "held-out"), default="held-out")
    half = parser.parse_args().half
    torch.set_num_threads(1)
    rates = {
        line.problem: line.learning_rate
        for line in read_runs(RESULTS / f"quality-runs-{half}.csv")
        if line.contender == "SGD + momentum" and line.learning_rate is not None
    }
    rows: dict[tuple[float, str], list[tuple[float, str]]] = {
        (factor, point): [] for factor in FACTORS for point in ("last", "average")
    }
    for name, rate in rates.items():
        problem = get_problem(name)
        for factor in FACTORS:
            ratios: dict[str, list[float]] = {"last": [], "average": []}
            for seed in SEEDS:
                constant = run(problem, get_method("sgd"), seed, rate * factor)
                learned = run(problem, get_method("sgdol"), seed, rate * factor)
                for point, found in ratios.items():
                    found.append(learned.outcomes[point].gap / constant.outcomes[point].gap)
            for point, found in ratios.items():
                rows[factor, point].append((_mean(found), name))
        print(name, *(f"{rows[f, p][-1][0]:.3g}" for f in FACTORS for p in ("last", "average")), flush=True)
    lines = [
        "# SGDOL beside SGD + momentum at the same rate",
        "",
        f"Made by `make bench-same-rate`: {len(rates)} problems of the {half} half, seeds {SEEDS}, gap of SGDOL (its "
        "defaults) over that of SGD with momentum 0.9, geometric means. The rate is the one that was tuned for SGD by "
        f"factors of ten. {machine()}",
        "",
        "| rate | point | mean | median | best | worst | problems better / worse by more than 2 % |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for (factor, point), all_of_them in rows.items():
        ordered = sorted(all_of_them)
        low, high = ordered[0], ordered[-1]
        better, worse = sum(r < 1 / RELIEF for r, _ in ordered), sum(r > RELIEF for r, _ in ordered)
        lines.append(
            f"| {'a third' if factor < 1 else 'tuned' if factor == 1 else 'three times'} | {point} | "
            f"{_mean(r for r, _ in ordered):.2f} | {ordered[len(ordered) // 2][0]:.2f} | {low[0]:.2g} ({low[1]}) | "
            f"{high[0]:.2f} ({high[1]}) | {better} / {worse} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    (RESULTS / f"same-rate-{half}.md").write_text(text)


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


if __name__ == "__main__":
    main()
