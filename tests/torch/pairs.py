"""Combinations of options: all pairs of values, in few rows, and a sample of the rest."""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def all_pairs(
    table: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda _: True, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows in which every two values of two options that are allowed together occur together.

    Greedy: of a number of random allowed rows the one that covers most of the pairs that are still missing.
    """
    rng = random.Random(seed)
    names = list(table)

    def row() -> dict[str, Any]:
        while True:
            found = {name: rng.randrange(len(table[name])) for name in names}
            if allowed({name: table[name][i] for name, i in found.items()}):
                return found

    def pairs(found: dict[str, int]) -> set[tuple[Any, ...]]:
        return {(a, found[a], b, found[b]) for a, b in itertools.combinations(names, 2)}

    possible = set().union(*(pairs(row()) for _ in range(min(4000, 10 * math.prod(map(len, table.values()))))))
    rows = []
    while possible:
        best = max((row() for _ in range(60)), key=lambda found: len(pairs(found) & possible))
        if pairs(best) & possible:
            rows.append(best)
            possible -= pairs(best)
    return [{name: table[name][i] for name, i in found.items()} for found in rows]


def pairwise(**table: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with rows in which every two values of two arguments occur together."""
    rows = all_pairs(table)
    return pytest.mark.parametrize(tuple(table), [tuple(row.values()) for row in rows], ids=map(name, rows))


def sample(
    table: Mapping[str, Sequence[Any]], count: int, allowed: Callable[[dict[str, Any]], bool] = lambda _: True, seed=1
) -> list[dict[str, Any]]:
    """So many random rows."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        found = {name: rng.choice(list(values)) for name, values in table.items()}
        if allowed(found):
            rows.append(found)
    return rows


def name(row: Mapping[str, Any]) -> str:
    """A row as the name of a test."""
    words = (value if isinstance(value, tuple) else (value,) for value in row.values())
    return "-".join(" ".join(getattr(each, "__name__", str(each)) for each in several) for several in words)
