r"""The adult data (LIBSVM's a9a), shipped with the package: nothing is downloaded at run time.

a9a is an exact function of the file ``adult.data`` of the UCI Adult data set (Becker and Kohavi 1996, CC BY 4.0; see
``adult.txt`` beside this file): each of its fourteen attributes becomes a block of binary features, a continuous
attribute by cutting its range into bins and a categorical one by one feature per value. The package holds one byte per
attribute, compressed, and everything else follows from :data:`ATTRIBUTES`.

The experiments of the paper use :func:`balanced_adult`: all the people of the smaller class, as many of the larger one
and a constant feature.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import math
import os
import zlib
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgdol.paper.files import shown, write_atomically

__all__ = [
    "A9A_BYTES",
    "A9A_SHA256",
    "ATTRIBUTES",
    "N_FEATURES",
    "Adult",
    "Attribute",
    "DataError",
    "a9a_text",
    "balanced_adult",
    "describe",
    "encode",
    "export",
    "export_a9a",
    "load_a9a",
    "read_libsvm",
]

A9A_BYTES = 2_329_875
A9A_SHA256 = "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906"
"""The size and the SHA-256 of the file ``a9a`` as the LIBSVM site distributes it."""

N_FEATURES = 123
SHIPPED = "adult.bz2"


class DataError(ValueError):
    """A data file that cannot be used; the message is one sentence that says where and why."""


class Attribute(NamedTuple):
    """One attribute of adult.data and the features that it becomes."""

    name: str
    cuts: tuple[int, ...] = ()
    """Of a continuous attribute: a value <= the cut falls to its left."""
    values: tuple[str, ...] = ()
    """Of a categorical one, in the order of adult.names. Any other value ("?") sets no feature."""

    @property
    def width(self) -> int:
        """How many features the attribute becomes."""
        return len(self.values) or len(self.cuts) + 1

    def code(self, text: str) -> int:
        """1 + the number of the feature that the value sets within the attribute's block, or 0 for none.

        >>> Attribute("age", cuts=(25, 32, 40, 49)).code("39")
        3
        >>> Attribute("sex", values=("Female", "Male")).code("?")
        0
        """
        if self.cuts:
            return 1 + sum(cut < int(text) for cut in self.cuts)
        if text == "?":
            return 0
        return 1 + self.values.index(text)


ATTRIBUTES = (
    Attribute("age", cuts=(25, 32, 40, 49)),
    Attribute(
        "workclass",
        values=(
            "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
            "Never-worked",
        ),
    ),
    Attribute("fnlwgt", cuts=(106647, 158661, 196337, 259872)),
    Attribute(
        "education",
        values=(
            "Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th", "7th-8th",
            "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool",
        ),
    ),
    Attribute("education-num", cuts=(8, 9, 10, 12)),
    Attribute(
        "marital-status",
        values=(
            "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent",
            "Married-AF-spouse",
        ),
    ),
    Attribute(
        "occupation",
        values=(
            "Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
            "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
            "Priv-house-serv", "Protective-serv", "Armed-Forces",
        ),
    ),
    Attribute(
        "relationship", values=("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried")
    ),
    Attribute("race", values=("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black")),
    Attribute("sex", values=("Female", "Male")),
    Attribute("capital-gain", cuts=(0,)),
    Attribute("capital-loss", cuts=(0,)),
    Attribute("hours-per-week", cuts=(34, 39, 40, 47)),
    Attribute(
        "native-country",
        values=(
            "United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)",
            "India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland",
            "Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador",
            "Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia",
            "El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands",
        ),
    ),
)  # fmt: skip
"""The fourteen attributes in the order of adult.data, which is also the order of a9a's features."""


class Adult(NamedTuple):
    """A classification data set, ready for the model of section 7."""

    features: NDArray[np.float64]
    """One row per sample; the last column is the constant 1."""
    labels: NDArray[np.float64]
    """-1 or +1."""
    rows: NDArray[np.intp]
    """Which rows of the file the samples are, ascending."""


def encode(codes: NDArray[np.uint8]) -> bytes:
    """The shipped file's bytes from the table of codes, one row per person: fourteen attributes, then 1 for >50K.

    bzip2's output has been the same for decades, so that the same table gives the same file.
    """
    return bz2.compress(np.ascontiguousarray(codes, dtype=np.uint8).tobytes(), compresslevel=9)


