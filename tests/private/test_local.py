"""Local privacy: users' reports are the independent gradients."""

import math

import numpy as np
import pytest
import torch

from sgdol.surrogate import statistics


@pytest.fixture(scope="module", autouse=True)
def imported():
    """When the first test runs, not when tests are collected: Opacus and what it needs take a second."""
    global RDPAccountant, LocalSGDOL, local_epsilon, randomize
    pytest.importorskip("opacus", reason="Opacus is not installed: pip install 'sgdol[private]'")
    from opacus.accountants import RDPAccountant

    from sgdol.private import LocalSGDOL, local_epsilon, randomize


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_is_the_symmetric_estimator_on_the_reports(momentum):
    stream = torch.Generator().manual_seed(0)
    x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    server = LocalSGDOL([x], lr=0.5, alpha=2.0, momentum=momentum)
    u_sum = n_sum = 0.0
    average = np.zeros(3)
    expected = np.zeros(3)
    for t, k in enumerate((2, 5, 3), start=1):
        reports = torch.randn(k, 3, generator=stream, dtype=torch.float64) + 1
        for report in reports:
            server.receive([report])
        server.step()
        mean, u, _ = statistics(reports.numpy())
        u = (momentum * average @ mean + (1 - momentum) * u) / (1 - momentum**t)
        average = momentum * average + (1 - momentum) * mean
        direction = average / (1 - momentum**t)
        n = direction @ direction
        expected = expected - 0.5 * min(max((2.0 + u_sum) / (2.0 + n_sum), 0.0), 2.0) * direction
        u_sum, n_sum = u_sum + float(u), n_sum + float(n)
    np.testing.assert_allclose(x.detach().numpy(), expected, rtol=1e-12)
    assert server.diagnostics()["u_sum"] == pytest.approx(u_sum)


def test_privacy_noise_is_no_signal():
    """On pure noise of 50 users the multiplier falls towards 0; five standard errors of its mean, seed fixed."""
    stream = torch.Generator().manual_seed(0)
    x = torch.nn.Parameter(torch.zeros(100))
    server = LocalSGDOL([x], lr=1.0, momentum=0.0)
    for _ in range(100):
        for _ in range(50):
            server.receive(randomize([torch.zeros(100)], max_grad_norm=1.0, noise_multiplier=4.0, generator=stream))
        server.step()
    found = server.diagnostics()
    # sum of 100 u's, each with a standard deviation of sqrt(2/(k (k-1) d)) d sigma^2
    error = math.sqrt(100) * math.sqrt(2 / (50 * 49 * 100)) * 100 * 16
    assert abs(found["u_sum"]) < 5 * error
    assert found["multiplier"] < 0.05


def test_a_report_is_clipped_and_noised_over_all_parameters_together():
    gradient = [torch.full((2, 2), 3.0), torch.tensor([8.0])]  # of length 10
    clipped = randomize(gradient, max_grad_norm=5.0, noise_multiplier=0.0)
    torch.testing.assert_close(clipped[0], torch.full((2, 2), 1.5))
    torch.testing.assert_close(clipped[1], torch.tensor([4.0]))
    short = randomize([torch.tensor([3.0])], max_grad_norm=5.0, noise_multiplier=0.0)
    assert short[0].item() == 3.0
    noisy = randomize(
        [torch.zeros(4000)], max_grad_norm=0.5, noise_multiplier=2.0, generator=torch.Generator().manual_seed(0)
    )
    assert float(noisy[0].std()) == pytest.approx(1.0, rel=5 / math.sqrt(2 * 4000))


def test_epsilon_is_opacus_accountant_at_half_the_noise():
    accountant = RDPAccountant()
    for _ in range(3):
        accountant.step(noise_multiplier=2.0, sample_rate=1.0)
    assert local_epsilon(4.0, 1e-5, reports=3) == accountant.get_epsilon(1e-5)


def test_the_bound_is_above_the_exact_curve_of_the_gaussian_mechanism():
    """Balle and Wang 2018: delta(eps) = Phi(1/(2s) - eps s) - e^eps Phi(-1/(2s) - eps s) for sensitivity 1, noise s."""
    normal = torch.distributions.Normal(0.0, 1.0)
    sigma, delta = 6.0, 1e-5
    epsilon = local_epsilon(sigma, delta)
    s = sigma / 2
    exact = normal.cdf(torch.tensor(1 / (2 * s) - epsilon * s, dtype=torch.float64))
    exact = exact - math.exp(epsilon) * normal.cdf(torch.tensor(-1 / (2 * s) - epsilon * s, dtype=torch.float64))
    assert float(exact) <= delta


def test_bad_reports_are_refused():
    x = torch.nn.Parameter(torch.zeros(3))
    server = LocalSGDOL([x], lr=1.0)
    with pytest.raises(ValueError, match="shapes"):
        server.receive([torch.zeros(2)])
    server.receive([torch.zeros(3)])
    for call, message in (
        (server.step, "at least 2 users, got 1"),
        (lambda: server.step(lambda: 0.0), "closure"),
        (lambda: LocalSGDOL([x], lr=0.0), "lr must be positive"),
        (lambda: LocalSGDOL([x], lr=1.0, momentum=1.0), "momentum must be in"),
        (lambda: randomize([x], max_grad_norm=-1.0, noise_multiplier=1.0), "max_grad_norm"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_report_of_a_gradient_that_is_not_finite_is_that_of_gradient_zero(bad):
    gradient = [torch.tensor([bad, 1.0]), torch.tensor([3.0])]
    reports = [
        randomize(g, max_grad_norm=1.0, noise_multiplier=2.0, generator=torch.Generator().manual_seed(0))
        for g in (gradient, [torch.zeros(2), torch.zeros(1)])
    ]
    for one, other in zip(*reports, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_largest_finite_gradients_are_clipped_to_the_norm(dtype):
    gradient = [torch.full((4,), torch.finfo(dtype).max / 2, dtype=dtype)]
    length = float(randomize(gradient, max_grad_norm=1.0, noise_multiplier=0.0)[0].double().norm())
    if dtype == torch.float64:  # its square overflows even there: counted as not finite
        assert length == 0
    else:
        assert length == pytest.approx(1.0, rel=float(torch.finfo(dtype).eps))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1e-5), r"noise_multiplier must be positive and finite, got -1\.0"),
        ((0.0, 1e-5), r"noise_multiplier must be positive and finite, got 0\.0"),
        ((math.nan, 1e-5), "noise_multiplier must be positive and finite, got nan"),
        ((1.0, 0.0), r"delta must be in \(0, 1\), got 0\.0"),
        ((1.0, 1.5), r"delta must be in \(0, 1\), got 1\.5"),
        ((1.0, 1e-5, 0), "reports must be a whole number of at least 1, got 0"),
        ((1.0, 1e-5, 1.5), r"reports must be a whole number of at least 1, got 1\.5"),
    ],
)
def test_an_epsilon_of_impossible_numbers_is_refused_by_name_and_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        local_epsilon(*arguments)
