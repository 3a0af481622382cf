"""Data parallel on four devices equals one device that has all the gradients, and communicates no more than it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAVES = [3, 2, 1]
"""The sizes of the leaves, which the mean of the gradients has to have anyway."""


@pytest.fixture(scope="module")
def measured():
    program = Path(__file__).with_name("four_devices.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def numbers_besides(sizes, *expected):
    """What is communicated besides these."""
    left = list(sizes)
    for size in expected:
        left.remove(size)
    return left


@pytest.mark.parametrize("granularity", ["global", "group", "tensor", "coordinate"])
def test_shard_map_equals_one_device_with_all_the_gradients(measured, granularity):
    result = measured["shard_map"][granularity]
    assert result["difference"] < 1e-13  # sums in another order
    assert result["copies_differ"] == 0
    assert result["gradients"] == (8 if granularity in ("global", "coordinate") else 4)


@pytest.mark.parametrize(("granularity", "blocks"), [("global", 1), ("group", 2), ("tensor", 3)])
def test_besides_the_mean_gradient_one_number_per_block_is_communicated(measured, granularity, blocks):
    assert numbers_besides(measured["shard_map"][granularity]["all_reduced"], *LEAVES) == [blocks]


def test_per_coordinate_one_gradient_sized_sum_more_is_communicated(measured):
    assert numbers_besides(measured["shard_map"]["coordinate"]["all_reduced"], *LEAVES) == LEAVES


def test_the_papers_estimator_takes_the_devices_mean_for_one_gradient(measured):
    assert measured["paper"]["difference"] < 1e-13
    assert measured["paper"]["updates"] == 4


def test_plain_jit_with_a_sharded_stack_needs_no_axis_name(measured):
    """The compiler adds the sums itself; it does not join those of several leaves."""
    together, apart = (measured["partitioned_by_the_compiler"][name] for name in ("global", "coordinate"))
    assert together["difference"] < 1e-13
    assert numbers_besides(together["all_reduced"], *LEAVES) == [1, 1, 1]
    assert apart["difference"] < 1e-13
    assert numbers_besides(apart["all_reduced"], *LEAVES) == LEAVES


@pytest.mark.parametrize("check", [True, False])
def test_each_device_differentiates_on_its_own_rows(measured, check):
    assert measured["training"][f"check_vma={check}"] < 1e-13


def test_gradients_that_shard_map_has_summed_are_refused(measured):
    assert "each device's own, but over axis_name='data' they are the same" in measured["training"]["error"]


def test_an_axis_of_one_device_holds_a_gradient_alone(measured):
    assert measured["one_device"]["difference"] == 0
    assert measured["one_device"]["pending"] == [True, False]
