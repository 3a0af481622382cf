"""What a bug report has to say of the machine: versions, and nothing that names a person or a place."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable

import sgdol

__all__ = ["environment", "installed", "lines"]

PACKAGES = (
    "numpy", "array-api-compat", "torch", "jax", "jaxlib", "optax", "xarray", "h5netcdf", "h5py", "matplotlib",
    "jinja2", "rich", "typer", "lightning", "transformers", "accelerate",
)  # fmt: skip
THREADS = ("OMP_NUM_THREADS", "JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The version of each package, without importing it.

    >>> installed(["a-package-that-nobody-has"])
    {'a-package-that-nobody-has': 'not installed'}
    """
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment() -> dict[str, str]:
    """Versions, the machine and the settings that change how it computes."""
    own = {"sgdol": sgdol.__version__, "Python": f"{platform.python_implementation()} {platform.python_version()}"}
    machine = {
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "encoding": f"{sys.stdout.encoding}",
    }
    return own | installed(PACKAGES) | machine | {name: os.environ[name] for name in THREADS if name in os.environ}


def lines() -> list[str]:
    """The same as text, a line for each."""
    return [f"{name:<20} {value}" for name, value in environment().items()]
