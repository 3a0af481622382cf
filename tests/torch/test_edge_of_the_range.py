"""Very large and very small gradients: the trajectory is the scaled one, as far as the type reaches."""

import math

import pytest
import torch
from loops import GRANULARITIES, one_step
from pairs import pairwise

from sgdol import SGDOL
from sgdol.learners import FTRL

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")

STEPS = 12

OPTIONS = {
    "defaults": {},
    "FTRL": {"learner": FTRL(), "momentum": 0.0},
    "tensor": {"granularity": "tensor", "learner": FTRL()},
    "coordinate": {"granularity": "coordinate"},
    "coordinate, FTRL": {"granularity": "coordinate", "learner": FTRL(), "momentum": 0.0},
    "metric": {"metric": "rms"},
    "paper": {"estimator": "paper", "learner": FTRL(), "momentum": 0.0},
}


def trajectory(scale: float, dtype: torch.dtype, passes: int, options: dict) -> tuple[torch.Tensor, list[float], dict]:
    """Noisy gradients of scale * ||x||^2/2 with the rate lr / scale: where it ends, and scale * eta of each step."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for size in (6, 20_000)]
    opt = SGDOL(params, lr=0.1 / scale, **options)
    step_sizes = []
    for _ in range(STEPS):
        for _ in range(passes):
            loss = sum((p * p / 2 + p * torch.randn_like(p)).sum() for p in params)
            loss.backward(gradient=torch.tensor(scale / passes, dtype=dtype))
        opt.step()
        opt.zero_grad()
        step_sizes.append(float(opt.param_groups[0]["step_size"]) * scale)
    return torch.cat([p.detach() for p in params]), step_sizes, opt.diagnostics()


@pairwise(name=list(OPTIONS), passes=[1, 2], power=[-100, 100, -498, 498])
def test_the_trajectory_is_the_scaled_one(name, passes, power):
    """Powers of two, so that nothing is rounded but sums; float32's lose about 1e-6 of u, which is a difference."""
    options = OPTIONS[name]
    passes = 1 if name == "paper" else passes
    dtype = torch.float32 if abs(power) <= 100 else torch.float64  # 1e-30 to 1e30, 1e-150 to 1e150
    expected, etas, plain = trajectory(1.0, dtype, passes, options)
    found, scaled_etas, extreme = trajectory(2.0**power, dtype, passes, options)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    assert extreme["skipped"] == 0
    assert extreme["updates"] == plain["updates"]
    assert scaled_etas == pytest.approx(etas, rel=tolerance)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert extreme["signal_to_noise"] == pytest.approx(plain["signal_to_noise"], rel=tolerance)


@pairwise(name=["kappa", "alpha"], granularity=GRANULARITIES, learner=[None, FTRL()])
def test_the_largest_regulariser_keeps_the_step_size_at_lr(name, granularity, learner):
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.randn(5))
    opt = SGDOL([x], lr=0.01, granularity=granularity, learner=learner, **{name: 1e308})
    for _ in range(5):
        one_step(opt, ((x * x / 2 + x * torch.randn(5)).sum() for _ in range(2)))
    assert torch.isfinite(x).all()
    assert float(opt.param_groups[0]["step_size"]) == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_large_and_small_tensors_side_by_side_are_each_measured_in_their_own_range(size):
    """One tensor's gradients are ordinary, the other's are not: u and n are sums over both."""
    x, y = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    opt = SGDOL([x, y], lr=1.0, momentum=0.0, learner=FTRL(), granularity="tensor")
    for g in (1.0, 3.0):
        (x.sum() * g + (y * (g * size)).sum()).backward()
    opt.step()
    states = [opt.state[p] for p in (x, y)]
    for state, scale in zip(states, (1.0, size), strict=True):
        assert float(state["learner.n_sum"]) == pytest.approx(3 * 16 * scale**2, rel=1e-5)
        assert float(state["learner.u_sum"]) == pytest.approx(3 * 12 * scale**2, rel=1e-5)


def test_finite_gradients_near_the_largest_float32_are_not_skipped():
    x = torch.nn.Parameter(torch.zeros(4))
    opt = SGDOL([x], lr=1e-38)
    for g in (1.0e38, 1.5e38):
        (x * g).sum().backward()
    opt.step()
    assert opt.diagnostics()["skipped"] == 0
    assert math.isfinite(float(x.detach().sum()))
    assert (x < 0).all()
