"""How the tests are collected and run: on one thread each, without what only costs time."""

import gc
import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    # Sums in one order each time, also in the programs that tests start; and two workers leave no core for more.
    os.environ.setdefault(name, "1")


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
