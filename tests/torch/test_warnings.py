"""A training that runs but does not do what it looks like says so: once, in a sentence, with the remedy."""

import itertools
import math
import warnings

import pytest
import torch
from loops import batch, both, fit, net_closure, objective, one_step, plain, said

from sgdol import PAPER, SGDOL, SGDOLFree
from sgdol.learners import FTRL
from sgdol.torch import backward

HOLDS = "updates at every second step"
ZERO = "exactly 0"
NOT_ZEROED = "not zeroed"


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
    opt, draws = SGDOL([x], lr=0.1), noise()
    (x @ next(draws)).backward()
    with pytest.warns(UserWarning, match=HOLDS) as caught:
        opt.step()
    assert caught[0].filename == __file__  # the training loop
    assert "sgdol.torch.backward(loss_fn, *batch)" in str(caught[0].message)
    opt.zero_grad()
    with said() as sentences:
        run(opt, x, draws, steps=5, passes=1)
    assert sentences == []


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


def test_skips_between_updates_are_not_divergence():
    x = weight()
    opt = SGDOL([x], lr=0.1)
    with said() as sentences:
        for step in range(40):
            one_step(opt, (x @ (g * (math.nan if step % 2 else 1)) for g in itertools.islice(noise(step), 2)))
    assert opt.diagnostics()["skipped"] == 20
    assert not any("in a row" in s for s in sentences)


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


@pytest.mark.filterwarnings("ignore:SGDOL was given the same gradient twice")
def test_diagnostics_are_bounded_where_noise_makes_the_signal_negative_and_where_there_is_none():
    found = []
    for gradients in (opposite(), itertools.repeat(torch.ones(8, dtype=torch.float64))):
        x = weight()
        opt = SGDOL([x], lr=0.1, learner=FTRL(), momentum=0.0)
        run(opt, x, gradients, steps=3)
        found.append((opt.diagnostics()["signal_to_noise"], opt.diagnostics()["noise_scale"]))
    assert found[0] == (0.0, math.inf)
    assert 2.0**40 < found[1][0] <= 2.0**52
    assert 0 <= found[1][1] < 2.0**-40


def test_rollbacks_that_are_many_are_said_once():
    net = plain()
    opt = SGDOLFree(net.parameters())
    fit(net, opt, range(30))

    def jump(earlier):
        opt.param_groups[0]["rule"] = {**opt.param_groups[0]["rule"], "rollbacks": earlier, "penalty": 1.0}
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(100)
        opt.moved()
        fit(net, opt, [30])

    jump(earlier=1)  # warnings are errors
    with pytest.warns(UserWarning, match="returned to its average in more than one of 20 steps.*different tasks"):
        jump(earlier=4)
    jump(earlier=5)
    assert opt.diagnostics()["rollbacks"] == 6


# Both optimizers ------------------------------------------------------------------------------------------------------


@both
def test_ten_skips_running_are_said_once(make):
    net = plain()
    opt = make(net.parameters())

    def skip(count):
        for _ in range(count):
            opt.step(net_closure(opt, net, batch(0) * math.nan))
        opt.zero_grad()

    skip(9)  # warnings are errors
    fit(net, opt, [0])
    skip(9)
    sentence = "skipped 10 steps in a row" if make is SGDOLFree else "skipped 10 updates in a row.*lr=0.1"
    with pytest.warns(UserWarning, match=sentence):
        skip(1)
    skip(20)


@both
def test_the_same_samples_in_both_halves_are_said_once_and_point_at_the_loop(make):
    net = plain()
    opt = make(net.parameters())
    torch.optim.lr_scheduler.StepLR(opt, step_size=100)  # schedulers wrap step(), which must not hide the caller
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(12):
            backward(lambda x: objective(net, x), batch(t).repeat(2, 1))
            opt.step()
            opt.zero_grad()
    assert len(caught) == 1
    assert any(words in str(caught[0].message) for words in ("the same gradient twice", "are the same samples"))
    assert caught[0].filename == __file__
