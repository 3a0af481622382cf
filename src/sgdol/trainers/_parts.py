"""What every adapter that splits batches checks."""

from __future__ import annotations

from typing import Any

__all__ = ["check_parts"]


def check_parts(parts: Any) -> int:
    """The number of parts, if it is one that gives independent gradients."""
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 2:
        raise ValueError(f"parts must be a whole number of gradients, at least 2, got {parts!r}")
    return parts
