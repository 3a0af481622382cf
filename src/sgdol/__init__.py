"""Optimizers for PyTorch and optax that learn their step size while they train.

:class:`sgdol.SGDOLFree` needs no learning rate. :class:`sgdol.SGDOL` is SGD with momentum that shortens its steps where
the learning rate is too large; ``SGDOL(params, smoothness=M, **sgdol.PAPER)`` is the algorithm of Zhuang, Cutkosky and
Orabona (ICML 2019), which has a convergence proof. ``sgdol.jax`` has both for optax. Names are imported when they are
first used, so that ``import sgdol`` needs neither torch nor jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgdol.learners import PAPER as PAPER
    from sgdol.plotting import plot as plot
    from sgdol.torch import SGDOL as SGDOL
    from sgdol.torch import SGDOLFree as SGDOLFree

__version__ = "0.2.0"

_MODULES = (
    "averaging",
    "convexity",
    "free",
    "jax",
    "learners",
    "metrics",
    "paper",
    "private",
    "probing",
    "reference",
    "reference_free",
    "reference_kronecker",
    "summary",
    "surrogate",
    "theory",
    "torch",
    "trainers",
)

__all__ = ["PAPER", "SGDOL", "SGDOLFree", "__version__", "plot"]


def __getattr__(name: str) -> Any:
    if name in ("SGDOL", "SGDOLFree"):
        return getattr(importlib.import_module("sgdol.torch"), name)
    if name == "PAPER":
        return importlib.import_module("sgdol.learners").PAPER
    if name == "plot":
        return importlib.import_module("sgdol.plotting").plot
    if name in _MODULES:
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as missing:  # hasattr and completion ask for everything
            raise AttributeError(str(missing)) from missing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