def _codes() -> NDArray[np.uint8]:
    raw = bz2.decompress(resources.files(__package__).joinpath(SHIPPED).read_bytes())
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, len(ATTRIBUTES) + 1)


def load_a9a() -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """The features (32561, 123), 0 or 1, and the labels, -1 or +1, in the order of LIBSVM's a9a.

    >>> features, labels = load_a9a()
    >>> features.shape, int((labels == 1).sum())
    ((32561, 123), 7841)
    """
    codes = _codes()
    blocks = [
        codes[:, [column]] == np.arange(1, attribute.width + 1, dtype=np.uint8)
        for column, attribute in enumerate(ATTRIBUTES)
    ]
    return np.hstack(blocks).astype(np.uint8), np.where(codes[:, -1] == 1, 1, -1).astype(np.int8)


def a9a_text(codes: NDArray[np.uint8] | None = None) -> bytes:
    r"""The file ``a9a`` byte for byte: a label, the features that are 1 in ascending order, a space and a newline.

    Args:
        codes: the table of :func:`encode`; None for the shipped one.

    >>> a9a_text().split(b"\n")[0]
    b'-1 3:1 11:1 14:1 19:1 39:1 42:1 55:1 64:1 67:1 73:1 75:1 76:1 80:1 83:1 '
    """
    table = _codes() if codes is None else codes
    firsts = np.cumsum([1] + [attribute.width for attribute in ATTRIBUTES])
    words = [
        ["", *(f"{first + value}:1 " for value in range(attribute.width))]
        for first, attribute in zip(firsts, ATTRIBUTES, strict=False)
    ]
    lines = [
        ("+1 " if label else "-1 ") + "".join(word[code] for word, code in zip(words, row, strict=True))
        for *row, label in table.tolist()
    ]
    return ("\n".join(lines) + "\n").encode("ascii")


def export_a9a(path: str | os.PathLike[str]) -> Path:
    """Write LIBSVM's file ``a9a`` and return where it is.

    A file that is already there is left alone: with the same content that is a success, with another one an error.
    """
    target = Path(path)
    text = a9a_text()
    assert hashlib.sha256(text).hexdigest() == A9A_SHA256, "the shipped adult data are damaged: reinstall sgdol"
    if target.is_dir():
        target = target / "a9a"
    if target.exists():
        if target.read_bytes() == text:
            return target
        raise DataError(f"{target} exists and holds something else; it was left alone: give another path")
    try:
        write_atomically(target, text)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror}") from error
    return target


def export(name: str, path: str | os.PathLike[str]) -> Path:
    """Write the data set of that name, of which there is one: a9a."""
    if name != "a9a":
        raise DataError(f"cannot export {name!r}: the data set that can be exported is a9a")
    return export_a9a(path)


def describe(path: str | os.PathLike[str] | None = None) -> str:
    """What the shipped data or a user's file hold, in a few lines.

    >>> print(describe().splitlines()[0])
    the adult data (a9a): 32,561 rows, 123 features, 7,841 of +1 and 24,720 of -1
    """
    features, labels = load_a9a() if path is None else read_libsvm(path)
    rows, columns = features.shape
    positive = int((labels == 1).sum())
    name = "the adult data (a9a)" if path is None else str(path)
    counts = f"{name}: {rows:,} rows, {columns} features, {positive:,} of +1 and {rows - positive:,} of -1"
    used = f"balanced, as the experiments use them: {2 * min(positive, rows - positive):,} rows, {columns + 1} features"
    if path is not None:
        return f"{counts}\n{used}"
    licence = resources.files(__package__).joinpath("adult.txt").read_text(encoding="utf-8").strip()
    return f"{counts}\n{used}\nSHA-256 of the file a9a: {A9A_SHA256}\n\n{licence}"


_DECOMPRESS = {b"\x1f\x8b": gzip.decompress, b"BZ": bz2.decompress, b"\xfd7": lzma.decompress}


def _content(path: Path) -> bytes:
    """The file's bytes, decompressed if their first two say that they are compressed."""
    raw = path.read_bytes()
    decompress = _DECOMPRESS.get(raw[:2])
    if decompress is None:
        return raw
    try:
        return decompress(raw)
    except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged: {error}") from error


