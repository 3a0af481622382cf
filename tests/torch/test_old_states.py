"""States that an earlier version saved: training goes on where it would have gone on then.

``data/states_of_0.1.pt`` holds, for each case below, parameters and ``state_dict()`` after five steps, and what version
0.1 itself came to after four more.
"""

from pathlib import Path

import pytest
import torch
from loops import fit, plain

from sgdol import PAPER, SGDOL, SGDOLFree
from sgdol.learners import FTRL, OnlineGradientDescent

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # states of pairs

SAVED = torch.load(Path(__file__).parent / "data" / "states_of_0.1.pt", weights_only=True)
CASES = {
    "global, momentum, averaging": ({"averaging": 8.0, "kappa": 10.0}, 2),
    "coordinate, paper, pending": ({**PAPER, "granularity": "coordinate", "alpha": 1.0}, 1),
    "tensor, bfloat16, pending": ({"granularity": "tensor", "momentum": 0.5, "statistics": "gradient"}, 1),
    "group, descent": (
        {"granularity": "group", "weight_decay": 0.1, "momentum": 0.0, "learner": OnlineGradientDescent()},
        3,
    ),
}
"""Where a learner is not named it is FTRL, the default of that version."""


def train(params, opt, k: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        for _ in range(k):
            loss = 0
            for p in params:
                dtype = torch.complex128 if p.is_complex() else torch.float64
                g = torch.randn(p.shape, generator=generator, dtype=dtype).add(0.4).to(p.dtype)
                loss = loss + ((p * g.conj()).sum().real if p.is_complex() else (p * g).sum())
            loss.div(k).backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_a_state_of_the_version_before(case):
    """To the rounding of a few operations whose order is another now: sums per tensor before those over tensors."""
    saved, (options, k) = SAVED[case], CASES[case]
    params = [torch.nn.Parameter(p.clone()) for p in saved["params"]]
    options = {"learner": FTRL(), **options}
    opt = SGDOL([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}], lr=0.1, **options)
    opt.load_state_dict(saved["state"])
    train(params, opt, k, 4)
    for p, expected in zip(params, saved["after"], strict=True):
        tolerance = max(1e-12, 4 * torch.finfo(p.dtype).eps)
        torch.testing.assert_close(p.detach(), expected, rtol=tolerance, atol=tolerance)
    assert opt.diagnostics()["updates"] == saved["report"]["updates"]
    assert opt.diagnostics()["pending"] == saved["report"]["pending"]
    if saved["averages"] is not None:
        with opt.averaged():
            for p, expected in zip(params, saved["averages"], strict=True):
                torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)


def test_the_defaults_of_today_name_the_learner_that_a_state_of_the_version_before_needs():
    saved = SAVED["global, momentum, averaging"]
    params = [torch.nn.Parameter(p.clone()) for p in saved["params"]]
    opt = SGDOL([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, averaging=8.0)
    with pytest.raises(ValueError, match=r"saved with learner='FTRL\(.*construct it with the same learner"):
        opt.load_state_dict(saved["state"])


def test_a_state_of_sgdol_free_brings_along_the_metric_that_was_the_default():
    """An optimizer that is constructed with today's default goes on in the metric of the state, to the bit."""
    net, twin = plain(torch.float32), plain(torch.float32, seed=1)
    opt, today = SGDOLFree(net.parameters(), metric="rms"), SGDOLFree(twin.parameters())
    fit(net, opt, range(7))
    twin.load_state_dict(net.state_dict())
    today.load_state_dict(opt.state_dict())
    for model, optimizer in ((net, opt), (twin, today)):
        fit(model, optimizer, range(7, 20))
    assert today.param_groups[0]["metric"] == "rms"
    assert all(map(torch.equal, net.parameters(), twin.parameters()))
    assert "metric.square" in today.state[twin[0].weight]
