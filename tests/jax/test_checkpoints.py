"""A saved state is the whole state: a run that is restored goes on bit for bit, also from the middle of a pair."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from dense_metric import Dense
from six_numbers import gradients, granular, tree

from sgdol.jax import averaged_params, diagnostics, sgdol


@pytest.fixture(scope="module", autouse=True)
def imported():
    """When the first test runs, not when tests are collected: they take a second."""
    global flax, ocp
    import flax.serialization
    import orbax.checkpoint as ocp


pytestmark = pytest.mark.usefixtures("double_precision")


def through_orbax(saved, like, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint", like)


def through_flax_bytes(saved, like, folder):
    (folder / "checkpoint").write_bytes(flax.serialization.to_bytes(saved))
    return flax.serialization.from_bytes(like, (folder / "checkpoint").read_bytes())


def through_flax_dict(saved, like, folder):
    """Nested dictionaries of plain arrays, which any format can hold."""
    return flax.serialization.from_state_dict(like, flax.serialization.to_state_dict(saved))


WAYS = {"orbax": through_orbax, "flax": through_flax_bytes, "state_dict": through_flax_dict}


@pytest.mark.parametrize(
    ("granularity", "way", "metric"),
    [
        ("tensor", "orbax", Dense()),
        ("coordinate", "orbax", "rms"),
        ("group", "flax", "euclidean"),
        ("global", "state_dict", "euclidean"),
    ],
)
def test_a_restored_run_goes_on_bit_for_bit(granularity, way, metric, tmp_path):
    options = {"momentum": 0.9, "averaging": 8, "metric": metric, **granular(granularity)}
    inner = sgdol(optax.linear_schedule(0.3, 0.1, 20), **options)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), inner)
    update = jax.jit(optimizer.update)

    def train(checkpoint, batches):
        params, state = checkpoint["params"], checkpoint["state"]
        for batch in batches:
            updates, state = update(tree(batch), state, params)
            params = optax.apply_updates(params, updates)
        return {"params": params, "state": state}

    batches = gradients(9, 1)[:, 0]
    params = tree(np.ones(6))
    fresh = {"params": params, "state": optimizer.init(params)}
    saved = train(fresh, batches[:5])
    assert diagnostics(saved["state"])["pending"]
    restored = WAYS[way](saved, fresh, tmp_path)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    expected, result = train(saved, batches[5:]), train(restored, batches[5:])
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(result)] == [leaf.dtype for leaf in jax.tree.leaves(expected)]
    average, other = (averaged_params(end["state"], end["params"]) for end in (result, expected))
    jax.tree.map(np.testing.assert_array_equal, average, other)
