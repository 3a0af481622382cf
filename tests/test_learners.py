"""Online learners: one table of them through the same properties, then each against its own definition."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import namespace

from sgdol import reference
from sgdol.learners import (
    FTRL,
    LARGEST_MULTIPLIER,
    Floored,
    Learner,
    MeasuredCurvature,
    OnlineGradientDescent,
    OptimisticFTRL,
    uses_hindsight,
)

EPS = np.finfo(np.float64).eps

# A new learner is one line here: the learner and its first prediction.
LEARNERS = [
    (FTRL(), 1.0),
    (FTRL(strength=0.0), 1.0),
    (FTRL(strength=3.0, center=0.25), 0.25),
    (OptimisticFTRL(), 1.0),
    (OptimisticFTRL(strength=0.5, center=2.0), 2.0),
    (Floored(floor=0.5), 1.0),
    (OnlineGradientDescent(), 1.0),
    (OnlineGradientDescent(start=0.0), 0.0),
    (MeasuredCurvature(), 1.0),
    (MeasuredCurvature(tolerance=0.3, charge=1.0), 1.0),
]
every_learner = pytest.mark.parametrize("learner", [row[0] for row in LEARNERS], ids=repr)
every_learner_and_its_start = pytest.mark.parametrize(("learner", "start"), LEARNERS, ids=repr)

fixed = settings(deadline=None, derandomize=True, max_examples=60)
alphas = st.floats(0.01, 100)
signals = st.floats(-100, 100)
lengths = st.floats(0, 100)
runs = st.lists(st.tuples(signals, lengths), max_size=8)


def play(learner: Learner, losses, alpha: Any, zero: Any = 0.0) -> list:
    """The predictions before each loss and after the last; hindsight, where it is wanted, is half of n."""
    state = learner.initial(zero)
    played = []
    for u, n in losses:
        played.append(learner.predict(state, alpha))
        told = {"last": n / 2 if len(played) > 1 else 0 * n} if uses_hindsight(learner) else {}
        state = learner.observe(state, played[-1], u, n, alpha, **told)
    return [*played, learner.predict(state, alpha)]


def random_losses(horizon: int, seed: int, shape: tuple[int, ...] = ()) -> list[tuple[np.ndarray, np.ndarray]]:
    """Losses that drive a learner to both bounds: u anywhere in [-3n - 3, 3n + 3], with quiet and loud stretches."""
    rng = np.random.default_rng(seed)
    pull = np.sin(np.arange(horizon) / 5)
    losses = []
    for t in range(horizon):
        n = rng.exponential(size=shape) * 10.0 ** rng.integers(-2, 3)
        losses.append((pull[t] * 3 * (n + 1) + rng.normal(size=shape), n))
    return losses


# All learners ---------------------------------------------------------------------------------------------------------


@every_learner
@fixed
@given(losses=st.lists(st.tuples(st.floats(-1e100, 1e100), st.floats(0, 1e100)), max_size=8), alpha=st.floats(0, 1e100))
def test_predictions_stay_in_the_range_of_the_paper(learner, losses, alpha):
    assert all(0 <= s <= LARGEST_MULTIPLIER for s in play(learner, losses, alpha))


@every_learner
def test_the_losses_of_these_tests_reach_both_bounds(learner):
    """Else the parity tests below would not notice a missing clip."""
    played = play(learner, random_losses(60, seed=0), alpha=0.1)
    assert float(min(played)) in {float(getattr(learner, "floor", 0.0)) / t**0.5 for t in range(1, 62)}
    assert max(played) == (1.0 if uses_hindsight(learner) else LARGEST_MULTIPLIER)


@every_learner_and_its_start
@pytest.mark.parametrize("alpha", [0.0, 1e-3, 1.0, 7.0])
def test_the_first_prediction_is_where_it_was_told_to_start(learner, start, alpha):
    assert play(learner, [], alpha)[0] == pytest.approx(start, rel=4 * EPS, abs=0)


@every_learner_and_its_start
@pytest.mark.parametrize("library", ["python", "numpy", "torch", "jax"])
def test_no_alpha_and_no_losses_is_no_division_by_zero(learner, start, library):
    with namespace(library) as (make, _), np.errstate(all="raise"):
        zero = make(0.0)
        silence = [(make(0.0), make(0.0))] * 2
        assert [float(s) for s in play(learner, silence, zero, zero)] == [start] * 3


@every_learner
def test_a_prediction_does_not_see_its_own_loss_nor_later_ones(learner):
    losses = random_losses(30, seed=1)
    before = play(learner, losses, alpha=1.0)
    for t in (0, 7, 29):
        changed = [*losses[:t], *((-u - 1, 2 * n + 1) for u, n in losses[t:])]
        assert play(learner, changed, alpha=1.0)[: t + 1] == before[: t + 1]


@every_learner
def test_observing_leaves_the_old_state_as_it_was(learner):
    state = learner.initial(np.zeros(3))
    for u, n in random_losses(5, seed=2, shape=(3,)):
        s = learner.predict(state, 1.0)
        after = learner.observe(state, s, u, n, 1.0)
        np.testing.assert_array_equal(learner.predict(state, 1.0), s)
        state = after


@every_learner
def test_arrays_are_learned_element_by_element(learner):
    shape = (2, 3)
    losses = random_losses(40, seed=3, shape=shape)
    alpha = np.random.default_rng(4).exponential(size=shape)
    together = np.array(play(learner, losses, alpha, np.zeros(shape)))
    for c in np.ndindex(shape):
        alone = play(learner, [(float(u[c]), float(n[c])) for u, n in losses], float(alpha[c]))
        np.testing.assert_array_equal(together[(slice(None), *c)], alone)


@every_learner
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_every_array_library_learns_the_same(learner, library):
    losses, alpha = random_losses(40, seed=5, shape=(4,)), np.array([0.1, 1.0, 5.0, 0.0])
    expected = play(learner, losses, alpha, np.zeros(4))
    with namespace(library) as (make, _):
        found = play(learner, [(make(u), make(n)) for u, n in losses], make(alpha), make(np.zeros(4)))
        np.testing.assert_allclose([np.asarray(s) for s in found], expected, rtol=1e-12, atol=1e-12)


@every_learner
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_state_and_predictions_keep_the_kind_and_type_of_zero(learner, dtype, library):
    with namespace(library) as (make, _):
        zero = make(np.zeros(2, dtype=dtype))
        state = learner.initial(zero)
        s = learner.predict(state, zero + 1)
        after = learner.observe(state, s, zero + 1, zero + 2, zero + 1)
        for value in (*state, s, *after):
            assert type(value) is type(zero)
            assert value.dtype == zero.dtype
            assert value.shape == zero.shape


# FTRL -----------------------------------------------------------------------------------------------------------------


@fixed
@given(losses=runs, alpha=alphas, smoothness=st.floats(0.01, 1000))
def test_ftrl_is_the_papers_closed_form(losses, alpha, smoothness):
    expected = reference.ftrl(*columns(losses), smoothness=smoothness, alpha=alpha)
    found = [s / smoothness for s in play(FTRL(), losses, alpha)]
    # The two add up in different orders, and what cancels in the sum of u is lost relative to the largest term.
    slack = 16 * EPS * sum(abs(u) for u, _ in losses) / (smoothness * alpha)
    np.testing.assert_allclose(found, expected, rtol=16 * EPS, atol=slack)


@fixed
@given(losses=runs, alpha=alphas, strength=st.floats(0.01, 100), center=st.floats(0, 2))
@pytest.mark.parametrize("kind", [FTRL, OptimisticFTRL])
def test_ftrl_is_the_clipped_quotient_of_sums_and_the_optimistic_one_sees_the_last_loss_twice(
    kind, losses, alpha, strength, center
):
    weight = strength * alpha
    for t, s in enumerate(play(kind(strength=strength, center=center), losses, alpha)):
        seen = losses[:t] + (losses[t - 1 : t] if t and kind is OptimisticFTRL else [])
        u, n = (math.fsum(column) for column in columns(seen))
        slack = 16 * EPS * sum(abs(u) for u, _ in seen) / weight
        assert s == pytest.approx(min(max((weight * center + u) / (weight + n), 0), 2), rel=16 * EPS, abs=slack)


@fixed
@given(losses=runs, alpha=alphas, floor=st.floats(0, 2))
def test_without_strength_ftrl_follows_the_leader_and_a_floor_is_a_lower_bound_of_it(losses, alpha, floor):
    seen = [(u, n + 0.01) for u, n in losses]
    u, n = (sum(column) for column in columns([(0, 0), *seen]))
    slack = 16 * EPS * sum(abs(u) for u, _ in seen) / n if n else 0
    leader = min(max(u / n, 0), 2) if n else 1
    assert play(FTRL(strength=0.0), seen, alpha)[-1] == pytest.approx(leader, rel=16 * EPS, abs=slack)
    floored = zip(play(Floored(floor=floor), losses, alpha), play(FTRL(), losses, alpha), strict=True)
    for t, (found, lead) in enumerate(floored, start=1):
        assert found == pytest.approx(max(lead, floor / math.sqrt(t)), rel=4 * EPS)


def columns(losses) -> tuple[list[float], list[float]]:
    return [u for u, _ in losses], [n for _, n in losses]


# Online gradient descent ----------------------------------------------------------------------------------------------


@fixed
@given(losses=runs, alpha=alphas, start=st.floats(0, 2))
def test_online_gradient_descent_is_its_formula(losses, alpha, start):
    s, total = start, 0.0
    for (u, n), found in zip([*losses, (0, 0)], play(OnlineGradientDescent(start=start), losses, alpha), strict=True):
        assert found == pytest.approx(s, rel=16 * EPS, abs=16 * EPS)
        total += n
        s = min(max(found - (n * found - u) / (alpha + total), 0), 2)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("learner", "argument", "allowed"),
    [
        (FTRL, "strength", "finite and at least 0"),
        (OptimisticFTRL, "strength", "finite and at least 0"),
        (FTRL, "center", r"in \[0, 2\]"),
        (OptimisticFTRL, "center", r"in \[0, 2\]"),
        (OnlineGradientDescent, "start", r"in \[0, 2\]"),
        (Floored, "floor", r"in \[0, 2\]"),
    ],
)
def test_a_constant_out_of_range_is_refused(learner, argument, allowed):
    for value in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"{argument} must be {allowed}, got {value}"):
            learner(**{argument: value})


# A learner of one's own -----------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    multiplier: Any


class Halving:
    """A user's learner: half of the multiplier before, whatever the losses."""

    def initial(self, zero):
        return Memory(zero + 1)

    def predict(self, state, alpha):
        return state.multiplier

    def observe(self, state, multiplier, u, n, alpha):
        return Memory(multiplier / 2)


