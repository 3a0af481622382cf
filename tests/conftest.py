"""How the tests are found and run: no folder passes for a framework, one thread each, without what only costs time."""

import gc
import importlib.metadata
import importlib.util
import os
import sys

import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    # Sums in one order each time, also in the programs that tests start; and two workers leave no core for more.
    os.environ.setdefault(name, "1")

COMPILE_QUICKLY = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""Compiling takes a third of the time, and here a program runs for a few steps. Unknown flags end the process, so they
are given to the version alone that is known to have them."""


def pytest_configure():
    """Before anything imports jax, and for the programs that tests start."""
    flags = os.environ.get("XLA_FLAGS", "")
    try:
        known = importlib.metadata.version("jaxlib").startswith("0.10.")
    except importlib.metadata.PackageNotFoundError:
        known = False
    if known and COMPILE_QUICKLY not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {COMPILE_QUICKLY}".strip()


def pytest_ignore_collect(collection_path):
    """Helpers have no tests, and no examples that would be tests: they are not imported to look for some."""
    helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if helper else None


def pytest_sessionstart():
    """Importing makes a million objects that stay: looking for garbage among them takes a second or two."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def compiled_in_a_hurry(request):
    """There are hundreds of programs, and each runs for a few steps: optimizing them takes most of the time."""
    if request.path.parent.name not in ("jax", "paper"):
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# tests/torch and tests/jax are on the path: a framework that is not installed must not be found there.


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
