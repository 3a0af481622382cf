"""What every adapter that splits batches checks."""

from __future__ import annotations

from typing import Any

__all__ = ["check_parts", "refuse_clipping"]


def check_parts(parts: Any) -> int:
    """The number of parts, if it is one that gives independent gradients."""
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 2:
        raise ValueError(f"parts must be a whole number of gradients, at least 2, got {parts!r}")
    return parts


def refuse_clipping(name: str, value: float | None, off: str) -> None:
    """SGDOLFree learns from differences of gradients."""
    if value:
        raise ValueError(
            f"SGDOLFree compares gradients at different points, which clipping would falsify: give {name}={off}, got "
            f"{value!r}. SGDOLFree shortens outliers and undoes steps that were too long by itself"
        )
