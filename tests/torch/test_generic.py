"""What torch.optim's own tests demand of every optimizer, of SGDOL in each of its configurations."""

import copy
from typing import Any

import pytest
import torch
from loops import one_step
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sgdol import PAPER, SGDOL
from sgdol.learners import FTRL, OnlineGradientDescent, OptimisticFTRL

pytestmark = pytest.mark.filterwarnings(
    "ignore:SGDOL was given the same gradient twice", "ignore:SGDOL got one backward"
)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {"lr": 1e-2},
    "tensor lr": {"lr": torch.tensor(1e-2)},
    "weight_decay": {"lr": 1e-2, "weight_decay": 0.1},
    "maximize": {"lr": 1e-2, "maximize": True},
    "group": {"lr": 1e-2, "granularity": "group"},
    "tensor": {"lr": 1e-2, "granularity": "tensor"},
    "coordinate": {"lr": 1e-2, "granularity": "coordinate"},
    "paper": {"lr": 1e-2, "estimator": "paper"},
    "alpha": {"lr": 1e-2, "alpha": 10.0},
    "smoothness": {"smoothness": 100.0},
    "PAPER": {"lr": 1e-2, **PAPER},
    "ftrl, no momentum": {"lr": 1e-2, "momentum": 0.0, "learner": FTRL()},
    "ftrl, paper, coordinate": {"lr": 1e-2, "learner": FTRL(), "estimator": "paper", "granularity": "coordinate"},
    "no momentum, coordinate": {"lr": 1e-2, "momentum": 0.0, "granularity": "coordinate"},
    "optimistic ftrl": {"lr": 1e-2, "learner": OptimisticFTRL(), "granularity": "tensor"},
    "gradient descent, coordinate": {"lr": 1e-2, "learner": OnlineGradientDescent(), "granularity": "coordinate"},
    "rms": {"lr": 1e-2, "metric": "rms"},
    "averaging": {"lr": 1e-2, "averaging": 8.0},
    "epoch, bias_correction": {"lr": 1e-2, "epoch": 3, "bias_correction": True},
}


def torchs_own():
    """The inputs of torch's own tests, imported when a test asks: a second, and packages such as expecttest."""
    return pytest.importorskip("torch.testing._internal.common_optimizers", exc_type=ImportError)


def schedules() -> list[list[Any]]:
    """What torch.optim.SGD is scheduled by in torch's own tests: each a list of schedulers to construct."""
    return next(info for info in torchs_own().optim_db if info.optim_cls is torch.optim.SGD).scheduler_inputs


NEWER = ("foreach", "maximize")
"""Options that a state from an older version may lack."""


@pytest.fixture(params=CONFIGURATIONS)
def options(request) -> dict[str, Any]:
    """The keyword arguments of a configuration, fresh: schedulers write to a tensor lr."""
    return copy.deepcopy(CONFIGURATIONS[request.param])


few = pytest.mark.parametrize("options", ["default", "ftrl, paper, coordinate"], indirect=True)
"""For what torch does around any optimizer: with and without a held gradient, state of groups and of tensors."""


def is_paper(options) -> bool:
    """Whether the estimator is the paper's, which takes one backward per step."""
    return options.get("estimator") == "paper"


def with_passes(names: str, *rows):
    """Every configuration with each of these rows, whose first number is k; k > 1 where the estimator takes it."""
    wanted = [
        (name, *row) for name, given in CONFIGURATIONS.items() for row in rows if row[0] == 1 or not is_paper(given)
    ]
    return pytest.mark.parametrize(("options", *names.split(", ")), wanted, indirect=["options"])


def accumulations(options) -> tuple[int, ...]:
    """How many backward passes some steps have: three updates."""
    return (1,) * 6 if is_paper(options) else (1, 1, 2, 3)


