"""PrivateSGDOL against a loop by hand, and what it leaves as it was: the releases, the accountant, the protections."""

import io
import math

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from sgdol.learners import MeasuredCurvature, OnlineGradientDescent

pytestmark = pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")  # Opacus', of so little noise

CLIP, SIGMA, LR = 0.5, 0.8, 2.0
SAMPLES, FEATURES, CLASSES, BATCH = 48, 3, 2, 12

EVERY = ("variance", "past", "pairs", "halves")
every_source = pytest.mark.parametrize("source", EVERY)


@pytest.fixture(scope="module", autouse=True)
def imported():
    """When the first test runs, not when tests are collected: Opacus and what it needs take a second."""
    global PrivacyEngine, DPOptimizer, ExponentialNoise, BatchMemoryManager, PrivateSGDOL
    pytest.importorskip("opacus", reason="Opacus is not installed: pip install 'sgdol[private]'")
    from opacus import PrivacyEngine
    from opacus.optimizers import DPOptimizer
    from opacus.schedulers import ExponentialNoise
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    from sgdol.private import SOURCES, PrivateSGDOL

    assert SOURCES == EVERY


def dataset() -> torch.utils.data.TensorDataset:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=stream, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def private(source=None, *, poisson=False, noise=SIGMA, lr=LR, seed=7, clip=CLIP, reduction="mean", **options):
    """A model, its optimizer (Opacus' own for source None), a loader and the engine."""
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data_loader=torch.utils.data.DataLoader(dataset(), batch_size=BATCH),
        noise_multiplier=noise,
        max_grad_norm=clip,
        poisson_sampling=poisson,
        loss_reduction=reduction,
        noise_generator=torch.Generator().manual_seed(seed),
    )
    if source is not None:
        optimizer = PrivateSGDOL(optimizer, source=source, **options)
    return model, optimizer, loader, engine


def release(sgd, source=None, **options):
    """Opacus' optimizer around one of torch's; with a source, in a PrivateSGDOL."""
    numbers = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "expected_batch_size": BATCH}
    optimizer = DPOptimizer(sgd, **{**numbers, **options})
    return optimizer if source is None else PrivateSGDOL(optimizer, source=source)


def stream(seed):
    return torch.Generator().manual_seed(seed)


def step(model, optimizer, x, y, reduction="mean"):
    cross_entropy(model(x), y, reduction=reduction).backward()
    optimizer.step()
    optimizer.zero_grad()


def step_on_samples(optimizer, samples):
    """With the gradients of the samples given, of an optimizer of one parameter."""
    (p,) = optimizer.params
    p.grad_sample = torch.as_tensor(samples, dtype=p.dtype)
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, loader, epochs=2, reduction="mean"):
    for _ in range(epochs):
        for x, y in loader:
            step(model, optimizer, x, y, reduction)
    return weights(model)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def clipped(weight, bias, x, y, clip=CLIP):
    """Every sample's own gradient of softmax regression, clipped: the derivative written out."""
    slopes = torch.softmax(x @ weight.T + bias, -1) - one_hot(y, CLASSES)
    rows = []
    for slope, sample in zip(slopes, x, strict=True):
        gradient = torch.cat([torch.outer(slope, sample).reshape(-1), slope])
        rows.append(gradient * min(1.0, clip / (float(gradient.norm()) + 1e-6)))
    return torch.stack(rows)


def by_hand(source, momentum, epochs=2):
    """The weights and multipliers of DP-SGD with the learned step; shares nothing with the library."""
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    w = weights(model)
    stream = torch.Generator().manual_seed(7)
    cut = FEATURES * CLASSES

    def noise(*copies):
        # Opacus draws the noise of one parameter after the other.
        parts = [
            torch.normal(0, SIGMA * CLIP, (*copies, *shape), generator=stream, dtype=torch.float64)
            for shape in ((CLASSES, FEATURES), (CLASSES,))
        ]
        return torch.cat([part.reshape(*copies, -1) for part in parts], -1)

    average, t, held, alpha, u_sum, n_sum, played = torch.zeros_like(w), 0, None, None, 0.0, 0.0, []
    for _ in range(epochs):
        for x, y in torch.utils.data.DataLoader(dataset(), batch_size=BATCH):
            c = clipped(w[:cut].reshape(CLASSES, FEATURES), w[cut:], x, y)
            if source == "halves":
                coin = torch.randint(2, (len(c),), generator=stream)[:, None]
                z = noise(2)
                first, second = (c * coin).sum(0) + z[0], (c * (1 - coin)).sum(0) + z[1]
                g, u = (first + second) / BATCH, 4 * float(first @ second) / BATCH**2
            else:
                g = (c.sum(0) + noise()) / BATCH
                u = float(g @ g) - (len(w) * SIGMA**2 + BATCH + 1) * CLIP**2 / BATCH**2
            if source == "past":
                u = 0.0
            if source == "pairs":
                if held is None:
                    held = g
                    continue
                g, u, held = (held + g) / 2, float(held @ g), None
            t += 1
            u = (momentum * float(average @ g) + (1 - momentum) * u) / (1 - momentum**t)
            average = momentum * average + (1 - momentum) * g
            d = average / (1 - momentum**t)
            n = float(d @ d)
            alpha = n if alpha is None else alpha
            played.append(min(max((alpha + u_sum) / (alpha + n_sum), 0.0), 2.0))
            w = w - LR * played[-1] * d
            u_sum, n_sum = u_sum + u, n_sum + n
    return w, played


