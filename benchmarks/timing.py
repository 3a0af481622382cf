"""Interleaved timing of contenders, and the table and the machine's description that go with it."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch

import sgdol

__all__ = ["machine", "table", "timed"]


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next((x.split(":")[1].strip() for x in cpuinfo.read_text().splitlines() if "model name" in x), model)
    return (
        f"Machine: {model}, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"numpy {numpy.__version__}, sgdol {sgdol.__version__}."
    )


def timed(contenders: dict[str, Iterator[float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):  # the first two warm up
        for name, contender in contenders.items():
            seconds = next(contender)
            if turn >= 2:
                times[name].append(seconds)
    return times


def table(times: dict[str, list[float]], baseline: str) -> list[str]:
    rows = [f"| | median ms | ratio to {baseline} | quartiles |", "|---|---:|---:|---:|"]
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(f"| {name} | {statistics.median(seconds) * 1e3:.1f} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return rows
