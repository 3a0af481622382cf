"""The array libraries that the core accepts."""

from contextlib import contextmanager

import numpy as np
import pytest


@contextmanager
def namespace(name: str):
    """A function that makes float64 or integer arrays of this library, and the type of what it makes."""
    if name == "torch":
        torch = pytest.importorskip("torch")
        yield lambda v: torch.as_tensor(np.asarray(v)), torch.Tensor
    elif name == "jax":
        jax = pytest.importorskip("jax")
        with jax.enable_x64(True):  # a context, so that other tests keep jax as they set it
            yield jax.numpy.asarray, jax.Array
    else:
        yield {"python": float, "numpy": np.asarray}[name], np.ndarray