@every_source
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_weights_are_those_of_a_loop_by_hand(source, momentum):
    if source == "past" and momentum == 0:
        pytest.skip("past reads the momentum")
    model, optimizer, loader, _ = private(source, momentum=momentum)
    trained = train(model, optimizer, loader)
    expected, played = by_hand(source, momentum)
    torch.testing.assert_close(trained, expected, rtol=1e-9, atol=1e-12)
    assert optimizer.diagnostics()["multiplier"] == pytest.approx(played[-1], rel=1e-9)
    assert float(optimizer.param_groups[0]["step_size"]) == pytest.approx(LR * played[-1])
    assert optimizer.diagnostics()["updates"] == len(played)
    assert min(played) < 0.95  # the step was learned, not kept


@every_source
@pytest.mark.parametrize("poisson", [False, True])
def test_epsilon_is_that_of_plain_dp_sgd(source, poisson):
    plain_model, plain, plain_loader, plain_engine = private(None, poisson=poisson)
    model, optimizer, loader, engine = private(source, poisson=poisson)
    train(plain_model, plain, plain_loader, epochs=3)
    train(model, optimizer, loader, epochs=3)
    assert engine.accountant.history == plain_engine.accountant.history
    assert engine.get_epsilon(1e-5) == plain_engine.get_epsilon(1e-5)


@pytest.mark.parametrize("source", ["variance", "past", "pairs"])
def test_virtual_steps_change_nothing_also_where_opacus_tools_are_given_the_optimizer_that_is_wrapped(source):
    """The noise stayed what it was, and every physical batch was a step of its own: 37 instead of 8."""
    found = []
    for told in ("whole", "wrapped", "itself"):
        model, plain, loader, engine = private()
        early = ExponentialNoise(plain, gamma=0.5)
        optimizer = PrivateSGDOL(plain, source=source)
        given = plain if told == "wrapped" else optimizer
        for scheduler in (early, ExponentialNoise(given, gamma=0.5)):
            scheduler.step()
        assert optimizer.noise_multiplier == SIGMA / 4
        if told == "whole":
            found.append(train(model, optimizer, loader))
            continue
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=given) as parts:
            found.append(train(model, optimizer, parts))
        assert sum(steps for _, _, steps in engine.accountant.history) == 2 * SAMPLES // BATCH
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    assert torch.equal(*found[1:])


