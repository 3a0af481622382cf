"""The patches in contrib/ apply to the released packages, and the tests that they bring pass there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from processes import output

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"

COMMON = """
import sys, unittest
from absl import app
from optax.contrib import _common_test

def main(_):
    found = unittest.TestLoader().loadTestsFromTestCase(_common_test.ContribTest)
    suite = unittest.TestSuite(test for test in found if "'sgdol'" in test.id())
    assert suite.countTestCases() > 10
    sys.exit(not unittest.TextTestRunner().run(suite).wasSuccessful())

app.run(main)
"""
"""Of optax's common tests those of the optimizer that the patch adds."""

AGREES = """
import jax, jax.numpy as jnp, optax
import optax.contrib
from sgdol.jax import sgdol
from sgdol.learners import FTRL

grads = 0.3 + jax.random.normal(jax.random.key(0), (40, 2, 5))
theirs, ours = optax.contrib.sgdol(0.1, alpha=10.0), sgdol(0.1, alpha=10.0, momentum=0.0, learner=FTRL())
params = jnp.zeros(5)
a, b = theirs.init(params), ours.init(params)
for first, second in grads:
    x, a = theirs.update(first, a, params, other_grads=second)
    y, b = ours.update(first, b, params, others=second)
    assert jnp.allclose(x, y, rtol=1e-4, atol=1e-6), (x, y)
assert 0 < a[0].multiplier < 0.9, a[0].multiplier  # something was learned
"""


def patched(package: str, folder: Path) -> Path:
    """A copy of an installed package with its patch applied."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    shutil.copytree(Path(found.origin).parent, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    patch = ROOT / "contrib" / f"{package}.patch"
    output(["git", "apply", "--exclude=docs/*", patch], cwd=folder)
    return folder


def run(folder: Path, *command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SRC}", "OMP_NUM_THREADS": "1"}
    output([sys.executable, *command], cwd=folder, env=environment)


@pytest.mark.slow
def test_the_patch_for_optax_passes_its_own_tests_and_optaxs(tmp_path):
    folder = patched("optax", tmp_path)
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "optax/contrib/_sgdol_test.py")
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", "optax/contrib/_sgdol.py")
    run(folder, "-c", COMMON)


@pytest.mark.slow
def test_the_patch_for_optax_computes_what_sgdol_jax_does(tmp_path):
    run(patched("optax", tmp_path), "-c", AGREES)


@pytest.mark.slow
def test_the_patch_for_pytorch_optimizer_passes_its_tests(tmp_path):
    folder = patched("pytorch_optimizer", tmp_path)
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_sgdol.py")
