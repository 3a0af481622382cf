"""How many of this library's functions one update enters, in how many files, and how often it changes file.

    python -m benchmarks.calls

For whoever reads an update: every function is something to look up, every change of file a place to find again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import torch

from sgdol import SGDOL, SGDOLFree
from sgdol.torch import backward

__all__ = ["entered"]


def entered(step: Callable[[], Any], package: str) -> tuple[int, int, int]:
    """(functions, files, changes of file) of a package that a call enters; comprehensions do not count."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and f"/{package}/" in code.co_filename and not code.co_name.startswith("<"):
            calls.append((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    files = [file for file, _ in calls]
    return len(set(calls)), len(set(files)), sum(a != b for a, b in pairwise(files))


def main() -> None:
    """Print a table."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    print(f"{'one update, two microbatches':42} functions  files  changes of file")
    for name, make, package in (
        ("torch.optim.SGD(momentum)", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "torch/optim"),
        ("SGDOL", lambda p: SGDOL(p, lr=0.1), "sgdol"),
        ("SGDOL, metric rms", lambda p: SGDOL(p, lr=0.1, metric="rms"), "sgdol"),
        ("SGDOL, one step size per coordinate", lambda p: SGDOL(p, lr=0.1, granularity="coordinate"), "sgdol"),
        ("SGDOLFree", lambda p: SGDOLFree(p), "sgdol"),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        opt: Any = make(model.parameters())

        def step(model: torch.nn.Module = model, opt: Any = opt) -> Any:
            def closure() -> torch.Tensor:
                opt.zero_grad()
                return backward(lambda a, b: torch.nn.functional.cross_entropy(model(a), b), x, y)

            return opt.step(closure)

        for _ in range(10):
            step()
        print(f"{name:42} {entered(step, package)[0]:9} {entered(step, package)[1]:6} {entered(step, package)[2]:16}")


if __name__ == "__main__":
    main()
