"""SGDOL as its users meet it: what its arguments mean, what an update does, where gradients come from."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from loops import (
    GRANULARITIES,
    SOURCES,
    as_on_a_device,
    batch,
    feed,
    fit,
    flat,
    objective,
    one_step,
    pairs,
    plain,
    scalar,
)
from pairs import pairwise

from sgdol import SGDOL, reference, theory
from sgdol.learners import FTRL

pytestmark = pytest.mark.filterwarnings(
    "ignore:SGDOL was given the same gradient twice",  # numbers that are easy to follow
    "ignore:SGDOL got one backward",  # pairs are among what is tested
)


def train(net, opt, k: int, numbers) -> torch.Tensor:
    """Updates from k gradients each: of one backward per step, or of the two halves of a batch."""
    if k == 1:
        pairs(net, opt, numbers)
    else:
        fit(net, opt, numbers)
    return flat(net.parameters())


def noisy(x, level: float):
    """Two losses, ||x||^2/2 with noise."""
    return (((x * x).sum() / 2 + level * (torch.randn(x.shape) * x).sum()).div(2) for _ in range(2))


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lr_is_that_of_sgd(momentum):
    """Step by step, as long as the learner leaves s at 1; the step size that is shown is lr itself."""
    a, b = scalar(), scalar()
    ours, theirs = SGDOL([a], lr=0.03, momentum=momentum), torch.optim.SGD([b], lr=0.03, momentum=momentum)
    generator = torch.Generator().manual_seed(0)
    for t in range(20):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.03 / (1 + t)
        for noise in torch.randn(2, generator=generator).tolist():
            (a * a / 2 + 0.1 * noise * a).div(2).backward()
            (b * b / 2 + 0.1 * noise * b).div(2).backward()
        for opt in (ours, theirs):
            opt.step()
            opt.zero_grad()
        assert float(ours.param_groups[0]["step_size"]) == ours.param_groups[0]["lr"]
        assert a.item() == pytest.approx(b.item(), rel=1e-14)


def test_a_weight_decay_takes_away_what_that_of_sgd_does():
    """Where there is no gradient, in 200 steps: the factor is exp(-200 lr weight_decay/(1 - momentum)) for both."""
    left = []
    for kind in (SGDOL, torch.optim.SGD):
        x = scalar()
        opt = kind([x], lr=0.01, momentum=0.9, weight_decay=0.1)
        for _ in range(200):
            one_step(opt, (0.0 * x for _ in range(2)))
        left.append(math.log(x.item()))
    assert left[0] == pytest.approx(-2.0, rel=0.01)
    assert left[1] == pytest.approx(-2.0, rel=0.06)  # its momentum begins at 0


def test_smoothness_is_the_reciprocal_of_the_base_rate_whatever_the_momentum():
    for momentum in (0.0, 0.5):
        (group,) = SGDOL([scalar()], smoothness=4.0, momentum=momentum).param_groups
        assert group["lr"] / (1 - momentum) == 0.25
    opt = SGDOL([{"params": [scalar()]}, {"params": [scalar()], "momentum": 0.5}], smoothness=4.0, momentum=0.0)
    assert [group["lr"] for group in opt.param_groups] == [0.25, 0.125]


# What an update does --------------------------------------------------------------------------------------------------


def test_weight_decay_is_decoupled_and_scaled_by_the_learned_step_size():
    x = scalar(2.0)
    opt = SGDOL([x], lr=0.5, alpha=1.0, weight_decay=0.1, momentum=0.0, learner=FTRL())
    feed(opt, x, 1.0, 0.0)
    after_one = 2.0 - 0.5 * (0.5 + 0.1 * 2.0)
    assert x.item() == pytest.approx(after_one)
    s = 1.0 / 1.25  # (alpha + <g, g'>) / (alpha + mean^2)
    feed(opt, x, 1.0, 1.0)
    assert x.item() == pytest.approx(after_one - 0.5 * s * (1.0 + 0.1 * after_one))


@pytest.mark.parametrize("granularity", ["group", "tensor", "coordinate"])
def test_momentum_of_a_group_that_takes_no_part_does_not_age(granularity):
    a, b, alone = scalar(), scalar(), scalar()
    options = {"lr": 0.1, "alpha": 0.5, "granularity": granularity, "momentum": 0.9}
    both, other = SGDOL([{"params": [a]}, {"params": [b]}], **options), SGDOL([alone], **options)
    generator = torch.Generator().manual_seed(0)
    for update in range(12):
        for g, h in torch.randn(2, 2, generator=generator, dtype=torch.float64) + 1:
            if update % 4:  # b is there in a quarter of the updates
                (g * a / 2).backward()
            else:
                ((g * a + h * b) / 2).backward()
                (h * alone / 2).backward()
        for opt in (both, other):
            opt.step()
            opt.zero_grad()
    assert alone.item() != 1.0
    assert b.item() == pytest.approx(alone.item(), rel=1e-12)


def test_the_first_move_of_a_group_that_joins_late_is_not_shrunk_by_momentum():
    a, b = scalar(), scalar()
    opt = SGDOL([{"params": [a]}, {"params": [b]}], smoothness=10.0, momentum=0.9, bias_correction=True)
    for update in range(11):
        one_step(opt, ((a + b if update == 10 else a) / 2 for _ in range(2)))
    assert b.item() == pytest.approx(1 - 0.1)


def test_momentum_that_a_scheduler_switches_off_and_on_is_not_resurrected():
    """The definition, for a scalar: the weights of the gradients in m sum to w, whichever way beta goes."""
    betas = [0.9] * 4 + [0.0] * 4 + [0.9] * 4
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(12, 2, generator=generator, dtype=torch.float64) * 0.3
    pairs += torch.tensor([1.0] * 4 + [-1.0] * 8, dtype=torch.float64)[:, None]
    lr, alpha, x, m, w, u_sum, n_sum = 0.1, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0
    p, q = scalar(x), scalar(x)
    options = {"lr": lr, "alpha": alpha, "momentum": 0.9, "learner": FTRL()}
    opts = SGDOL([p], **options), SGDOL([q], granularity="coordinate", **options)
    for beta, (g1, g2) in zip(betas, pairs.tolist(), strict=True):
        g = (g1 + g2) / 2
        w = beta * w + 1 - beta
        u = (beta * m * g + (1 - beta) * g1 * g2) / w
        m = beta * m + (1 - beta) * g
        x -= lr / (1 - beta) * min(max((alpha + u_sum) / (alpha + n_sum), 0), 2) * m / w
        u_sum, n_sum = u_sum + u, n_sum + (m / w) ** 2
        for opt, y in zip(opts, (p, q), strict=True):
            opt.param_groups[0]["momentum"] = beta
            feed(opt, y, g1, g2)
            assert y.item() == pytest.approx(x, rel=1e-12)


def test_alpha_none_is_the_first_squared_gradient_that_is_not_zero():
    x = scalar(0.0)
    opt = SGDOL([x], lr=1.0, momentum=0.0, learner=FTRL())
    feed(opt, x, 0.0, 0.0)
    assert x.item() == 0
    feed(opt, x, 3.0, 1.0)  # d = 2, so alpha = 4, u = 3, n = 4
    assert x.item() == -2.0
    feed(opt, x, 1.0, 1.0)
    assert float(opt.param_groups[0]["step_size"]) == pytest.approx((4 + 3) / (4 + 4))


def test_a_group_that_joins_later_gets_the_share_of_alpha_that_its_size_had():
    a, b = torch.nn.Parameter(torch.zeros(4).double()), torch.nn.Parameter(torch.zeros(2).double())
    opt = SGDOL([a], lr=1.0, granularity="group", momentum=0.0, learner=FTRL())
    feed(opt, a, [1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0])  # d = 2 everywhere: alpha = 16, 4 per coordinate
    opt.add_param_group({"params": [b]})
    for g in (2.0, -1.0):
        a.grad, b.grad = torch.full_like(a, g), torch.full_like(b, g)
        opt.step()
    for g in (1.0, 1.0):
        b.grad = torch.full_like(b, g)
        opt.step()
    u, n = 2 * (2.0 * -1.0), 2 * 0.5**2  # of its only update before
    assert float(opt.param_groups[1]["step_size"]) == pytest.approx((8.0 + u) / (8.0 + n))


@pairwise(metric=["rms", "adagrad"], granularity=["tensor", "coordinate"], skips=[False, True], k=[1, 2])
def test_a_tensor_that_joins_later_is_measured_by_its_own_gradient_over_those_of_the_past(
    metric, granularity, skips, k
):
    """Its first D is sqrt((v / m + 1e-4) / (1 + 1e-4)), v its own mean square, m that of the past; eta is lr.

    That of the other, whose past is all there is, is 1.
    """
    x, late = scalar(0.0), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = SGDOL([x, late], lr=0.1, momentum=0.0, learner=FTRL(), granularity=granularity, metric=metric)
    for g in (2.0, 4.0):  # m = 9, so that alpha of x, of three numbers, is 3
        (x * g / 2).sum().backward()
    opt.step()
    opt.zero_grad()
    pairs = [([math.nan, 1.0], [1.0, 1.0])] if skips else []
    for pair in [*pairs, ([9.0, -2.0], [7.0, -2.0])]:
        for g in torch.tensor(pair, dtype=torch.float64):
            ((late @ g + x.sum()) / k).backward()
            if k == 1:
                opt.step()
                opt.zero_grad()
        if k == 2:
            opt.step()
            opt.zero_grad()
    D = math.sqrt(((64 + 4) / 2 / 9 + 1e-4) / (1 + 1e-4))
    assert late.tolist() == pytest.approx([-0.1 * 8 / D, 0.1 * 2 / D], rel=1e-12)
    assert x.item() == pytest.approx(-0.1 * 3 - 0.1 * (3 + 2 * 4) / (3 + 9), rel=1e-12)


# Where gradients come from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [True, False])
def test_a_closure_is_called_once_and_its_gradient_held_if_it_is_the_only_one(zero):
    """As torch.optim calls it: a closure evaluates the batch of the moment, however often it is called."""
    one, other = plain(), plain()
    a, b = SGDOL(one.parameters(), lr=0.1), SGDOL(other.parameters(), lr=0.1)
    calls = []

    def closure():
        if zero:
            a.zero_grad()
        value = objective(one, batch(len(calls)))
        value.backward()
        calls.append(value)
        return value

    for t in range(6):
        assert a.step(closure) is calls[-1]
        assert len(calls) == t + 1
        assert a.pending == (t % 2 == 0)
        a.zero_grad()
    pairs(other, b, range(6))
    assert torch.equal(flat(one.parameters()), flat(other.parameters()))


def test_a_pair_whose_shapes_differ_is_refused():
    x = torch.nn.Parameter(torch.zeros(3))
    opt = SGDOL([x], lr=0.1, momentum=0.0)
    feed(opt, x, [1.0, 2.0, 3.0])
    x.data = torch.zeros(2)
    x.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"parameter 0 is \(2,\) now, the gradient that is held \(3,\)"):
        opt.step()
    x.data = torch.zeros(3)
    feed(opt, x, [1.0, 2.0, 5.0])  # nothing was lost
    torch.testing.assert_close(x.detach(), torch.tensor([-0.1, -0.2, -0.4]))


# Noise, bad and absent ------------------------------------------------------------------------------------------------


@pairwise(granularity=GRANULARITIES, source=SOURCES, bad=[math.nan, math.inf], member=[0, 1], host=[True, False])
def test_a_gradient_that_is_not_finite_skips_the_update(granularity, source, bad, member, host):
    estimator, k = source
    found = []
    for skips in (False, True):
        net = plain()
        options = {"granularity": granularity, "estimator": estimator, "momentum": 0.5, "weight_decay": 0.01}
        opt = SGDOL(net.parameters(), lr=0.1, **options)
        opt = opt if host else as_on_a_device(opt)
        train(net, opt, k, range(6))
        if skips:
            losses = (objective(net, batch(99 + i)) * (bad if i == member else 1.0) for i in range(2))
            for _ in range(3 - k):
                one_step(opt, (next(losses) for _ in range(k)))
            assert not opt.pending
            assert opt.diagnostics()["skipped"] == 1
            assert opt.diagnostics()["updates"] == 6 // (3 - k)
        found.append(train(net, opt, k, range(6, 10)))
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)


@pairwise(
    granularity=GRANULARITIES,
    source=SOURCES,
    metric=["euclidean", "rms"],
    dtype=[torch.float64, torch.float32, torch.bfloat16],
)
def test_deciding_on_the_device_gives_the_same_numbers(granularity, source, metric, dtype):
    results, (estimator, k) = [], source
    options = {"granularity": granularity, "estimator": estimator, "metric": metric}
    for host in (True, False):
        net = plain(dtype)
        opt = SGDOL(net.parameters(), lr=0.1, **options, weight_decay=0.1, averaging=8)
        last = train(net, opt if host else as_on_a_device(opt), k, range(6))
        with opt.averaged():
            results.append([last, flat(net.parameters())])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(results[0], results[1], rtol=8 * eps, atol=8 * eps)


@pairwise(granularity=GRANULARITIES, source=SOURCES, metric=["euclidean", "rms"])
def test_step_does_not_wait_for_a_device(granularity, source, metric):
    """The meta device has no numbers at all: whoever asks it for one gets an error."""
    estimator, k = source
    net = torch.nn.Sequential(plain(torch.float32), torch.nn.Linear(1, 20_000)).to("meta")  # small tensors and large
    options = {"granularity": granularity, "estimator": estimator, "metric": metric, "averaging": 8}
    opt = SGDOL(net.parameters(), lr=0.1, weight_decay=0.1, **options)
    for _ in range(4):
        for _ in range(k):
            net(torch.zeros(8, 5, device="meta")).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
    assert opt.param_groups[0]["step_size"].device.type == "meta"


# Memory and diagnostics -----------------------------------------------------------------------------------------------


def test_nothing_is_printed_or_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    net = plain()
    fit(net, SGDOL(net.parameters(), lr=0.1), range(3))
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "vectors"),
    [
        ({"momentum": 0.0, "learner": FTRL()}, set()),
        ({}, {"momentum"}),  # which without bias correction is the direction that hindsight asks for
        ({"learner": FTRL()}, {"momentum"}),
    ],
    ids=["neither momentum nor hindsight", "defaults", "momentum alone"],
)
def test_microbatches_keep_nothing_that_grows_with_the_model_but_the_momentum(options, vectors):
    net = plain()
    opt = SGDOL(net.parameters(), lr=0.1, **options)
    fit(net, opt, range(3))
    assert all(set(opt.state.get(p, {})) == vectors for p in net.parameters())
    kept = [v for group in opt.param_groups for v in group.values() if isinstance(v, torch.Tensor)]
    assert max(v.numel() for v in kept) < 10


def large_tensors() -> int:
    """How many tensors of 10,000 numbers and more there are in this process."""
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) and o.numel() >= 10_000 for o in gc.get_objects())


@pytest.mark.parametrize("options", [{}, {"metric": "rms"}], ids=str)
def test_passes_of_a_large_tensor_are_measured_and_not_kept(options):
    """In a metric too: a large parameter without a past, whose D is not known, does not make others keep theirs."""
    x, unused = (torch.nn.Parameter(torch.zeros(20_000)) for _ in range(2))
    opt = SGDOL([x, unused], lr=0.1, **options)
    draws, held = torch.randn(20_000, generator=torch.Generator().manual_seed(0)), []
    one_step(opt, ((x * draws.roll(i)).sum() for i in range(2)))
    for i in range(5):
        (x * draws.roll(i)).sum().backward()
        if i in (1, 4):
            held.append(large_tensors())
    assert held[0] == held[1]


def test_the_optimizer_dies_with_its_last_reference_and_takes_its_hooks_along():
    def ours():
        gc.collect()
        return sum(str(type(o).__module__).startswith("sgdol.torch") for o in gc.get_objects())

    net = plain()
    before = ours()
    opt = SGDOL(net.parameters(), lr=0.1)
    fit(net, opt, range(1))
    gone = weakref.ref(opt)
    assert ours() > before
    del opt
    assert ours() == before
    assert gone() is None


def test_diagnostics_are_those_of_the_run():
    gradients = np.random.default_rng(0).normal(size=(30, 2, 3)) + 0.3
    run = reference.replay(gradients, np.zeros(3), smoothness=4.0, alpha=1.0, estimator="symmetric")
    p = torch.nn.Parameter(torch.zeros(3).double())
    opt = SGDOL([p], smoothness=4.0, alpha=1.0, momentum=0.0, learner=FTRL())
    feed(opt, p, *gradients.reshape(-1, 3))
    found = opt.diagnostics()
    u, n = run.u[:, 0], run.n[:, 0]
    assert found["updates"] == 30
    assert found["step_size"] == [pytest.approx(run.step_sizes[-1])]
    assert found["regret"] == pytest.approx(theory.regret(run.step_sizes, u, n, 4.0))
    assert found["cumulative_surrogate"] == pytest.approx(theory.regret(run.step_sizes, u, n, 4.0, against=0.0))
    weights = 0.99 ** np.arange(30)[::-1]
    signal, length = (weights * u).sum(), (weights * n).sum()
    assert found["signal_to_noise"] == pytest.approx(signal / (length - signal))
    assert found["noise_scale"] == pytest.approx(2 * (length - signal) / signal)


@pytest.mark.parametrize(("momentum", "limit"), [(0.0, 2.0), (0.9, 3.8)])
@pytest.mark.parametrize("factor", [0.25, 1.5, 5.0])
def test_the_default_step_is_lr_until_that_is_too_long(momentum, limit, factor):
    """||x||^2/2 with little noise: SGD converges below 2 (1 + beta) times its curvature's inverse.

    With a factor of 0.25 nothing is too long, but noise that the iterates hover in takes off a little.
    """
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.full((50,), 3.0, dtype=torch.float64))
    opt = SGDOL([x], lr=factor * limit, momentum=momentum)
    for _ in range(300):
        one_step(opt, noisy(x, 0.1))
    step_size = float(opt.param_groups[0]["step_size"])
    assert (0.9 * opt.param_groups[0]["lr"] if factor < 1 else 0) < step_size < limit
    assert x.detach().square().mean() < 0.2  # from 9