def test_virtual_steps_of_halves_add_up_to_one_release():
    """Coins are drawn per physical batch, so only the sum of the halves compares: without noise the batch's."""
    model, optimizer, loader, _ = private("halves", noise=0.0, momentum=0.0)
    x, y = next(iter(loader))
    for rows, last in ((slice(0, 5), False), (slice(5, None), True)):
        optimizer.signal_skip_step(not last)
        cross_entropy(model(x[rows]), y[rows]).backward()
        if last:
            before = weights(model)
            weight, bias = (p.detach().clone() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    expected = before - LR * clipped(weight, bias, x, y).sum(0) / BATCH
    torch.testing.assert_close(weights(model), expected, rtol=1e-9, atol=1e-12)


def test_an_empty_poisson_batch_is_a_release_of_noise():
    for source in EVERY:
        model, optimizer, _, _ = private(source, noise=0.0)
        cross_entropy(model(torch.zeros(0, FEATURES, dtype=torch.float64)), torch.zeros(0, dtype=torch.long)).backward()
        before = weights(model)
        optimizer.step()
        torch.testing.assert_close(weights(model), before, rtol=0, atol=0)


def test_a_sample_less_changes_one_of_the_halves_by_at_most_the_clipping_norm():
    sums = []
    for rows in (BATCH, BATCH - 1):  # the last sample is left out; the coins of the others are the same
        model, optimizer, _, _ = private("halves")
        x, y = dataset()[:rows]
        cross_entropy(model(x), y).backward()
        optimizer.clip_and_accumulate()
        sums.append(torch.cat([p.summed_grad.reshape(2, -1) for p in model.parameters()], 1))
    change = (sums[0] - sums[1]).norm(dim=1)
    assert sorted((change > 1e-9).tolist()) == [False, True]
    assert float(change.max()) <= CLIP * (1 + 1e-9)


def repeated_signal(source, clip, releases, momentum=0.0):
    """Mean and standard error of u at one point under Poisson sampling by hand, and the exact ||G||^2."""
    rate = BATCH / SAMPLES
    model, optimizer, _, _ = private(source, lr=1e-14, clip=clip, momentum=momentum)
    generator = stream(3)
    x, y = dataset()[:]
    values, before = [], 0.0
    for _ in range(releases):
        rows = torch.rand(SAMPLES, generator=generator) < rate
        step(model, optimizer, x[rows], y[rows])
        now = optimizer.diagnostics().get("u_sum", 0.0)
        if source != "pairs" or now != before:
            values.append(now - before)
        before = now
    weight, bias = (p.detach() for p in model.parameters())
    mean_gradient = clipped(weight, bias, x, y, clip).mean(0)
    values = torch.tensor(values, dtype=torch.float64)
    error = float(values.std()) / math.sqrt(len(values))
    return float(values.mean()), error, float(mean_gradient @ mean_gradient)


# Five standard errors: a false alarm in a million for a normal mean, and the seeds are fixed.


def test_the_signals_of_pairs_and_halves_have_the_right_mean():
    """That of halves up to C^2/n."""
    mean, error, exact = repeated_signal("pairs", CLIP, 800)
    assert abs(mean - exact) < 5 * error
    mean, error, exact = repeated_signal("halves", CLIP, 400)
    assert exact - CLIP**2 / SAMPLES - 5 * error < mean < exact + 5 * error


def test_the_signal_of_the_variance_is_never_too_large_and_exact_where_everything_is_clipped():
    """The bound on the sampling noise counts (B + 1) C^2/B^2 for (1 - q) C^2/B."""
    slack = 1e-4 * ((BATCH + 1) / BATCH**2 - (1 - BATCH / SAMPLES) / BATCH)
    mean, error, exact = repeated_signal("variance", 1e-2, 400)  # every sample is clipped
    assert abs(mean + slack - exact) < 5 * error
    mean, error, exact = repeated_signal("variance", 10.0, 400)  # none is
    assert mean < exact + 5 * error


def test_a_noise_scheduler_moves_the_variance_that_is_subtracted():
    signals = []
    for moved in (False, True):
        model, optimizer, loader, _ = private("variance", momentum=0.0)
        if moved:
            ExponentialNoise(optimizer, gamma=0.5).step()
            assert optimizer.noise_multiplier == SIGMA / 2
        step(model, optimizer, *next(iter(loader)))
        found = optimizer.diagnostics()
        signals.append(found["n_sum"] - found["u_sum"])
    dimension = (FEATURES + 1) * CLASSES
    assert signals[0] - signals[1] == pytest.approx(dimension * 0.75 * SIGMA**2 * CLIP**2 / BATCH**2)


def test_the_scale_of_the_loss_does_not_change_the_multiplier():
    found = []
    for reduction, lr in (("mean", LR), ("sum", LR / BATCH)):
        model, optimizer, loader, _ = private("variance", reduction=reduction, lr=lr)
        train(model, optimizer, loader, reduction=reduction)
        found.append(optimizer.diagnostics()["multiplier"])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@every_source
def test_resuming_is_exact_also_between_the_two_of_a_pair(source):
    model, optimizer, loader, _ = private(source)
    batches = list(loader)

    train(model, optimizer, batches[:3], epochs=1)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    noise = optimizer.generator.get_state()
    train(model, optimizer, batches[3:], epochs=1)

    again, other, _, _ = private(source)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    other.generator.set_state(noise)
    train(again, other, batches[3:], epochs=1)
    torch.testing.assert_close(weights(again), weights(model), rtol=0, atol=0)
    assert other.diagnostics() == optimizer.diagnostics()


@every_source
def test_a_gradient_cannot_be_used_twice(source):
    model, optimizer, loader, _ = private(source)
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()


def test_every_parameter_group_has_its_own_base_rate():
    model, optimizer, loader, _ = private("variance")
    expected = train(model, optimizer, loader)
    model, optimizer, loader, _ = private("variance")
    weight, bias = model.parameters()
    groups = torch.optim.SGD([{"params": [weight], "lr": LR}, {"params": [bias], "lr": 0.0}])
    grouped = release(groups, "variance", generator=optimizer.generator)
    start = bias.detach().clone()
    trained = train(model, grouped, loader)
    assert torch.equal(bias.detach(), start)
    assert not torch.equal(trained[: weight.numel()], expected[: weight.numel()])


def test_another_learner_may_be_given():
    model, optimizer, loader, _ = private("variance", learner=OnlineGradientDescent())
    ours = train(model, optimizer, loader)
    model, optimizer, loader, _ = private("variance")
    assert not torch.equal(ours, train(model, optimizer, loader))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "thirds"}, "source must be one of"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"source": "past", "momentum": 0.0}, "momentum must be positive"),
        ({"alpha": -1.0}, "alpha must be positive"),
        ({"kappa": 0.0}, "kappa must be positive"),
        ({"learner": "ftrl"}, "learner must have"),
        ({"learner": MeasuredCurvature()}, "MeasuredCurvature needs hindsight"),
    ],
)
def test_a_bad_option_is_refused_in_a_sentence(options, message):
    _, optimizer, _, _ = private(None)
    with pytest.raises(ValueError, match=message):
        PrivateSGDOL(optimizer, **options)


