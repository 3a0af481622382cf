"""Stochastic gradient descent that learns its own step size while it trains, with a proof.

``SGDOL`` is the PyTorch optimizer, ``SGDOLFree`` the one that needs no smoothness constant, ``sgdol.jax`` the optax
front end. They are imported when they are first used, so that ``import sgdol`` needs neither torch nor jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgdol.plotting import plot as plot
    from sgdol.torch import SGDOL as SGDOL
    from sgdol.torch import SGDOLFree as SGDOLFree

__version__ = "0.1.0"

_MODULES = {
    "convexity": None,
    "free": None,
    "jax": "jax",
    "learners": None,
    "paper": "paper",
    "private": "private",
    "reference": None,
    "reference_free": None,
    "surrogate": None,
    "theory": None,
    "torch": "torch",
    "trainers": "trainers",
}
"""Modules, and the extra that each of them needs."""

__all__ = ["SGDOL", "SGDOLFree", "__version__", "plot"]


def __getattr__(name: str) -> Any:
    if name in ("SGDOL", "SGDOLFree"):
        return getattr(importlib.import_module("sgdol.torch"), name)
    if name == "plot":
        return importlib.import_module("sgdol.plotting").plot
    if name in _MODULES:
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as missing:
            hint = f"pip install 'sgdol[{_MODULES[name]}]'"
            raise AttributeError(f"sgdol.{name} needs {missing.name}, which is not installed: {hint}") from missing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
