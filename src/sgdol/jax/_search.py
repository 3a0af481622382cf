"""Find a part of an optimizer's state in whatever wraps it."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["find"]


def find(state: Any, kind: type) -> list[tuple[str, Any]]:
    """All parts of the type, each with its path.

    >>> from typing import NamedTuple
    >>> class Part(NamedTuple):
    ...     number: int
    >>> find({"a": (Part(1), 2)}, Part)
    [("['a'][0]", Part(number=1))]
    """
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda node: isinstance(node, kind))
    return [(jax.tree_util.keystr(path), node) for path, node in nodes if isinstance(node, kind)]
