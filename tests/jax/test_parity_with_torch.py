"""What has no reference and is the same in both front ends: diagnostics, and complex numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from six_numbers import loop

from sgdol import SGDOL
from sgdol.jax import diagnostics, sgdol

SHAPES = [(3,), (2, 2), ()]
ENDS = [3, 7]
LABELS = ["first", "second", "second"]
T, D, LR = 16, 8, 0.25


pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore:SGDOL got one backward", "ignore:SGDOL was given the same gradient twice"),
]


def vectors(k, seed=0):
    """Gradients that agree, then oppose each other, then are noisy, in scales that vary."""
    rng = np.random.default_rng(seed)
    mean, noise = rng.normal(size=D), rng.normal(size=(T, k, D))
    g = np.exp(rng.normal(size=(T, 1, 1))) * (mean + np.linspace(0.1, 3, T)[:, None, None] * noise)
    g[5:8, 0] = -2 * mean
    return g


X = np.random.default_rng(7).normal(size=D)


def parts(vector):
    """Eight numbers along the last axis as a vector, a matrix and a scalar."""
    vector = np.asarray(vector)
    pieces = np.split(vector, ENDS, axis=-1)
    return [p.reshape((*vector.shape[:-1], *shape)) for p, shape in zip(pieces, SHAPES, strict=True)]


def torch_run(recorded, **options):
    """The optimizer after a step for each stack."""
    params = [torch.nn.Parameter(torch.tensor(x)) for x in parts(X)]
    opt = SGDOL([{"params": params[:1]}, {"params": params[1:]}], lr=LR, **options)
    for step in recorded:
        for gradient in step:
            pairs = zip(params, parts(gradient), strict=True)
            sum((p * torch.tensor(g)).sum() / len(step) for p, g in pairs).backward()
        opt.step()
        opt.zero_grad()
    return opt


def jax_run(recorded, **options):
    """The last state."""
    if options.get("granularity") == "group":
        options["param_labels"] = LABELS
    optimizer, params = sgdol(LR, **options), [jnp.asarray(x) for x in parts(X)]
    return loop(optimizer, [jnp.asarray(c) for c in parts(recorded)], params, optimizer.init(params))[0]


@pytest.mark.parametrize(
    ("granularity", "statistics"), [("global", "direction"), ("group", "gradient"), ("coordinate", "direction")]
)
def test_diagnostics_say_the_same_in_the_same_words(granularity, statistics):
    options = {"granularity": granularity, "momentum": 0.5, "statistics": statistics}
    expected, now = torch_run(vectors(4), **options).diagnostics(), diagnostics(jax_run(vectors(4), **options))
    assert set(expected) <= set(now)
    if granularity != "group":  # there are two groups in torch, and no groups here
        weights = expected.pop("step_size"), now.pop("step_size")
        assert min(weights[0]) * (1 - 1e-12) <= weights[1][0] <= max(weights[0]) * (1 + 1e-12)
    for name, value in expected.items():
        np.testing.assert_allclose(now[name], value, rtol=1e-10, err_msg=name)


@pytest.mark.parametrize("granularity", ["global", "coordinate"])
def test_complex_parameters_move_alike(granularity):
    """A complex number is two real ones in both. The gradient is torch's, the conjugate of what jax.grad gives."""
    rng = np.random.default_rng(0)
    recorded = rng.normal(size=(12, 3, 2)) + 1j * rng.normal(size=(12, 3, 2))
    options = {"granularity": granularity, "momentum": 0.5, "weight_decay": 0.1}
    z = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    opt = SGDOL([z], lr=LR, **options)
    optimizer = sgdol(LR, **options)
    params = jnp.zeros(2, complex)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in recorded:
        for gradient in step:
            (torch.tensor(gradient.conj()) * z).real.sum().div(3).backward()
        opt.step()
        opt.zero_grad()
        updates, state = update(jnp.asarray(step), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params, z.detach().numpy(), rtol=0, atol=1e-12)