class Problem:
    """||W x + b||^2, whose gradients are noisy if asked for."""

    def __init__(self, options, *, dtype=torch.float32, named=False, noise=0.0):
        generator = torch.Generator().manual_seed(0)
        weight, bias = torch.randn(10, 5, 2, generator=generator), torch.randn(10, 2, generator=generator)
        self.params = [Parameter(x[..., 0].to(dtype).contiguous()) for x in (weight, bias)]
        self.x = torch.randn(5, generator=generator).to(dtype)
        self.noise = noise
        given = list(zip(("weight", "bias"), self.params, strict=True)) if named else self.params
        self.opt = SGDOL(given, **options)

    def loss(self) -> torch.Tensor:
        weight, bias = self.params
        return (weight.mv(self.x) + bias).square().sum()

    def backward(self, k: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(k):
            loss = self.loss()
            noise = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.params]
            (loss + self.noise * sum((p * n).sum() for p, n in zip(self.params, noise, strict=True))).div(k).backward()
        return loss

    def train(self, steps: int, k: int = 1, seed: int = 0) -> "Problem":
        for step in range(steps):
            self.opt.zero_grad()
            self.backward(k, 1000 * seed + step)
            self.opt.step()
        return self

    def stands_where(self, other: "Problem") -> None:
        for p, q in zip(self.params, other.params, strict=True):
            p.data.copy_(q.data)

    def improved(self, before: float) -> bool:
        after = self.loss().item()
        return after > before if self.opt.defaults["maximize"] else after < before


def assert_same(found: Any, expected: Any) -> None:
    """Nested containers, tensors to the last bit."""
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key in found:
            assert_same(found[key], expected[key])
    elif isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


# Schedulers -----------------------------------------------------------------------------------------------------------


def train_scheduled(problem: Problem, construct, steps: int, k: int) -> Problem:
    schedulers = [each(problem.opt) for each in construct]
    for step in range(steps):
        problem.opt.zero_grad()
        loss = problem.backward(k, step)
        problem.opt.step()
        for scheduler in schedulers:
            scheduler.step(loss.item()) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    return problem


@pytest.mark.parametrize("options", ["default", "tensor lr", "maximize", "ftrl, paper, coordinate"], indirect=True)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedulers_keep_the_right_direction(options):
    for number, construct in enumerate(schedules()):
        problem = Problem(copy.deepcopy(options))  # schedulers write to a tensor lr
        before = problem.loss().item()
        assert train_scheduled(problem, construct, 8, 1).improved(before), f"schedule {number}"


def test_a_tensor_lr_is_scheduled_as_a_float_is():
    for number, construct in enumerate(schedules()):
        found = []
        for lr in (1e-2, torch.tensor(1e-2, dtype=torch.float64)):
            problem = Problem({"lr": lr}, dtype=torch.float64, noise=1.0)
            train_scheduled(problem, construct, 10, 2)
            found.append([p.detach() for p in problem.params])
        torch.testing.assert_close(
            found[0], found[1], rtol=1e-12, atol=1e-12, msg=lambda said, number=number: f"schedule {number}: {said}"
        )


# What step() leaves alone ---------------------------------------------------------------------------------------------


def test_step_does_nothing_for_parameters_without_gradients(options):
    problem = Problem(options)
    before = copy.deepcopy([p.detach() for p in problem.params])
    frozen = torch.ones(3)
    opt = SGDOL([*problem.params, frozen], **options)
    for _ in range(2):
        assert opt.step() is None
        assert opt.step(lambda: "value") == "value"
    assert_same([p.detach() for p in problem.params], before)
    assert_same(frozen, torch.ones(3))
    assert not opt.state
    assert not opt.pending
    assert opt.diagnostics()["updates"] == 0


@with_passes("k", (1,), (2,))
def test_step_does_nothing_for_zero_gradients(options, k):
    problem = Problem({**options, "weight_decay": 0.0})
    before = copy.deepcopy([p.detach() for p in problem.params])
    for _ in range(2):
        problem.opt.zero_grad()
        for _ in range(k):
            (0 * problem.loss()).backward()
        problem.opt.step()
        assert_same([p.detach() for p in problem.params], before)
    start = problem.loss().item()
    assert problem.train(4, k).improved(start)


