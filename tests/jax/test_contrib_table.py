"""Optax's own tests of contributed optimizers, the table that ships in its wheel, with SGDOL registered in it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
import unittest
from pathlib import Path

import optax
import optax.contrib
import pytest

import sgdol.jax


def sgdol_pairs(*args, **options):
    """SGDOL that is given both gradients in one call; without noise they are the same."""
    inner = sgdol.jax.sgdol(*args, **options)

    def update(updates, state, params=None, **extra):
        return inner.update(updates, state, params, others=updates, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


sgdol_pairs.__signature__ = inspect.signature(sgdol.jax.sgdol)  # the table looks at it

# 1e-3 is a stable rate on the table's Rosenbrock function, whose curvature is 1002 at the minimum.
EVERYTHING = {"granularity": "coordinate", "momentum": 0.9, "kappa": 10.0, "weight_decay": 1e-6, "averaging": 8.0}
CONFIGURATIONS = {"alternating": ("sgdol", {}), "pairs": ("sgdol_pairs", EVERYTHING)}


def registered(configuration: str) -> type[unittest.TestCase]:
    """The test case of the module, made when the tables have SGDOL in the place of optax's own entries."""
    name, options = CONFIGURATIONS[configuration]
    spec = importlib.util.find_spec("optax.contrib._common_test")
    module = types.ModuleType(f"optax_contrib_common_test_with_{name}")
    options = {"learning_rate": 1e-3, **options}
    module.TABLE = ({"opt_name": name, "opt_kwargs": options, "wrapper_name": None, "wrapper_kwargs": None},)
    source = ast.parse(Path(spec.origin).read_text())
    case = next(i for i, node in enumerate(source.body) if getattr(node, "name", "") == "ContribTest")
    register = "_ALL_OPTIMIZERS_UNDER_TEST = _MAIN_OPTIMIZERS_UNDER_TEST = TABLE"
    source.body[case:case] = ast.parse(register).body
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module.ContribTest


CASES = {configuration: registered(configuration) for configuration in CONFIGURATIONS}
TESTS = [(each, name) for each, case in CASES.items() for name in unittest.TestLoader().getTestCaseNames(case)]


@pytest.fixture(autouse=True)
def in_contrib(monkeypatch):
    monkeypatch.setattr(optax.contrib, "sgdol", sgdol.jax.sgdol, raising=False)
    monkeypatch.setattr(optax.contrib, "sgdol_pairs", sgdol_pairs, raising=False)


@pytest.mark.parametrize(
    ("configuration", "name"),
    [pytest.param(*row, marks=pytest.mark.slow if row[0] == "pairs" else ()) for row in TESTS],
)
def test_optaxs_own_test_passes(configuration, name):
    result = unittest.TestResult()
    CASES[configuration](name).run(result)
    problems = result.failures + result.errors
    assert not problems, problems[0][1]
    assert not result.skipped
    assert result.testsRun == 1


def test_every_test_of_the_table_runs_for_every_configuration():
    """Seven properties; per configuration 16 tests in optax 0.2.8, and more may come."""
    assert len(TESTS) >= 16 * len(CONFIGURATIONS)
