"""What a closure that is given to ``step()`` does when it is called again.

A closure of the user's own draws a fresh batch, so a second call gives a second independent gradient. Lightning hands
its closure to every optimizer: it runs ``training_step`` and ``backward`` on the batch of the moment, however often it
is called. Calling that one twice would take one batch two times: plain SGD, and BatchNorm would see each sample twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["draws_afresh"]

LIGHTNING = frozenset({"lightning", "pytorch_lightning"})
"""The two names under which Lightning is installed."""


def draws_afresh(closure: Callable[[], Any]) -> bool:
    """Whether another call would draw another batch: true for every closure but Lightning's.

    Lightning's closure is a method of its precision plugin, with arguments bound to it; the plugin may be a subclass
    of the user's own. Names are compared, so that nothing of Lightning is imported.

    >>> draws_afresh(lambda: 0.0)
    True
    """
    owner = getattr(closure.func, "__self__", None) if isinstance(closure, partial) else None
    return not any(
        kind.__name__ == "Precision" and kind.__module__.partition(".")[0] in LIGHTNING for kind in type(owner).__mro__
    )
