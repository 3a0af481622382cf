"""A GradScaler changes nothing: its factor is followed, and a batch that it skips is as if it had not been."""

import copy

import numpy as np
import pytest
import torch
from free_problems import joined, train
from loops import GRANULARITIES, OPTIMIZERS, batch, flat, objective, plain
from pairs import pairwise
from torch import nn

from sgdol import SGDOLFree
from sgdol.torch import backward

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")

OVERFLOWS = 4
"""In this step. Where it is not scaled the loop leaves it out."""


def run(name: str, parts: int, scaler, unscale: bool, max_norm: float, **options):
    net = plain()
    opt = OPTIMIZERS[name](net.parameters(), **options)
    seen = []
    for t in range(8):

        def loss_fn(x):
            seen.append(None)
            return objective(net, x)

        scaled = scaler is not None
        backward(loss_fn, batch(t), parts=parts, run=(lambda loss: scaler.scale(loss).backward()) if scaled else None)
        before, calls = copy.deepcopy(net.state_dict()), len(seen)
        if scaled and t == OVERFLOWS:
            next(net.parameters()).grad[0, 0] = torch.inf
        if scaled and unscale:
            scaler.unscale_(opt)
        if unscale:
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        if scaled:
            scaler.step(opt)
            scaler.update()
        elif t != OVERFLOWS:
            opt.step()
        if t == OVERFLOWS:
            assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
            assert len(seen) == calls, "a batch that was skipped was run again"
        net.zero_grad()  # the module's, which the optimizer does not see
    return flat(net.parameters()), opt.diagnostics()


CASES = [("SGDOL", {"granularity": each}) for each in GRANULARITIES]
CASES += [("SGDOLFree", {"metric": metric}) for metric in ("kronecker", "euclidean")]


@pairwise(case=CASES, unscale=[False, True], parts=[1, 2])
def test_a_grad_scaler_changes_nothing(case, unscale, parts):
    name, options = case
    parts += name == "SGDOLFree"
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    found, report = run(name, parts, scaler, unscale, 0.3, **options)
    expected, plain_report = run(name, parts, None, unscale, 0.3, **options)
    assert scaler.get_scale() != 1024.0
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    for count in ("updates", "skipped"):
        assert report[count] == plain_report[count]


@pytest.mark.parametrize("max_norm", [3.0, 1e9])
def test_look_backs_are_measured_in_the_units_of_the_gradients_that_it_divided(max_norm):
    """Its factor doubles every third step."""

    def scaled_by(scaler):
        def step(opt, params, loss, t):
            backward(
                lambda parts: sum(loss(joined(params), t, part) for part in parts) / len(parts),
                [0, 1],
                run=lambda value: scaler.scale(value).backward(),
            )
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(params, max_norm)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

        return step

    options = {"init_scale": 2.0**10, "growth_interval": 3}
    scaler = torch.amp.GradScaler("cpu", **options)
    found = train("burst", step=scaled_by(scaler))
    expected = train("burst", step=scaled_by(torch.amp.GradScaler("cpu", enabled=False)))
    assert scaler.get_scale() > 2.0**20
    np.testing.assert_allclose(found.iterates, expected.iterates, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(found.average, expected.average, rtol=1e-9, atol=1e-10)
    assert found.opt.diagnostics()["evaluations"] == expected.opt.diagnostics()["evaluations"] > 70


def test_a_scaled_loss_that_loss_fn_returns_is_refused_and_the_right_line_is_shown():
    """It was taken for clipping to a thousandth: 40 steps reached an accuracy of 0.27."""
    net = plain(torch.float32)
    opt = SGDOLFree(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    backward(lambda x: scaler.scale(objective(net, x)), batch(0, dtype=torch.float32))
    with pytest.raises(RuntimeError, match=r"run=lambda loss: scaler\.scale\(loss\)\.backward\(\)"):
        scaler.step(opt)