def driven(learner: Any, granularity: str, steps: int):
    torch = pytest.importorskip("torch")
    from sgdol import SGDOL

    x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = SGDOL([x], lr=0.5, learner=learner, granularity=granularity, momentum=0.0, kappa=1.0)
    for t in range(steps):
        # The mean is (2, 0), and it doubles with every step: its product with the last direction is half of n.
        for g in ([1.0, 1.0], [3.0, -1.0]):
            (2**t * x @ torch.tensor(g, dtype=torch.float64) / 2).backward()
        opt.step()
        opt.zero_grad()
    return x, opt


@pytest.mark.parametrize("granularity", ["global", "group", "tensor", "coordinate"])
def test_a_learner_of_ones_own_drives_the_optimizer(granularity):
    x, opt = driven(Halving(), granularity, steps=3)
    assert x.tolist() == [-0.5 * 2 * (1 + 0.5 * 2 + 0.25 * 4), 0.0]
    assert float(opt.param_groups[0]["step_size"]) == 0.5 * 0.25


class Register(NamedTuple):
    last: Any
    previous: Any


class Delayed(Halving):
    """The same one step later: a state whose fields move from one to the next."""

    def initial(self, zero):
        return Register(zero + 1, zero + 1)

    def predict(self, state, alpha):
        return state.previous

    def observe(self, state, multiplier, u, n, alpha):
        return Register(state.last / 2, state.last)


