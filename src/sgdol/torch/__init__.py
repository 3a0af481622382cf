"""SGDOL and SGDOLFree for PyTorch, ``backward`` for their training loop, averages of the weights, and a log."""

# ruff: noqa: E402  # what is missing is said before anything needs it
from sgdol._extras import require

require("sgdol.torch", "torch", "torch")

from sgdol.torch._averaging import averaged_weights, polynomial_average, random_iterate
from sgdol.torch._backward import backward
from sgdol.torch._free import SGDOLFree
from sgdol.torch._log import Log, scalars
from sgdol.torch._sgdol import SGDOL

__all__ = [
    "SGDOL",
    "Log",
    "SGDOLFree",
    "averaged_weights",
    "backward",
    "polynomial_average",
    "random_iterate",
    "scalars",
]
