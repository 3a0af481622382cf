"""What cannot be right is refused before anything has changed, in a sentence with the name and the remedy."""

import copy
import math
import re

import pytest
import torch
from dense_metric import Dense
from loops import both, fit, plain, scalar
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sgdol import SGDOL, SGDOLFree
from sgdol.learners import OptimisticFTRL

LR, LR_FREE = "lr must be positive and finite, at most 1e+200, got ", "lr must be at least 0 and finite, at most 1e+30"
EPOCH = "epoch must be a whole number of updates, "
BAD = [
    (SGDOL, {}, ValueError, "lr or smoothness is needed: got neither"),
    (SGDOL, {}, ValueError, "SGDOLFree"),
    (SGDOL, {"lr": 0.1, "smoothness": 10.0}, ValueError, "lr or smoothness, not both"),
    *((SGDOL, {"lr": value}, ValueError, f"{LR}{value}") for value in (0.0, -0.5, math.nan, math.inf)),
    (SGDOL, {"lr": torch.tensor([0.1, 0.2])}, ValueError, "Tensor lr must be 1-element"),
    (SGDOL, {"smoothness": 0.0}, ValueError, "smoothness must be positive and finite, got 0.0"),
    (SGDOL, {"smoothness": math.inf}, ValueError, "smoothness must be positive and finite, got inf"),
    (SGDOL, {"smoothness": 5e-324}, ValueError, "smoothness must be larger, the base rate is 1 over it, got 5e-324"),
    (SGDOL, {"alpha": 0.0}, ValueError, "alpha must be None, or positive and finite, got 0.0"),
    (SGDOL, {"alpha": math.nan}, ValueError, "alpha must be None, or positive and finite, got nan"),
    (SGDOL, {"granularity": "layer"}, ValueError, "granularity must be one of 'global', "),
    (SGDOL, {"estimator": "half"}, ValueError, "estimator must be one of 'symmetric', 'paper', got 'half'"),
    (SGDOL, {"momentum": 1.0}, ValueError, "momentum must be at least 0 and less than 1, got 1.0"),
    (SGDOL, {"weight_decay": -1.0}, ValueError, "weight_decay must be at least 0 and finite, "),
    (SGDOL, {"kappa": 0.0}, ValueError, "kappa must be None, or positive and finite, got 0.0"),
    (SGDOL, {"alpha": 2.0, "kappa": 3.0}, ValueError, "give alpha or kappa, not both: got alpha=2.0 and kappa=3.0"),
    (SGDOL, {"epoch": 1}, ValueError, EPOCH),
    (SGDOL, {"epoch": 4.0}, ValueError, EPOCH),
    (SGDOL, {"epoch": 4, "estimator": "paper"}, ValueError, 'epoch corrects estimator="symmetric", got'),
    (SGDOL, {"bias_correction": 1}, TypeError, "bias_correction must be True or False, got 1"),
    (SGDOL, {"statistics": "raw"}, ValueError, "statistics must be one of 'direction', 'gradient', got 'raw'"),
    (SGDOL, {"averaging": -1}, ValueError, "averaging must be None, or finite and at least 0, got -1"),
    (SGDOL, {"averaging": True}, TypeError, "averaging must be a number, "),
    (SGDOL, {"learner": object()}, TypeError, "learner must be an object with initial, predict and observe"),
    (SGDOL, {"granularity": "coordinate", "metric": Dense()}, ValueError, "needs a metric whose D is diagonal"),
    (SGDOL, {"lr": 1e201}, ValueError, "at most 1e+200"),
    (SGDOL, {"weight_decay": 1e31}, ValueError, "at most 1e+30"),
    (SGDOLFree, {"lr": -1.0}, ValueError, f"{LR_FREE}; 1 is the step size that is learned, got -1.0"),
    (SGDOLFree, {"lr": 1e31}, ValueError, LR_FREE),
    (SGDOLFree, {"momentum": 1.0}, ValueError, "momentum must be at least 0 and less than 1, got 1.0"),
    (SGDOLFree, {"averaging": -1}, ValueError, "averaging must be at least 0"),
    (SGDOLFree, {"averaging": None}, TypeError, "averaging must be a number"),
    (SGDOLFree, {"weight_decay": math.inf}, ValueError, "weight_decay must be at least 0"),
    (SGDOLFree, {"weight_decay": 1e31}, ValueError, "at most 1e+30"),
    (SGDOLFree, {"maximize": 1}, TypeError, "maximize must be True or False"),
    (SGDOLFree, {"foreach": "yes"}, TypeError, "foreach must be None, True or False"),
    *((SGDOL, {n: 0.9}, TypeError, f"SGDOL has no option '{n}': ") for n in ("betas", "nesterov", "eps", "amsgrad")),
    *(
        (SGDOLFree, {n: 1}, TypeError, f"SGDOLFree has no option '{n}'")
        for n in ("betas", "eps", "alpha", "granularity")
    ),
    (SGDOLFree, {"gamma": 1}, TypeError, "SGDOLFree has no option 'gamma'; it has lr"),
]


