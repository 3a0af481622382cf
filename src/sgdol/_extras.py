"""What is installed, and a sentence about what is not."""

from __future__ import annotations

import importlib

__all__ = ["require"]


def require(who: str, extra: str, *modules: str) -> None:
    """See that these can be imported; else say which extra brings them.

    Args:
        who: what needs them.
        extra: the extra of this package that installs them.
        modules: their names.

    >>> require("sgdol.theory", "core", "a_module_that_nobody_has")
    Traceback (most recent call last):
    ...
    ModuleNotFoundError: sgdol.theory needs a_module_that_nobody_has, which is not installed: pip install 'sgdol[core]'
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name != name.partition(".")[0]:
                raise  # it is there, and broken
            raise ModuleNotFoundError(
                f"{who} needs {name}, which is not installed: pip install 'sgdol[{extra}]'", name=name
            ) from missing