@with_passes("k, dtype", (1, torch.float32), (2, torch.float32), (2, torch.bfloat16))
def test_gradients_are_never_written_to(options, k, dtype):
    problem = Problem(options, dtype=dtype, noise=1.0)
    for step in range(3):
        problem.opt.zero_grad()
        problem.backward(k, step)
        grads = [p.grad for p in problem.params]
        kept = [(g._version, g.clone()) for g in grads]
        problem.opt.step()
        for p, grad, (version, value) in zip(problem.params, grads, kept, strict=True):
            assert p.grad is grad
            assert grad._version == version
            assert torch.equal(grad, value)


@few
def test_it_can_be_printed_before_and_after_a_step(options):
    problem = Problem(options)
    for text in (repr(problem.opt), repr(problem.train(1).opt), repr(problem.train(1).opt)):
        assert text.startswith("SGDOL (")
        assert "step_size" in text


def test_mistakes_that_every_optimizer_refuses_are_refused():
    theirs = torchs_own()
    for each in theirs.get_error_inputs_for_all_optims("cpu", torch.float32):
        given = each.optimizer_error_input
        given.kwargs.setdefault("lr", 1e-2)  # SGDOL has no default rate
        params = [Parameter(torch.ones(1))] if given.params is None else given.params
        assert each.error_on == theirs.OptimizerErrorEnum.CONSTRUCTION_ERROR
        if issubclass(each.error_type, Warning):
            with pytest.warns(each.error_type, match=each.error_regex):
                SGDOL(params, **given.kwargs)
        else:  # in our own words
            with pytest.raises(each.error_type):
                SGDOL(params, **given.kwargs)


# Saving and loading ---------------------------------------------------------------------------------------------------


@few
@pytest.mark.parametrize(("saved", "loaded"), [(False, True), (True, False)], ids=["to named", "from named"])
def test_states_go_between_named_and_unnamed_parameters(options, saved, loaded):
    one = Problem(options, named=saved, noise=1.0).train(3)
    other = Problem(copy.deepcopy(options), named=loaded, noise=1.0)
    other.stands_where(one)
    other.opt.load_state_dict(copy.deepcopy(one.opt.state_dict()))
    one.train(3, seed=1), other.train(3, seed=1)
    assert_same([p.detach() for p in other.params], [p.detach() for p in one.params])


@few
def test_states_that_lack_newer_options_load_and_take_those_of_the_optimizer(options):
    one, other = Problem(options, noise=1.0).train(3), Problem(copy.deepcopy(options), noise=1.0).train(3)
    state = copy.deepcopy(one.opt.state_dict())
    for group in state["param_groups"]:
        for flag in NEWER:
            del group[flag]
    one.opt.load_state_dict(state)
    for flag in NEWER:
        assert one.opt.param_groups[0][flag] == other.opt.param_groups[0][flag]
    one.train(3, seed=1), other.train(3, seed=1)
    assert_same([p.detach() for p in one.params], [p.detach() for p in other.params])


# Hooks ----------------------------------------------------------------------------------------------------------------


@few
def test_hooks_around_state_dict_are_honoured(options):
    opt = Problem(options).train(3).opt
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append(("before", o is opt)))

    def replace(o, state_dict):
        seen.append(("after", set(state_dict) == {"state", "param_groups"}))
        return {**state_dict, "added": 1}

    def write(o, state_dict):
        state_dict["added"] += 1

    opt.register_state_dict_post_hook(replace)
    opt.register_state_dict_post_hook(write)
    assert opt.state_dict()["added"] == 2
    assert seen == [("before", True), ("after", True)]


@few
@pytest.mark.parametrize("steps", [3, 4])
def test_a_hook_before_loading_may_replace_the_state(options, steps):
    """What it returns is loaded and nothing else: here the state of another optimizer."""
    ours = Problem(copy.deepcopy(options), noise=1.0)
    theirs = Problem(copy.deepcopy(options), noise=1.0).train(steps)
    wanted = Problem(copy.deepcopy(options), noise=1.0).train(steps + 2, seed=1).opt.state_dict()
    ours.opt.register_load_state_dict_pre_hook(lambda o, state: copy.deepcopy(wanted))
    ours.opt.load_state_dict(theirs.opt.state_dict())
    assert_same(ours.opt.state_dict(), wanted)