@pytest.mark.parametrize(("make", "options", "error", "sentence"), BAD)
def test_a_bad_option_is_named_with_its_value_and_what_is_allowed(make, options, error, sentence):
    rate = {} if make is SGDOLFree or options.keys() & {"lr", "smoothness"} or not options else {"lr": 0.1}
    with pytest.raises(error, match=re.escape(sentence)):
        make([scalar()], **rate, **options)


OF_THE_CONSTRUCTOR = {"lr", "smoothness", "epoch", "gamma"}
"""Options of which a group's are said in other words, or only warned of."""


@pytest.mark.parametrize(
    ("make", "options"), [row[:2] for row in BAD if row[1] and not row[1].keys() & OF_THE_CONSTRUCTOR]
)
def test_a_bad_option_of_a_group_is_named_too(make, options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        make([{"params": [scalar()], **options}], **({} if make is SGDOLFree else {"lr": 0.1}))


def test_groups_may_not_differ_in_what_the_point_has_in_common():
    with pytest.raises(ValueError, match="momentum is the same for all parameter groups"):
        SGDOLFree([{"params": [scalar()]}, {"params": [scalar()], "momentum": 0.5}])


@both
def test_what_are_no_parameters_is_refused(make):
    for given, error, sentence in (
        ([], ValueError, "empty parameter list"),
        (scalar(), TypeError, "iterable"),
        (nn.Linear(2, 1), TypeError, r"got a module: give its \.parameters\(\)"),
    ):
        with pytest.raises(error, match=sentence):
            make(given)
    with FakeTensorMode(), pytest.raises(TypeError, match=r"SGDOL(Free)? cannot train .* FakeTensor"):
        make(nn.Linear(2, 1).parameters())


@both
def test_what_a_group_brings_that_is_no_option_is_warned_of(make):
    opt = make([{"params": [scalar()], "name": "head", "initial_lr": 1.0}])
    name = type(opt).__name__
    with pytest.warns(UserWarning, match=rf"group 1 brings 'wd': {name} has no such option, so it changes nothing"):
        opt.add_param_group({"params": [scalar()], "wd": 0.1})
    assert opt.param_groups[1]["wd"] == 0.1


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("lr", math.nan, "lr of parameter group 0 must be at least 0 and finite, got nan"),
        ("lr", torch.tensor(-0.1), "lr of parameter group 0 must be at least 0 and finite, got -0.1"),
        ("momentum", 1.0, "momentum of parameter group 0 must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_what_a_scheduler_should_not_write_is_refused_and_loses_no_gradient(option, value, sentence):
    x = scalar()
    opt = SGDOL([x], lr=0.1)
    (3 * x).sum().backward()
    (2 * x).sum().backward()
    before, allowed = x.item(), opt.param_groups[0][option]
    opt.param_groups[0][option] = value
    with pytest.raises(ValueError, match=sentence):
        opt.step()
    assert x.item() == before
    opt.param_groups[0][option] = allowed
    opt.step()
    assert opt.diagnostics()["gradients"] == 2
    assert math.isfinite(x.item())
    assert x.item() != before


def test_sparse_gradients_are_refused_with_what_to_do():
    table = nn.Embedding(5, 2, sparse=True)
    opt = SGDOL(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients: parameter 0 of shape \(5, 2\).*sparse=False"):
        opt.step()


# States ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "saved", "here"),
    [
        ("granularity", "tensor", "global"),
        ("estimator", "paper", "symmetric"),
        ("learner", OptimisticFTRL(), None),
        ("alpha", 10.0, None),
        ("kappa", None, 1.0),
        ("bias_correction", True, None),
        ("metric", "rms", "euclidean"),
        ("statistics", "gradient", "direction"),
        ("averaging", 8, None),
    ],
)
def test_the_state_of_another_configuration_is_refused(name, saved, here):
    state = SGDOL([scalar()], lr=0.1, **{name: saved}).state_dict()
    opt = SGDOL([scalar()], lr=0.1, **{name: here})
    with pytest.raises(ValueError, match=f"state_dict was saved with {name}=.*construct it with the same {name}"):
        opt.load_state_dict(state)


def of_version_0_1(state):
    group = {"momentum": 0.9, "averaging": 8.0, "weight_decay": 0.0, "maximize": False, "step_size": 0.2, "params": [0]}
    state.clear()
    state.update(state={}, param_groups=[group])


def of_other_shapes(state):
    for name, value in state["state"][1].items():
        state["state"][1][name] = torch.ones(2) if value.dim() else value


def of_sgdol(state):
    saved = SGDOL(plain().parameters(), lr=1.0).state_dict()
    state.clear()
    state.update(saved)


def of_sgd(state):
    saved = torch.optim.SGD(plain().parameters(), lr=1.0).state_dict()
    state.clear()
    state.update(saved)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("state"), r"must be what SGDOLFree.state_dict\(\) returned, got \['param_groups'\]"),
        (lambda state: state["state"][0].pop("average"), "damaged: parameter 0 has no tensor average"),
        (lambda state: state["state"][1].update(last_step=3), "damaged: parameter 1 has no tensor last_step"),
        (lambda state: state.update(state=[1]), "damaged: its state is not a dict of dicts"),
        (lambda state: state["param_groups"][0].pop("lr"), "damaged: its group 0 has no lr"),
        (lambda state: state["param_groups"][0]["rule"].update(smoothness=math.nan), "smoothness in the rule"),
        (lambda state: state["param_groups"][0]["rule"].update(smoothness="a"), "smoothness in the rule"),
        (lambda state: state["param_groups"][0]["rule"].update(bogus=1), "unknown entry 'bogus'"),
        (of_other_shapes, r"of parameter 1 has shape \(2,\), the parameter \(8,\)"),
        (of_sgd, "not saved by SGDOLFree"),
        (of_sgdol, "not saved by SGDOLFree"),
        (of_version_0_1, r"version 0\.1, which this version cannot continue"),
    ],
)
def test_a_damaged_state_is_refused_by_name_and_changes_nothing(damage, message):
    net, other = plain(), plain(seed=1)
    opt, into = SGDOLFree(net.parameters()), SGDOLFree(other.parameters())
    fit(net, opt, range(3))
    fit(other, into, range(2))
    state, before = copy.deepcopy(opt.state_dict()), copy.deepcopy(into.state_dict())
    damage(state)
    with pytest.raises(ValueError, match=message):
        into.load_state_dict(state)
    assert into.diagnostics()["updates"] == 2
    for index, held in into.state_dict()["state"].items():
        assert all(torch.equal(before["state"][index][name], value) for name, value in held.items())
    fit(other, into, range(2, 4))
