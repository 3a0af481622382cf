"""A training that runs but does not do what it looks like says so: once, in a sentence, with the remedy."""

import itertools
import math
import warnings
from contextlib import contextmanager

import pytest
import torch
from closures import one_step

from sgdol import PAPER, SGDOL
from sgdol.learners import FTRL
from sgdol.torch import backward

HOLDS = "updates at every second step"
ZERO = "exactly 0"
DIVERGED = "skipped 10 updates in a row"
NOT_ZEROED = "not zeroed"


@contextmanager
def said():
    """The sentences that are said inside."""
    sentences = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield sentences
    sentences += [str(w.message) for w in caught]


def noise(seed=0):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, generator=generator, dtype=torch.float64)


def weight(value=1.0):
    return torch.nn.Parameter(torch.full((8,), value, dtype=torch.float64))


def run(opt, x, gradients, *, steps, passes=2, zero=lambda opt: opt.zero_grad()):
    for _ in range(steps):
        for g in itertools.islice(gradients, passes):
            (x @ g / passes).backward()
        opt.step()
        zero(opt)


def test_one_backward_per_step_says_once_that_every_second_step_updates_and_names_the_remedy():
    x = weight()
    with said() as sentences:
        run(SGDOL([x], lr=0.1), x, noise(), steps=6, passes=1)
    assert [HOLDS in s and "sgdol.torch.backward(loss_fn, *batch)" in s for s in sentences] == [True]


def test_the_sentence_about_holding_points_at_the_training_loop():
    x = weight()
    opt = SGDOL([x], lr=0.1)
    x.sum().backward()
    with pytest.warns(UserWarning, match=HOLDS) as caught:
        opt.step()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("passes", [2, 3])
def test_several_backwards_per_step_say_nothing(passes):
    x = weight()
    with said() as sentences:
        run(SGDOL([x], lr=0.1), x, (g + 1 for g in noise()), steps=6, passes=passes)
    assert sentences == []


def test_a_last_batch_of_one_sample_says_nothing():
    x = weight()
    opt = SGDOL([x], lr=0.1)
    with said() as sentences:
        for size in (4, 1):
            backward(lambda batch: (batch @ x).mean(), torch.randn(size, 8, dtype=torch.float64) + 1)
            opt.step()
            opt.zero_grad()
    assert opt.pending
    assert sentences == []


def test_the_papers_estimator_asks_for_held_gradients_and_says_nothing():
    x = weight()
    with said() as sentences:
        run(SGDOL([x], lr=0.1, **PAPER), x, noise(), steps=4, passes=1)
    assert sentences == []


def opposite():
    """Two losses that pull apart, in turn, as a discriminator's on real and on fake samples do."""
    return itertools.cycle([torch.full((8,), 3.0, dtype=torch.float64), torch.full((8,), -2.9, dtype=torch.float64)])


@pytest.mark.parametrize("granularity", ["global", "tensor", "coordinate"])
def test_a_step_size_of_zero_for_ten_updates_running_is_said_once_with_its_causes(granularity):
    x = weight()
    opt = SGDOL([x], lr=0.1, learner=FTRL(), momentum=0.0, granularity=granularity)
    with said() as sentences:
        run(opt, x, opposite(), steps=10)  # the first update has the step size lr
    assert sentences == []
    with said() as sentences:
        run(opt, x, opposite(), steps=30)
    assert [ZERO in s and "add the losses" in s for s in sentences] == [True]


def test_a_rate_of_zero_is_the_schedulers_wish_and_says_nothing():
    x = weight()
    opt = SGDOL([x], lr=0.1, learner=FTRL(), momentum=0.0)
    opt.param_groups[0]["lr"] = 0.0
    with said() as sentences:
        run(opt, x, opposite(), steps=20)
    assert sentences == []


def test_divergence_is_said_once_after_ten_skips_and_names_lr():
    x = weight(1e3)
    opt = SGDOL([x], lr=1e9)
    with said() as sentences:
        for _ in range(100):
            one_step(opt, ((x**4).sum().add(x @ g).div(2) for g in itertools.islice(noise(1), 2)))
    assert [DIVERGED in s and "lr=1e+09" in s for s in sentences if "same gradient" not in s] == [True]


def test_skips_between_updates_are_not_divergence():
    x = weight()
    opt = SGDOL([x], lr=0.1)
    with said() as sentences:
        for step in range(40):
            one_step(opt, (x @ (g * (math.nan if step % 2 else 1)) for g in itertools.islice(noise(step), 2)))
    assert opt.diagnostics()["skipped"] == 20
    assert not any(DIVERGED in s for s in sentences)


def test_forgotten_zero_grad_is_said_once():
    x = weight()
    with said() as sentences:
        run(SGDOL([x], lr=0.1), x, noise(), steps=6, zero=lambda opt: None)
    assert [NOT_ZEROED in s for s in sentences] == [True]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "zero",
    [
        lambda opt: opt.zero_grad(set_to_none=False),
        lambda opt: [p.grad.zero_() for p in opt.param_groups[0]["params"]],
        lambda opt: [p.grad.data.zero_() for p in opt.param_groups[0]["params"]],
        lambda opt: [setattr(p, "grad", None) for p in opt.param_groups[0]["params"]],
    ],
    ids=["optimizer", "in place", "behind autograd", "to None"],
)
def test_gradients_that_are_zeroed_in_any_way_say_nothing(zero, passes):
    x = weight()
    with said() as sentences:
        run(SGDOL([x], lr=0.1), x, (g + 1 for g in noise()), steps=6, passes=passes, zero=zero)
    assert [s for s in sentences if HOLDS not in s] == []


def test_gradients_of_another_loss_that_are_zeroed_before_the_next_step_say_nothing():
    x, draws = weight(), (g + 1 for g in noise())
    opt = SGDOL([x], lr=0.1)
    with said() as sentences:
        for _ in range(5):
            x.grad = None  # as a GAN does it: the generator's loss has gone through the discriminator
            for g in itertools.islice(draws, 2):
                (x @ g / 2).backward()
            opt.step()
            (x @ next(draws)).backward()
    assert sentences == []


def test_diagnostics_are_bounded_where_noise_makes_the_signal_negative():
    x = weight()
    opt = SGDOL([x], lr=0.1, learner=FTRL(), momentum=0.0)
    run(opt, x, opposite(), steps=3)
    found = opt.diagnostics()
    assert found["signal_to_noise"] == 0.0
    assert found["noise_scale"] == math.inf


@pytest.mark.filterwarnings("ignore:SGDOL was given the same gradient twice")
def test_diagnostics_are_bounded_where_there_is_no_noise():
    x = weight()
    opt = SGDOL([x], lr=0.1, learner=FTRL(), momentum=0.0)
    run(opt, x, itertools.repeat(torch.ones(8, dtype=torch.float64)), steps=3)
    found = opt.diagnostics()
    assert 2.0**40 < found["signal_to_noise"] <= 2.0**52
    assert 0 <= found["noise_scale"] < 2.0**-40
