"""A program on four CPU devices, run by test_devices.py: prints what it measured as JSON.

Every comparison is the largest difference from one device that has all the gradients stacked.
"""

from __future__ import annotations

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from six_numbers import gradients, granular, tree

from sgdol.jax import diagnostics, microbatch_grads, sgdol

DEVICES, STEPS = 4, 4
OPTIONS = {"momentum": 0.5, "weight_decay": 0.1, "averaging": 8}


@functools.cache
def mesh():
    return jax.make_mesh((DEVICES,), ("data",))


def sharded(value):
    """Rows over the devices."""
    return jax.device_put(value, jax.tree.map(lambda _: NamedSharding(mesh(), P("data")), value))


def on_one_device(recorded, **options):
    optimizer = sgdol(0.25, **OPTIONS, **options)
    params = tree(np.ones(6))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for stack in recorded:
        updates, state = update(tree(stack), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def on_four(recorded, *, check_vma, stacked, **options):
    """The gradients of a step are cut over the devices; every device gives back its own copy of everything."""
    optimizer = sgdol(0.25, axis_name="data", **OPTIONS, **options)

    def step(grads, state, params):
        mine = grads if stacked else jax.tree.map(lambda g: g[0], grads)
        updates, state = optimizer.update(mine, state, params)
        return optax.apply_updates(params, updates), state

    outer = jax.jit(
        jax.shard_map(step, mesh=mesh(), in_specs=(P("data"), P(), P()), out_specs=P(), check_vma=check_vma)
    )
    params = tree(np.ones(6))
    state = optimizer.init(params)
    for stack in recorded:
        params, state = outer(sharded(tree(stack)), state, params)
    return (params, state), outer.lower(sharded(tree(recorded[0])), state, params).compile().as_text()


def all_reduced(hlo):
    """How many numbers each result of an all-reduce has, largest first."""
    sizes = []
    for line in hlo.splitlines():
        if found := re.search(r"= (.*?) all-reduce(?:-start)?\(", line):
            for shape in re.findall(r"[a-z]\w*\[([\d,]*)\]", found[1]):
                sizes.append(int(np.prod([int(n) for n in shape.split(",") if n])))
    return sorted(sizes, reverse=True)


def difference(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(np.asarray(a, float) - np.asarray(b, float)), initial=0.0)) for a, b in pairs)


def copies_differ(tree):
    """How many leaves are not the same to the last bit on all devices."""
    leaves = [[np.asarray(shard.data) for shard in leaf.addressable_shards] for leaf in jax.tree.leaves(tree)]
    assert all(len(copies) == DEVICES for copies in leaves)
    return sum(any(copy.tobytes() != copies[0].tobytes() for copy in copies) for copies in leaves)


def shard_map():
    out = {}
    for granularity, per_device in (("global", 2), ("group", 1), ("tensor", 1), ("coordinate", 2)):
        recorded = gradients(STEPS, DEVICES * per_device)
        expected = on_one_device(recorded, **granular(granularity))
        check_vma = granularity in ("global", "group")
        result, hlo = on_four(recorded, check_vma=check_vma, stacked=per_device == 2, **granular(granularity))
        out[granularity] = {
            "difference": difference(expected, result),
            "copies_differ": copies_differ(result),
            "all_reduced": all_reduced(hlo),
            "gradients": diagnostics(result[1])["gradients"],
        }
    return out


def paper():
    """The devices' mean is one gradient: two calls make an update."""
    recorded = gradients(2 * STEPS, DEVICES)
    means = recorded.mean(1).reshape(STEPS, 2, 6)
    expected = on_one_device(means, estimator="paper")
    result, _ = on_four(recorded, check_vma=True, stacked=False, estimator="paper")
    return {"difference": difference(expected[0], result[0]), "updates": diagnostics(result[1])["updates"]}


def partitioned_by_the_compiler():
    """Plain jit on stacked gradients whose first axis is sharded: no axis_name, the compiler adds the sums."""
    recorded, out = gradients(STEPS, 8), {}
    for granularity in ("global", "coordinate"):
        optimizer = sgdol(0.25, **OPTIONS, **granular(granularity))
        params = jax.device_put(tree(np.ones(6)), NamedSharding(mesh(), P()))
        state = jax.device_put(optimizer.init(params), NamedSharding(mesh(), P()))

        @jax.jit
        def step(grads, state, params, optimizer=optimizer):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for stack in recorded:
            params, state = step(sharded(tree(stack)), state, params)
        hlo = step.lower(sharded(tree(recorded[0])), state, params).compile().as_text()
        expected = on_one_device(recorded, **granular(granularity))
        out[granularity] = {"difference": difference(expected, (params, state)), "all_reduced": all_reduced(hlo)}
    return out


def training():
    """From data to gradients: each device differentiates on its own rows, and none has the others' gradient."""
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(16, 3))), jnp.asarray(rng.normal(size=16))

    def loss(params, x, y):
        return jnp.mean((x @ params - y) ** 2)

    def step(params, state, x, y):
        mean, grads = microbatch_grads(loss, 2, value=True, axis_name="data")(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, mean

    out = {}
    optimizer, single = sgdol(0.25, axis_name="data"), sgdol(0.25)
    specs = {"mesh": mesh(), "in_specs": (P(), P(), P("data"), P("data")), "out_specs": P()}
    params = one = jnp.zeros(3)
    state, alone = optimizer.init(params), single.init(one)
    for check in (True, False):
        outer = jax.jit(jax.shard_map(step, **specs, check_vma=check))
        params, state, mean = outer(params, state, sharded(x), sharded(y))
        whole = loss(one, x, y)
        updates, alone = single.update(microbatch_grads(loss, 8)(one, x, y), alone, one)
        one = optax.apply_updates(one, updates)
        out[f"check_vma={check}"] = difference((one, alone, whole), (params, state, mean))

    def summed(params, state, x, y):
        """Shard_map sums a gradient with respect to something that all devices share."""
        return optimizer.update(jax.grad(loss)(params, x, y), state, params)

    try:
        jax.jit(jax.shard_map(summed, **specs))(params, state, sharded(x), sharded(y))
    except ValueError as error:
        out["error"] = str(error)
    return out


def one_device():
    """An axis of one device needs two calls, as no axis does."""
    alone = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    optimizer = sgdol(0.25, axis_name="data")
    params = tree(np.ones(6))
    state, pending = optimizer.init(params), []
    specs = {"mesh": alone, "in_specs": (P("data"), P(), P()), "out_specs": P()}
    step = jax.jit(jax.shard_map(optimizer.update, **specs))
    recorded = gradients(2, 1)
    for stack in recorded:
        rows = jax.tree.map(lambda g: jax.device_put(g, NamedSharding(alone, P("data"))), tree(stack))
        updates, state = step(rows, state, params)
        pending.append(bool(state[0].pending))
    expected, _ = sgdol(0.25).update(tree(recorded[:, 0]), sgdol(0.25).init(params), params)
    return {"difference": difference(expected, updates), "pending": pending}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    programs = (shard_map, paper, partitioned_by_the_compiler, training, one_device)
    print(json.dumps({program.__name__: program() for program in programs}))