def read_libsvm(
    path: str | os.PathLike[str], n_features: int = N_FEATURES
) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
    """Read a file in LIBSVM's format, plain or compressed by gzip, bzip2 or xz, and check every line of it.

    Args:
        path: the file; each line is ``label index:value index:value ...`` with a label of -1 or +1 and ascending
            indices from 1.
        n_features: how many features there are, which the file itself may not show (a9a.t stops at 122).

    Returns:
        The features (rows, n_features) and the labels, -1 or +1.

    Raises:
        DataError: one sentence with the file, the line, what was found and what is allowed.
    """
    source = Path(path)
    try:
        content = _content(source)
    except FileNotFoundError:
        raise DataError(f"there is no file {source}") from None
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror or error}") from error
    if not content.strip():
        raise DataError(f"{source} is empty: expected lines such as '+1 3:1 11:1'")
    lines = content.split(b"\n")
    whole = lines[-1].strip() == b""
    if whole:
        lines.pop()
    features = np.zeros((len(lines), n_features))
    labels = np.zeros(len(lines), dtype=np.int8)
    for number, line in enumerate(lines, start=1):
        try:
            labels[number - 1] = _parse(line, features[number - 1])
        except ValueError as error:
            cut = " (the file also ends in the middle of this line: is it truncated?)"
            raise DataError(
                f"{source}, line {number}: {error}{cut if not whole and number == len(lines) else ''}"
            ) from None
    if not whole:
        raise DataError(
            f"{source}, line {len(lines)}: the file ends without a newline, so it looks truncated;"
            " if it is whole, add one"
        )
    return features, labels


def _parse(line: bytes, row: NDArray[np.float64]) -> int:
    """Fill one row from one line and return its label."""
    words = line.decode("ascii", errors="replace").split()
    if not words:
        raise ValueError("found an empty line, expected a label -1 or +1 and index:value pairs")
    label = {"+1": 1, "1": 1, "-1": -1, "+1.0": 1, "1.0": 1, "-1.0": -1}.get(words[0])
    if label is None:
        raise ValueError(f"found the label {shown(words[0])}, allowed are -1 and +1")
    last = 0
    for word in words[1:]:
        index_text, _, value_text = word.partition(":")
        try:
            if "_" in word:  # Python reads 1_0 as 10, and nobody else does
                raise ValueError
            index, value = int(index_text), float(value_text)
        except ValueError:
            raise ValueError(f"found {shown(word)}, expected a pair index:value such as 3:1") from None
        if not 1 <= index <= len(row):
            found = index if len(index_text) <= 20 else shown(index_text)
            raise ValueError(f"found the index {found}, allowed are 1 to {len(row)}")
        if index <= last:
            raise ValueError(f"found the index {index} after {last}, indices must ascend")
        if not math.isfinite(value):
            raise ValueError(f"found the value {shown(value_text)} of index {index}, allowed are finite numbers")
        row[index - 1] = value
        last = index
    return label


def balanced_adult(seed: int = 0, path: str | os.PathLike[str] | None = None) -> Adult:
    """The data of section 7: all of the smaller class, as many of the larger one, and a constant feature.

    Of a9a these are all 7,841 positives and 7,841 of the 24,720 negatives, drawn without replacement.

    Args:
        seed: of the draw; the same seed gives the same rows.
        path: a LIBSVM file of the user's own, instead of the shipped a9a.

    >>> adult = balanced_adult()
    >>> adult.features.shape, float(adult.labels.sum())
    ((15682, 124), 0.0)
    """
    features, labels = load_a9a() if path is None else read_libsvm(path)
    classes = [np.flatnonzero(labels == label) for label in (-1, 1)]
    size = min(len(members) for members in classes)
    if size == 0:
        raise DataError(f"{path} holds samples of one class only: both -1 and +1 are needed")
    rng = np.random.default_rng(seed)
    rows = np.sort(
        np.concatenate(
            [m if len(m) == size else rng.choice(m, size=size, replace=False, shuffle=False) for m in classes]
        )
    )
    bias = np.ones((len(rows), 1))
    return Adult(np.hstack([features[rows].astype(np.float64), bias]), labels[rows].astype(np.float64), rows)
