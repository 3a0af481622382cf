"""How the best learning rate of SGDOL with metric="rms" compares with Adam's, problem by problem.

    python -m benchmarks.quality.rates

Reads the saved runs of ``make bench-peers``, in which both were tuned per problem on powers of ten.
"""

from __future__ import annotations

from collections import Counter
from math import log10
from pathlib import Path

from benchmarks.quality.tables import read_runs

RESULTS = Path(__file__).parents[1] / "results"
PAIRS = (("SGD + momentum", "SGDOL"), ("Adam", "SGDOL, metric rms"))


def main() -> None:
    """Print on how many problems each ratio was best."""
    lines = read_runs(RESULTS / "quality-runs-held-out.csv")
    rates = {(line.problem, line.contender): line.learning_rate for line in lines if line.learning_rate}
    for peer, ours in PAIRS:
        problems = [problem for problem, contender in rates if contender == peer and (problem, ours) in rates]
        found = Counter(round(log10(rates[problem, ours] / rates[problem, peer])) for problem in problems)
        cells = ", ".join(f"{10.0**power:g}: {found[power]}" for power in sorted(found))
        print(f"best lr of {ours} over that of {peer}, and on how many of {len(problems)} problems: {cells}")


if __name__ == "__main__":
    main()
