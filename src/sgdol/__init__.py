"""Stochastic gradient descent that learns its own step size while it trains, with a proof.

``SGDOL`` is the PyTorch optimizer, ``sgdol.jax`` the optax front end. Both are imported when they are first used, so
that ``import sgdol`` needs neither torch nor jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgdol.torch import SGDOL as SGDOL

__version__ = "0.1.0"

_LAZY = {"SGDOL": "sgdol.torch"}
_MODULES = ("jax", "learners", "paper", "reference", "surrogate", "theory", "torch")

__all__ = ["SGDOL", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