@pytest.mark.parametrize("granularity", ["global", "group", "tensor", "coordinate"])
def test_a_learner_may_move_one_field_of_its_state_to_another(granularity):
    x, _ = driven(Delayed(), granularity, steps=3)
    assert x.tolist() == [-0.5 * 2 * (1 + 1 * 2 + 0.5 * 4), 0.0]


@pytest.mark.parametrize("granularity", ["global", "group", "tensor", "coordinate"])
@every_learner
def test_every_learner_plays_in_the_optimizer_what_it_plays_by_itself(learner, granularity):
    # (u, n, alpha) of the whole, and of the first coordinate, which is the only one that moves.
    u, n, alpha = (3.0, 4.0, 2.0) if granularity == "coordinate" else (2.0, 4.0, 4.0)
    expected = play(learner, [(4**t * u, 4**t * n) for t in range(3)], alpha)[-1]
    _, opt = driven(learner, granularity, steps=4)
    assert float(opt.param_groups[0]["step_size"]) == pytest.approx(0.5 * expected, rel=1e-14, abs=0)


def test_the_state_of_a_learner_of_ones_own_can_be_loaded_again():
    _, opt = driven(Halving(), "global", steps=2)
    _, new = driven(Halving(), "global", steps=0)
    new.load_state_dict(opt.state_dict())


# Measured curvature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("charge", [0.5, 2.0])
@pytest.mark.parametrize("tolerance", [0.25, 0.6, 2.0])
def test_measured_curvature_is_the_references_multiplier(tolerance, charge):
    learner, rng = MeasuredCurvature(tolerance, charge), np.random.default_rng(5)
    us, vs, played, state = [], [], [], learner.initial(0.0)
    for t in range(40):
        s = learner.predict(state, 2.0)
        expected = reference.measured_multiplier(us, vs, played, alpha=2.0, tolerance=tolerance, charge=charge)
        assert s == pytest.approx(expected, rel=1e-13, abs=1e-15)
        u, v = float(rng.normal(0.5)), float(rng.normal())
        state = learner.observe(state, s, u, 1.0, 2.0, last=v if t else 0.0)
        us.append(u)
        played.append(s)
        if t:
            vs.append(v)


def test_hindsight_is_asked_for_by_an_attribute():
    assert uses_hindsight(MeasuredCurvature())
    assert not uses_hindsight(FTRL())
