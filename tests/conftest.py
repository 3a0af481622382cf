"""The folders tests/torch and tests/jax are on the path: a framework that is not installed must not be found there."""

import importlib.util
import sys


def absent(name: str) -> bool:
    """Whether there is nothing, or nothing but a folder, of that name."""
    spec = importlib.util.find_spec(name)
    return spec is None or spec.origin is None


class Refuse:
    """Finds nothing of what is absent, and lets nobody else look."""

    names = tuple(filter(absent, ("torch", "jax")))

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