def test_what_cannot_be_wrapped_is_refused_in_a_sentence():
    params = [torch.nn.Parameter(torch.zeros(2))]
    for optimizer, message in (
        (torch.optim.SGD(params, lr=1.0), "make_private returns"),
        (release(torch.optim.SGD(params, lr=1.0), expected_batch_size=None, loss_reduction="sum"), "expected batch"),
        (release(torch.optim.Adam(params)), r"torch\.optim\.SGD"),
        (release(torch.optim.SGD(params, lr=1.0, momentum=0.9)), "must be plain"),
    ):
        with pytest.raises(ValueError, match=message):
            PrivateSGDOL(optimizer)


# How noisy the signal is, in units of d s^4 with s = sigma C/B, where everything is noise: docs/explanation/private.md.
@pytest.mark.parametrize(
    ("source", "momentum", "expected"),
    [("variance", 0.0, 2.0), ("pairs", 0.0, 1.0), ("halves", 0.0, 16.0), ("past", 0.9, 0.81 * 0.1 / 1.9)],
)
def test_the_variance_of_the_signal_is_the_one_of_the_table(source, momentum, expected):
    """Of 600 signals the variance has a relative standard error of 6 %, twice that where they are correlated."""
    torch.manual_seed(0)
    width = 100
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(width, dtype=torch.float64))], lr=1e-12)
    optimizer = PrivateSGDOL(release(sgd, generator=stream(5)), source=source, momentum=momentum)
    signals, before = [], 0.0
    for _ in range(1260 if source == "pairs" else 660):
        step_on_samples(optimizer, torch.zeros(0, width))
        now = optimizer.diagnostics().get("u_sum", before)
        if now != before:
            signals.append(now - before)
        before = now
    unit = width * (SIGMA * CLIP / BATCH) ** 4
    assert float(torch.tensor(signals[-600:]).var()) / unit == pytest.approx(expected, rel=0.3)


NOISELESS = {"noise_multiplier": 0.0, "max_grad_norm": 10.0, "expected_batch_size": 2}


def by_samples(source, batches):
    """The weights after steps whose per-sample gradients are given; without noise the release is their sum."""
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = release(torch.optim.SGD([p], lr=0.5), source, **NOISELESS, generator=stream(0))
    for batch in batches:
        step_on_samples(optimizer, batch)
    assert optimizer.diagnostics()["skipped"] == 0  # what is skipped tells of the data
    return p.detach()


