"""Each method against an implementation of it that shares nothing with ours, on the same gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sgdol.paper.methods import METHODS, adagrad_global, ghadimi_lan_step_size, methods
from sgdol.reference import replay

STEPS, DIMENSION, RATE = 1000, 5, 0.01
TABLE = methods()


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def recorded():
    """Gradients of very different sizes, with signal; some coordinates are zero at first."""
    rng = np.random.default_rng(3)
    gradients = rng.normal(size=(STEPS, 2, DIMENSION)) * np.exp(rng.normal(size=DIMENSION)) + 0.1
    gradients[:20, :, 2] = 0
    return gradients


def ours(name, hyperparameters, recorded, table=TABLE):
    """The iterates x_1, ..., x_{T+1} and the step sizes."""
    method = table[name]

    def step(carry, gradients):
        x, state = carry
        moved, state, eta = method.step(hyperparameters, state, x, gradients)
        return (moved, state), (moved, eta)

    x = jnp.zeros(DIMENSION)
    _, (path, eta) = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))(
        (x, method.initial(hyperparameters, x)), jnp.asarray(recorded)
    )
    return np.concatenate([[x], path]), np.asarray(eta)


def torchs(optimizer, recorded, **options):
    x = torch.zeros(DIMENSION, dtype=torch.float64, requires_grad=True)
    instance = optimizer([x], lr=RATE, **options)
    path = [x.detach().numpy().copy()]
    for gradient in recorded[:, 0]:
        x.grad = torch.from_numpy(gradient.copy())
        instance.step()
        path.append(x.detach().numpy().copy())
    return np.array(path)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("SGD", torch.optim.SGD),
        ("SGD GL", torch.optim.SGD),
        ("AdaGrad Coordinate", torch.optim.Adagrad),
        ("Adam", torch.optim.Adam),
        ("RMSProp", torch.optim.RMSprop),
        ("AdaDelta", torch.optim.Adadelta),
    ],
)
def test_equals_torch_with_its_defaults(name, optimizer, recorded):
    path, _ = ours(name, {"learning_rate": RATE}, recorded)
    np.testing.assert_allclose(path, torchs(optimizer, recorded), rtol=0, atol=1e-10)


def test_amsgrad_is_the_bias_corrected_form(recorded):
    path, _ = ours("AMSGrad", {"learning_rate": RATE}, recorded)
    x, m, v, largest = (np.zeros(DIMENSION) for _ in range(4))
    for t, g in enumerate(recorded[:, 0], start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        largest = np.maximum(largest, v / (1 - 0.999**t))
        x = x - RATE * m / (1 - 0.9**t) / (np.sqrt(largest) + 1e-8)
        np.testing.assert_allclose(path[t], x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["current", "delayed"])
def test_adagrad_global_equals_its_formula(form, recorded):
    path, eta = ours("AdaGrad Global", {"learning_rate": RATE}, recorded, methods(form))
    x, total = np.zeros(DIMENSION), 1.0 if form == "delayed" else 0.0
    for t, g in enumerate(recorded[:, 0], start=1):
        seen = total
        total += g @ g
        expected = RATE / (np.sqrt(total if form == "current" else seen) + 1e-10)
        x = x - expected * g
        np.testing.assert_allclose(path[t], x, rtol=0, atol=1e-10)
        np.testing.assert_allclose(eta[t - 1], expected, rtol=1e-12)


def test_the_delayed_step_size_does_not_see_the_current_gradient():
    optimizer = adagrad_global(1.0, form="delayed")
    state = optimizer.init(jnp.zeros(2))
    sizes = [optimizer.update(jnp.array(g), state)[1].step_size for g in ([1.0, 2.0], [30.0, 40.0])]
    assert sizes[0] == sizes[1]


def test_hypergradient_equals_its_formula(recorded):
    beta = 1e-5
    path, eta = ours("Hypergradient", {"learning_rate": RATE, "beta": beta}, recorded)
    x, rate, previous = np.zeros(DIMENSION), RATE, np.zeros(DIMENSION)
    for t, g in enumerate(recorded[:, 0], start=1):
        rate = rate + beta * (g @ previous)
        x, previous = x - rate * g, g
        np.testing.assert_allclose(path[t], x, rtol=0, atol=1e-10)
        np.testing.assert_allclose(eta[t - 1], rate, rtol=1e-10)


@pytest.mark.parametrize(("name", "blocks"), [("SGDOL Global", None), ("SGDOL Coordinate", range(DIMENSION))])
def test_sgdol_equals_algorithm_1(name, blocks, recorded):
    path, eta = ours(name, {"smoothness": 50.0, "alpha": 10.0}, recorded)
    expected = replay(recorded, np.zeros(DIMENSION), smoothness=50.0, alpha=10.0, estimator="paper", blocks=blocks)
    np.testing.assert_allclose(path, expected.iterates, rtol=0, atol=1e-10)
    if blocks is None:
        np.testing.assert_allclose(eta, expected.step_sizes, rtol=1e-10)
    else:
        weights = np.cumsum(expected.n, axis=0)
        mean = (expected.step_sizes * weights).sum(axis=1) / weights.sum(axis=1)
        np.testing.assert_allclose(eta, mean, rtol=1e-10)


def test_only_the_methods_without_a_step_size_record_none(recorded):
    for name in METHODS:
        hyperparameters = {"learning_rate": RATE}
        if name.startswith("SGDOL"):
            hyperparameters = {"smoothness": 50.0, "alpha": 10.0}
        elif name == "Hypergradient":
            hyperparameters["beta"] = 1e-5
        _, eta = ours(name, hyperparameters, recorded[:3])
        assert np.isnan(eta).all() == (name in ("Adam", "RMSProp", "AdaDelta", "AMSGrad"))


def test_the_step_size_of_ghadimi_and_lan_has_its_square_root_of_m():
    known = {"smoothness": 8.0, "gap": 4.0, "horizon": 10_000}
    assert ghadimi_lan_step_size(total_variance=1e-9, **known) == 1 / 8
    assert ghadimi_lan_step_size(total_variance=4.0, **known) == pytest.approx(1.0 / (2 * 100))