@few
def test_prepended_hooks_before_loading_run_first(options):
    opt, order = Problem(options).train(3).opt, []
    opt.register_load_state_dict_pre_hook(lambda o, state: order.append("second"))
    opt.register_load_state_dict_pre_hook(lambda o, state: order.append("first"), prepend=True)
    opt.register_load_state_dict_post_hook(lambda o: order.append("fourth"))
    opt.register_load_state_dict_post_hook(lambda o: order.append("third"), prepend=True)
    for _ in range(2):
        opt.load_state_dict(opt.state_dict())
    assert order == ["first", "second", "third", "fourth"] * 2


@few
@pytest.mark.parametrize("prepend", [False, True])
def test_a_hook_after_loading_has_the_last_word(options, prepend):
    opt = Problem(options, noise=1.0).train(3).opt
    saved = copy.deepcopy(opt.state_dict())

    def forget(o):
        for state in o.state.values():
            for value in state.values():
                value.zero_()
        o.param_groups[0]["lr"] = 0.25

    opt.register_load_state_dict_post_hook(forget, prepend=prepend)
    opt.load_state_dict(saved)
    assert opt.state
    assert not any(value.any() for state in opt.state.values() for value in state.values())
    assert opt.param_groups[0]["lr"] == 0.25


@few
def test_a_hook_before_step_may_exchange_the_closure(options):
    problem = Problem(options)
    problem.opt.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: "theirs"), kwargs))
    assert problem.opt.step(lambda: "ours") == "theirs"


# Complex parameters ---------------------------------------------------------------------------------------------------


def test_complex_parameters_equal_their_real_views(options):
    generator, dtype = torch.Generator().manual_seed(0), torch.complex128
    z = [Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in [(3, 2), (), (4,)]]
    x = [Parameter(torch.view_as_real(p.detach()).clone()) for p in z]
    one = SGDOL(z, **copy.deepcopy(options))
    other = SGDOL(x, **copy.deepcopy(options))
    for k in accumulations(options):
        for _ in range(k):
            gradients = [torch.randn(p.shape, dtype=dtype, generator=generator) for p in z]
            sum((p * g.conj()).real.sum() for p, g in zip(z, gradients, strict=True)).backward()
            sum((p * torch.view_as_real(g)).sum() for p, g in zip(x, gradients, strict=True)).backward()
        for opt in (one, other):
            opt.step()
            opt.zero_grad()
    for p, q in zip(z, x, strict=True):
        torch.testing.assert_close(torch.view_as_real(p.detach()), q.detach(), rtol=4e-15, atol=4e-15)


# torch.distributed.checkpoint -----------------------------------------------------------------------------------------


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def train_linear(net, opt, steps: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        one_step(opt, (net(torch.randn(4, 3, generator=generator)).square().mean().div(k) for _ in range(k)))


@with_passes("k, steps", (2, 0), (2, 2), (1, 3))
def test_saving_with_distributed_checkpoint_in_the_middle_of_training_does_not_disturb_it(options, k, steps):
    """It steps with zero gradients at lr = 0 if the optimizer has no state yet, to make it create some."""
    found = []
    for ask in (False, True):
        net = linear()
        opt = SGDOL(net.parameters(), **copy.deepcopy(options))
        train_linear(net, opt, steps, k, seed=1)
        if ask:
            before = copy.deepcopy((opt.diagnostics(), opt.pending, opt.param_groups[0]["lr"]))
            get_optimizer_state_dict(net, opt)
            assert repr((opt.diagnostics(), opt.pending, opt.param_groups[0]["lr"])) == repr(before)
        train_linear(net, opt, 2, k, seed=2)
        found.append([p.detach() for p in net.parameters()])
    assert_same(*found)
