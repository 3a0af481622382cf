"""What is logged is what the optimizer learned, at the steps at which it was asked for."""

import math

import pytest
import torch
from loops import closure_of, scalar
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from sgdol import SGDOL, SGDOLFree
from sgdol.learners import FTRL
from sgdol.torch import Log, scalars


def problem(names=("body", "head"), **options):
    """Two groups with their own step sizes."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in names]
    groups = [
        {"params": [p], **({} if name is None else {"name": name})} for p, name in zip(params, names, strict=True)
    ]
    return params, SGDOL(groups, lr=0.25, granularity="group", **options)


def step(params, opt, generator, bad=False):
    for _ in range(2):
        for i, p in enumerate(params):
            noise = (i + 1) * torch.randn(3, generator=generator)
            (((p * p).sum() / 2 + noise @ p) / 2 * (math.nan if bad else 1)).backward()
    opt.step()
    opt.zero_grad()


def test_tensorboard_shows_what_the_optimizer_learned(tmp_path):
    params, opt = problem()
    generator = torch.Generator().manual_seed(0)
    expected = []
    with SummaryWriter(str(tmp_path)) as writer:
        log = Log(writer, every=5)
        for t in range(1, 21):
            step(params, opt, generator, bad=t in (7, 12))
            log(opt)
            if t % 5 == 0:
                expected.append((t, opt.diagnostics()))
    board = EventAccumulator(str(tmp_path)).Reload()
    names = "step_size/body step_size/head signal_to_noise noise_scale updates skipped gradients"
    assert set(board.Tags()["scalars"]) == {f"sgdol/{name}" for name in names.split()}

    def shown(name):
        return [(event.step, event.value) for event in board.Scalars(f"sgdol/{name}")]

    def close(values):
        return [(t, pytest.approx(value, rel=1e-6)) for (t, _), value in zip(expected, values, strict=True)]  # float32

    assert shown("step_size/body") == close([found["step_size"][0] for _, found in expected])
    assert shown("step_size/head") == close([found["step_size"][1] for _, found in expected])
    for name in ("signal_to_noise", "noise_scale"):
        assert shown(name) == close([found[name] for _, found in expected])
    assert shown("skipped") == [(5, 0), (10, 1), (15, 2), (20, 2)]
    assert shown("updates") == [(5, 5), (10, 9), (15, 13), (20, 18)]
    assert shown("gradients") == [(5, 2), (10, 2), (15, 2), (20, 2)]


def test_the_history_is_kept_without_any_writer():
    params, opt = problem(momentum=0.0, learner=FTRL())
    generator, log = torch.Generator().manual_seed(0), Log(every=4)
    for _ in range(10):
        step(params, opt, generator)
        log(opt)
    assert [row["step"] for row in log.history] == [4, 8]
    assert log.history[-1] == {**log.history[-1], "step": 8, "updates": 8, "skipped": 0, "gradients": 2}
    assert 0 < log.history[-1]["step_size/head"] < log.history[-1]["step_size/body"] < 0.25


def test_a_function_gets_all_numbers_at_once():
    calls = []
    params, opt = problem([None])
    step(params, opt, torch.Generator().manual_seed(0))
    row = Log(lambda values, step: calls.append((values, step)), every=1, prefix="net/")(opt, step=30)
    ((values, number),) = calls
    assert number == 30
    assert values == {f"net/{name}": value for name, value in row.items() if name != "step"}


def test_numbers_that_are_not_finite_are_kept_but_not_written():
    calls = []
    _, opt = problem([None])
    log = Log(lambda values, step: calls.append(values), every=1)
    assert math.isnan(log(opt)["noise_scale"])  # before the first update
    assert calls == [{"sgdol/step_size": 0.25, "sgdol/updates": 0, "sgdol/skipped": 0, "sgdol/gradients": 0}]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([None], ["step_size"]),
        (["body"], ["step_size/body"]),
        ([None, None], ["step_size/0", "step_size/1"]),
        (["body", None], ["step_size/body", "step_size/1"]),
        (["same", "same"], ["step_size/same-0", "step_size/same-1"]),
    ],
)
def test_step_sizes_are_named_after_their_groups(names, expected):
    _, opt = problem(names)
    assert [name for name in scalars(opt) if name.startswith("step_size")] == expected


def test_an_empty_group_has_no_step_size():
    opt = SGDOL([{"params": [torch.nn.Parameter(torch.ones(1))]}, {"params": []}], lr=0.1)
    assert scalars(opt)["step_size"] == 0.1


def test_the_optimizer_that_measures_the_smoothness_is_logged_too():
    x = torch.nn.Parameter(torch.ones(3))
    opt = SGDOLFree([x])
    generator, log = torch.Generator().manual_seed(0), Log(every=1)
    for _ in range(5):
        noise = torch.randn(2, 3, generator=generator)
        opt.step(closure_of(opt, lambda noise=noise: (((x * x).sum() / 2 + row @ x) / 2 for row in noise)))
        log(opt)
    found = opt.diagnostics()
    assert log.history[-1] == {
        "step": 5,
        "step_size": found["step_size"][0],
        **{name: found[name] for name in found if name != "step_size"},
    }
    assert found["updates"] == 5


def test_a_log_that_was_saved_goes_on():
    params, opt = problem()
    generator, log = torch.Generator().manual_seed(0), Log(every=2)
    for _ in range(3):
        step(params, opt, generator)
        log(opt)
    other = Log(every=2)
    other.load_state_dict(log.state_dict())
    assert other(opt)["step"] == 4
    assert [row["step"] for row in other.history] == [2, 4]
    assert [row["step"] for row in log.history] == [2]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Log(every=0), ValueError, "every must be a whole number of steps, at least 1, got 0"),
        (lambda: Log(every=2.5), ValueError, "every must be a whole number of steps, at least 1, got 2.5"),
        (lambda: Log(every=True), ValueError, "every must be a whole number of steps, at least 1, got True"),
        (lambda: Log("runs/"), TypeError, r"writer must be None, a function .* got 'runs/'"),
        (
            lambda: Log(every=1)(torch.optim.SGD([scalar()], lr=0.1)),
            TypeError,
            r"must be an SGDOL, or a trainer's wrapper around one, got torch\.optim\.sgd\.SGD",
        ),
    ],
)
def test_what_cannot_be_logged_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
