"""Saved and loaded, or copied, a run goes on to the last bit: in the middle of a pair, with any option."""

import copy
import pickle

import pytest
import torch
from dense_metric import Dense
from loops import GRANULARITIES, OPTIMIZERS, both, fit, flat, pairs, plain, scalar, through_a_file
from pairs import pairwise
from torch import nn

from sgdol import SGDOL, SGDOLFree
from sgdol.learners import OnlineGradientDescent, OptimisticFTRL

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # pairs are among what is tested

OPTIONS = [
    *(("SGDOL", {"granularity": g, "momentum": 0.9, "averaging": 8.0}) for g in GRANULARITIES),
    ("SGDOL", {"estimator": "paper", "granularity": "coordinate"}),
    ("SGDOL", {"lr": torch.tensor(0.1), "epoch": 3, "bias_correction": True, "metric": "rms"}),
    ("SGDOL", {"learner": OptimisticFTRL(), "granularity": "tensor", "momentum": 0.0, "alpha": 10.0}),
    ("SGDOL", {"learner": OnlineGradientDescent(), "granularity": "coordinate", "weight_decay": 0.1}),
    ("SGDOL", {"metric": "kronecker"}),
    ("SGDOL", {"metric": Dense()}),
    ("SGDOLFree", {}),
    ("SGDOLFree", {"metric": "rms"}),
    ("SGDOLFree", {"metric": Dense()}),
]


def go_on(name, net, opt, numbers):
    """SGDOL with one backward per step, as after an odd number of them it holds a gradient."""
    (pairs if name == "SGDOL" else fit)(net, opt, numbers)


@pairwise(
    case=OPTIONS,
    dtype=[torch.float64, torch.bfloat16],
    stop=[0, 1, 4, 11],
    way=["state_dict", "deepcopy", "pickle"],
)
def test_resuming_is_exact(case, dtype, stop, way):
    name, options = case
    net = plain(dtype)
    opt = OPTIMIZERS[name](net.parameters(), **options)
    go_on(name, net, opt, range(stop))
    if way == "state_dict":
        twin = plain(dtype, seed=5)
        resumed = OPTIMIZERS[name](twin.parameters(), **options)
        # A state of SGDOLFree has the metric itself, and torch.load knows those of sgdol.metrics alone.
        carried = copy.deepcopy if case == OPTIONS[-1] else through_a_file
        for into, saved in zip((twin, resumed), carried((net.state_dict(), opt.state_dict())), strict=True):
            into.load_state_dict(saved)
    else:
        twin, resumed = copy.deepcopy((net, opt)) if way == "deepcopy" else pickle.loads(pickle.dumps((net, opt)))
    assert name == "SGDOLFree" or resumed.pending == opt.pending == bool(stop % 2)
    for each, by in ((net, opt), (twin, resumed)):
        go_on(name, each, by, range(stop, stop + 6))
        if name == "SGDOL" and options.get("estimator") != "paper" and not by.pending:
            fit(each, by, range(2))
    assert torch.equal(flat(net.parameters()), flat(twin.parameters()))
    assert repr(opt.state_dict()) == repr(resumed.state_dict())
    assert repr(opt.diagnostics()) == repr(resumed.diagnostics())


@both
def test_a_loaded_state_shares_no_memory_with_what_was_loaded(make):
    net = plain()
    opt = make(net.parameters())
    fit(net, opt, range(2))
    saved = opt.state_dict()
    kept = pickle.dumps(saved)
    twin = copy.deepcopy(net)
    resumed = make(twin.parameters())
    resumed.load_state_dict(saved)
    fit(twin, resumed, range(2, 4))
    assert pickle.dumps(saved) == kept


def test_a_state_that_is_a_factor_is_kept_for_each_tensor():
    """Of a metric whose D is a full matrix."""
    for name in OPTIMIZERS:
        net = plain()
        opt = OPTIMIZERS[name](net.parameters(), metric=Dense())
        fit(net, opt, range(3))
        for p in net.parameters():
            assert opt.state[p]["metric.outer"].shape == (p.numel(), p.numel())


def test_add_param_group_in_the_middle_of_a_pair():
    a, b = scalar(), scalar()
    opt = SGDOL([a], lr=0.1, momentum=0.0)
    a.grad = torch.ones_like(a)
    opt.step()
    opt.add_param_group({"params": [b], "lr": 0.2})
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    opt.step()
    assert not opt.pending
    assert b.item() == pytest.approx(1 - 0.2 * 0.5)  # it had no first gradient, which counts as zero


@pytest.mark.parametrize("metric", ["rms", "euclidean"])
def test_a_state_that_knows_no_usual_gradient_is_loaded(metric):
    """As saved before there was a clip: nothing is clipped until something is known to be usual, then as ever."""
    net = plain()
    opt = SGDOLFree(net.parameters(), metric=metric)
    fit(net, opt, range(30))
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        group["rule"] = {name: value for name, value in group["rule"].items() if not name.startswith("usual")}
    twin = copy.deepcopy(net)
    other = SGDOLFree(twin.parameters(), metric=metric)
    other.load_state_dict(saved)
    for each, by in ((net, opt), (twin, other)):
        fit(each, by, [30])
    torch.testing.assert_close(flat(twin.parameters()), flat(net.parameters()), rtol=1e-12, atol=1e-12)
    fit(twin, other, range(31, 50))
    assert other.diagnostics()["skipped"] == 0
    assert 0 < other.state_dict()["param_groups"][0]["rule"]["usual_gradient"] < float("inf")


def test_the_text_of_sgdol_free_is_short():
    net = nn.Linear(5, 1).double()
    opt = SGDOLFree(net.parameters())
    fit(net, opt, range(3))
    assert "rule" not in repr(opt)
    assert len(repr(opt)) < 300
