"""Where the optimizer without M left the parameters: it compares points, and is misled if somebody else moves them."""

from __future__ import annotations

from typing import NamedTuple

from sgdol.torch._evaluations import Here
from sgdol.torch._vectors import Space, Vector, same

__all__ = ["Whereabouts"]

WHOLE = 1 << 14
SAMPLED = 256
"""A point of at most so many coordinates is compared whole, of a larger one about so many of them."""


class _Left(NamedTuple):
    """A point as it was left."""

    space: Space
    versions: list[int]
    """How often the parameters had been written to."""
    samples: Vector


class Whereabouts:
    """Remembers the point that a step ended at; nothing to begin with, and then every point is fine."""

    def __init__(self) -> None:
        self._left: _Left | None = None

    def remember(self, here: Here) -> None:
        """A step ends here."""
        x = here.space.point("left") if here.space.narrow else here.x
        self._left = _Left(here.space, _versions(here.space), _samples(here.space, x))

    def written(self) -> None:
        """The parameters were written to, and are where they were."""
        if self._left is not None:
            self._left = self._left._replace(versions=_versions(self._left.space))

    def refuse_moved(self, space: Space, x: Vector) -> None:
        """Raise if this point, where the parameters are, is not where they were left."""
        if self._left is None:
            return
        was_in, versions, left = self._left
        if was_in is not space:
            space, x = was_in, was_in.point("there")
        if versions == _versions(space) and same(_samples(space, x), left):
            return
        raise RuntimeError(
            "the parameters were changed by something else since the last step of SGDOLFree, which compares points and "
            "would be misled. If that was on purpose, say so: opt.moved() after clipping or projecting, opt.restart() "
            "after loading other weights"
        )


def _versions(space: Space) -> list[int]:
    """How often the parameters were written to, of a model that is too large to be compared whole."""
    return [] if space.size <= WHOLE else [p._version for p in space.params]


def _samples(space: Space, x: Vector) -> Vector:
    """The point itself, or a few coordinates of a large one; copied, if its memory is not kept."""
    if space.size <= WHOLE:
        return x
    few = [flat[:: max(1, flat.numel() // SAMPLED)] for flat in x]
    return few if space.keeps else [flat.clone() for flat in few]
