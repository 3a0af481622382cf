"""How good SGDOL is on larger ordinary networks, beside tuned optimizers.

  python -m benchmarks.networks measure --half development --jobs 2   # the half that defaults are chosen on
  python -m benchmarks.networks measure --half held-out --jobs 2      # only to report: look at it last
  python -m benchmarks.networks measure --half both --smoke           # two minutes, to see that everything runs
  python -m benchmarks.networks tables                                # again from the saved runs
  python -m benchmarks.networks list                                  # the networks and the methods

An interrupted `measure` continues where it was: every run is kept in --cache, and the saved runs are written again
after every method. Both are used until the network, the method, their code or their versions change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.networks import methods, page, problems
from benchmarks.networks.harness import NETWORKS, SETTINGS, SMOKE, Line
from benchmarks.quality import commands
from benchmarks.quality.commands import RESULTS
from benchmarks.quality.harness import in_order, measure_all
from benchmarks.quality.page import about
from benchmarks.quality.tables import read_rows, write_rows

RUNS, ABOUT, PAGE = "networks-runs.csv", "networks-about.json", "networks.md"


def main(arguments: Sequence[str] | None = None) -> None:
    smoke = "every fourth network, one seed, one learning rate, a twenty-fifth of the budgets"
    chosen = commands.parse("benchmarks.networks", __doc__, smoke, ".networks", arguments)
    if chosen.command == "list":
        _list()
        return
    default = Path("results") / "networks-smoke" if getattr(chosen, "smoke", False) else RESULTS
    out: Path = chosen.out or default
    if chosen.command == "measure":
        settings = SMOKE if chosen.smoke else SETTINGS
        everyone = methods.contenders()
        suite = [p for p in problems.suite() if p.half in commands.halves(chosen)]
        suite = suite[::4] if chosen.smoke and not chosen.problem else suite
        suite = [p for p in suite if p.name in (chosen.problem or [p.name])]
        lines = [] if chosen.smoke or not (out / RUNS).exists() else read_rows(out / RUNS, Line)
        by_method = {c.method.name: c.method for c in commands.chosen_contenders(everyone, chosen)}
        for method in by_method.values():  # one after the other: what the others are relative to comes first
            mine = [c for c in everyone if c.method.name == method.name]
            saved = [] if chosen.fresh else lines
            found = measure_all(suite, mine, chosen.cache, settings, chosen.jobs, saved, part=NETWORKS)
            if chosen.problem or chosen.method:
                _print(found)
                continue
            new = {(r.problem, r.contender) for r in found}
            lines = [r for r in lines if (r.problem, r.contender) not in new] + found
            lines = in_order(lines, problems.suite(), [c.label for c in everyone])
            write_rows(out / RUNS, lines, Line)
            known = about(settings, _command(chosen), ("pytorch_optimizer",))
            (out / ABOUT).write_text(json.dumps(known, indent=1) + "\n")
        if chosen.problem or chosen.method:
            return
    _write(out)


def _command(chosen: argparse.Namespace) -> str:
    """What was run, without what changes no number."""
    without = "".join(f" --without-package {p}" for p in chosen.without_package)
    return f"python -m benchmarks.networks measure --half {chosen.half}{without}{' --smoke' * chosen.smoke}"


def _print(lines: Sequence[Line]) -> None:
    for r in lines:
        rate = "" if r.learning_rate is None else f" lr {r.learning_rate:g}"
        print(
            f"{r.problem}: {r.contender}{rate} seed {r.seed}: loss {r.loss:.4g} validation {r.validation:.4g} "
            f"rise {r.rise:.3g} {r.seconds:.1f} s{' diverged' if r.diverged else ''}"
        )


def _write(out: Path) -> None:
    if not (out / RUNS).exists():
        raise SystemExit(f"no saved runs in {out}: run `python -m benchmarks.networks measure --half both` first")
    text = page.markdown(read_rows(out / RUNS, Line), json.loads((out / ABOUT).read_text()))
    (out / PAGE).write_text(text)
    print(text)


def _list() -> None:
    print(f"{'network':18} {'half':12} {'kind':12} {'budget':>6} {'parameters':>10}")
    for p in problems.suite():
        count = sum(q.numel() for q in p.make(0, steps=1).parameters())
        print(f"{p.name:18} {p.half:12} {p.kind:12} {p.budget:6d} {count:10d}")
    print(f"\n{'method':20} contender")
    for c in methods.contenders():
        print(f"{c.method.name:20} {c.label}: {c.group}")


if __name__ == "__main__":
    main()