@pytest.mark.parametrize("source", ["variance", "past", "pairs"])
def test_the_data_enter_through_the_releases_alone(source):
    """Batches with the same clipped sum but other samples, and other numbers of them, give the same updates."""
    one = by_samples(source, [[[4.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [1.0, 3.0]]] * 3)
    other = by_samples(source, [[[1.0, 1.0], [3.0, 1.0]], [[2.0, 4.0]]] * 3)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@every_source
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sample_whose_gradient_is_not_finite_counts_as_one_with_gradient_zero(source, bad):
    good, spoilt, zeroed = [[1.0, 2.0], [0.5, 0.5]], [[bad, 1.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]
    trained = by_samples(source, [good, spoilt, good, spoilt])
    torch.testing.assert_close(trained, by_samples(source, [good, zeroed, good, zeroed]), rtol=0, atol=0)


@every_source
def test_a_release_that_is_not_finite_is_skipped_and_forgotten(source):
    """Data cannot make one any more; an infinite noise does, here in the third release."""
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = release(torch.optim.SGD([p], lr=0.5), source, **NOISELESS)
    for number in range(5):
        optimizer.noise_multiplier = math.inf if number == 2 else 0.0
        step_on_samples(optimizer, [[1.0, 2.0], [0.5, 0.5]])
    assert p.isfinite().all()
    assert optimizer.diagnostics()["skipped"] == 1


# A record whose features are finite and whose gradient is not: logits of 3e38 times a weight overflow in float32.
OVERFLOWING = torch.full((1, FEATURES), 3e38)


def attacked(source, *, member):
    """What an attacker sees of 40 releases at epsilon 0.12: diagnostics and weights, with or without the record."""
    torch.manual_seed(3)
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=stream)
    y = (x.sum(1) > 0).long()
    if member:
        x, y = torch.cat([x, OVERFLOWING]), torch.cat([y, torch.ones(1, dtype=torch.long)])
    model = torch.nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0], [-2.0]]))  # logits of +-infinity, whose softmax is NaN
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH),
        noise_multiplier=60.0,
        max_grad_norm=CLIP,
    )
    optimizer = PrivateSGDOL(optimizer, source=source)
    infinite = 0
    for _ in range(10):
        for inputs, targets in loader:
            cross_entropy(model(inputs), targets).backward()
            infinite += any(not p.grad_sample.isfinite().all() for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    # Were it otherwise, the attack would test nothing. Opacus 1.6's own optimizer ends with NaN in the weights here.
    assert (infinite > 0) == member
    assert engine.get_epsilon(1e-5) < 0.125
    return optimizer, weights(model)


@every_source
def test_a_record_with_an_infinite_gradient_does_not_show_in_what_may_be_published(source):
    """The attack: one more finite record made skipped 3 to 4 instead of 0, which noise of any size does not hide."""
    for member in (False, True):
        optimizer, trained = attacked(source, member=member)
        assert optimizer.diagnostics()["skipped"] == 0
        assert all(math.isfinite(value) for value in optimizer.diagnostics().values())
        assert trained.isfinite().all()


EXTREMES = (0.0, -1.0, 1e-45, 1e19, -2e30, 3e38, math.inf, -math.inf, math.nan)


@every_source
@pytest.mark.parametrize("batches", [1, 2])
def test_one_sample_moves_the_release_by_at_most_the_clipping_norm_whatever_its_gradient(source, batches):
    """200 samples of extreme values over two parameters of a shape each, in one batch or the second of two."""
    generator = stream(0)
    params = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(3))]
    usual = [torch.randn(5, *p.shape, generator=generator) for p in params]

    def released(extra):
        sums = {"noise_multiplier": 0.0, "expected_batch_size": 1, "loss_reduction": "sum", "generator": stream(4)}
        optimizer = release(torch.optim.SGD(params, lr=0.0), source, **sums)
        for p, some, more in zip(params, usual, extra, strict=True):
            last = torch.cat([some.clone(), more])
            p.grad_sample = last if batches == 1 else [some.clone(), last]
            p.summed_grad = None
        optimizer.clip_and_accumulate()
        return torch.cat([p.summed_grad.reshape(-1) for p in params])

    without = released([torch.zeros(1, *p.shape) for p in params])
    for _ in range(200):
        picks = [torch.randint(len(EXTREMES), (1, *p.shape), generator=generator) for p in params]
        moved = released([torch.tensor(EXTREMES)[pick] for pick in picks]) - without
        assert moved.norm() <= CLIP * (1 + 1e-5)  # of a NaN this is False


def test_other_kinds_of_clipping_are_refused():
    model = torch.nn.Linear(FEATURES, CLASSES)
    _, optimizer, _ = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(dataset(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=[1.0, 1.0],
        clipping="per_layer",
    )
    with pytest.raises(ValueError, match=r"flat clipping.*got DPPerLayerOptimizer"):
        PrivateSGDOL(optimizer)
