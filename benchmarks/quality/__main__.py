"""How good SGDOL is beside other optimizers, at equal budgets of gradient evaluations.

  python -m benchmarks.quality measure --half development --jobs 2   # the half that defaults are chosen on
  python -m benchmarks.quality measure --half held-out --jobs 2      # only to report: look at it last
  python -m benchmarks.quality measure --half both --smoke           # two minutes, to see that everything runs
  python -m benchmarks.quality tables                                # again from the saved runs
  python -m benchmarks.quality list                                  # the problems and the methods

An interrupted `measure` continues where it was: every run is kept in --cache until its problem, its method, their code
or their versions change. So do the saved tables: lines of which nothing has changed are not run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from benchmarks.quality import commands, figure, harness, methods, page, problems, tables
from benchmarks.quality.commands import RESULTS
from benchmarks.quality.harness import Settings

SMOKE = Settings(seeds=(1,), grid=(-1,), extensions=0, shorten=20.0)


def main(arguments: list[str] | None = None) -> None:
    smoke = "one problem of each kind, one seed, one learning rate, a twentieth of the budgets"
    chosen = commands.parse("benchmarks.quality", __doc__, smoke, ".quality", arguments)
    if chosen.command == "list":
        _list()
    elif chosen.command == "tables":
        _write(chosen.out or RESULTS)
    else:
        _measure(chosen)


def _measure(chosen: argparse.Namespace) -> None:
    settings = SMOKE if chosen.smoke else Settings()
    out: Path = chosen.out or (Path("results") / "quality-smoke" if chosen.smoke else RESULTS)
    everyone = methods.contenders()
    contenders = commands.chosen_contenders(everyone, chosen)
    for half in commands.halves(chosen):
        whole = [p for p in problems.suite() if p.half == half]
        if chosen.smoke and not chosen.problem:  # one of each kind
            whole = list({p.kind: p for p in reversed(whole)}.values())[::-1]
        suite = [p for p in whole if p.name in (chosen.problem or [p.name])]
        path = out / f"quality-runs-{half}.csv"
        saved = tables.read_runs(path) if path.exists() else []
        usable = [] if chosen.fresh or chosen.smoke else saved
        lines = harness.measure_all(suite, contenders, chosen.cache, settings, chosen.jobs, usable)
        if chosen.problem or chosen.method:
            for line in lines:
                rate = "" if line.learning_rate is None else f" lr {line.learning_rate:g}"
                accuracy = "" if line.accuracy is None else f" accuracy {line.accuracy:.3f}"
                failed = " diverged" if line.diverged else ""
                print(f"{line.problem}: {line.contender}{rate} seed {line.seed}: gap {line.gap:.3g}{accuracy}{failed}")
            continue
        left = {c.label for c in everyone} - {c.label for c in contenders}
        lines += [line for line in saved if line.contender in left]
        tables.write_runs(path, harness.in_order(lines, whole, [c.label for c in everyone]))
        command = f"python -m benchmarks.quality measure --half {half}" + (" --smoke" if chosen.smoke else "")
        about = page.about(settings, command)
        (out / f"quality-about-{half}.json").write_text(json.dumps(about, indent=1) + "\n")
    if not (chosen.problem or chosen.method):
        _write(out)


def _write(out: Path) -> None:
    saved = [out / f"quality-runs-{half}.csv" for half in problems.HALVES]
    lines = [line for path in saved if path.exists() for line in tables.read_runs(path)]
    if not lines:
        raise SystemExit(f"no saved runs in {out}: run `python -m benchmarks.quality measure --half development` first")
    text = page.markdown(lines, page.read_information(out))
    (out / "quality.md").write_text(text)
    whole = {half: tables.complete(lines, half)[0] for half in problems.HALVES}
    rows = [row for half, mine in whole.items() if mine for row in tables.summarise(mine, half)]
    tables.write_summary(out / "quality.csv", rows)
    figure.draw(
        [line for mine in whole.values() for line in mine], [out / f"quality-profile.{e}" for e in ("png", "svg")]
    )
    print(text)
    shown = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    print(f"written to {shlex.quote(str(shown))}", file=sys.stderr)


def _list() -> None:
    print(f"{'problem':32} {'half':12} {'kind':14} {'budget':>6}  lr of SGD, Adam in units of")
    for p in problems.suite():
        print(f"{p.name:32} {p.half:12} {p.kind:14} {p.budget:6d}  {p.scales.gradient:g}, {p.scales.step:g}")
    print(f"\n{'method':32} optimizer")
    for m in methods.METHODS:
        note = "" if methods.available(m) else "  (not installed)"
        options = ", ".join(f"{k}={v!r}" for k, v in m.options.items())
        print(f"{m.name:32} {m.optimizer.replace(':', '.')}({options}){note}")


if __name__ == "__main__":
    main()
