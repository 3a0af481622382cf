"""SGDOLFree with gradients that are clipped or scaled before the step, under autocast, compiled, and in other modes."""

import contextlib
import copy
import gc
import math
import warnings

import numpy as np
import pytest
import torch
from closures import closure_of
from pairs import pairwise
from test_free import PROBLEMS, SIZES, START, STEPS, flat, oracle_of, parameters
from torch import nn

from sgdol import SGDOL, SGDOLFree
from sgdol.reference_free import sgdol_free
from sgdol.torch import backward


def clip(params, max_norm):
    """As clip_grad_norm_, which adds 1e-6 to the norm."""
    norm = torch.linalg.vector_norm(torch.cat([p.grad.reshape(-1) for p in params]))
    if norm > max_norm:
        for p in params:
            p.grad.mul_(max_norm / norm)


def train(problem, steps, max_norm, scaler=None, **options):
    loss, params = PROBLEMS[problem](), parameters(START)
    opt = SGDOLFree(params, **options)
    iterates = [flat(params).detach().numpy().copy()]
    run = None if scaler is None else lambda value: scaler.scale(value).backward()
    for t in range(steps):

        def loss_of(parts, t=t):
            return sum(loss(flat(params), t, part) for part in parts) / len(parts)

        backward(loss_of, [0, 1], run=run)
        if scaler is not None:
            scaler.unscale_(opt)
        clip(params, max_norm)
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()
        opt.zero_grad()
        iterates.append(flat(params).detach().numpy().copy())
    with opt.averaged():
        return np.array(iterates), flat(params).detach().numpy().copy(), opt.diagnostics()


@pairwise(problem=list(PROBLEMS), max_norm=[0.1, 3.0], options=[{}, {"metric": "euclidean"}])
def test_clipping_between_backward_and_step_agrees_with_the_reference(problem, max_norm, options):
    """Curvatures are those of the gradients as they were; the step is made with the shorter ones."""
    steps = STEPS.get(problem, 60)
    oracle = oracle_of(PROBLEMS[problem](), 2)
    expected = sgdol_free(oracle, START, steps, tensors=SIZES, max_norm=max_norm, **options)
    assert expected.clipped > 0
    iterates, average, report = train(problem, steps, max_norm, **options)
    np.testing.assert_allclose(iterates, expected.iterates, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(average, expected.averages[-1], rtol=1e-11, atol=1e-12)
    for name in ("evaluations", "rejections", "rollbacks", "skipped"):
        assert report[name] == getattr(expected, name), name


@pytest.mark.parametrize("max_norm", [3.0, 1e9])
@pytest.mark.parametrize("problem", ["quadratic", "burst"])
def test_a_grad_scaler_changes_nothing(problem, max_norm):
    """Its factor doubles every third step; look-backs are measured in the units of the gradients that it divided."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    iterates, average, report = train(problem, 60, max_norm, scaler)
    expected, expected_average, expected_report = train(problem, 60, max_norm)
    assert scaler.get_scale() > 2.0**20
    np.testing.assert_allclose(iterates, expected, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(average, expected_average, rtol=1e-9, atol=1e-10)
    assert report["evaluations"] == expected_report["evaluations"] > 70


def test_a_batch_that_a_grad_scaler_skips_is_not_run_again():
    net, opt, losses = network(), None, []
    opt = SGDOLFree(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loss_fn(x):
        losses.append(x.sum().item())
        return (net(x) - x.sum(1, keepdim=True)).square().mean()

    for t in range(4):
        x = batch(t) * (torch.inf if t == 2 else 1.0)
        losses.clear()
        backward(loss_fn, x, run=lambda loss: scaler.scale(loss).backward())
        before = copy.deepcopy(net.state_dict())
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if t == 2:
            assert len(losses) == 2
            assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert opt.diagnostics()["updates"] == 3
    assert scaler.get_scale() == 2.0**9


def test_a_scaled_loss_that_loss_fn_returns_is_refused_and_the_right_line_is_shown():
    """It was taken for clipping to a thousandth: 40 steps reached an accuracy of 0.27."""
    net = network()
    opt = SGDOLFree(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    backward(lambda x: scaler.scale((net(x) - x.sum(1, keepdim=True)).square().mean()), batch(0))
    with pytest.raises(RuntimeError, match=r"run=lambda loss: scaler\.scale\(loss\)\.backward\(\)"):
        scaler.step(opt)


def test_clipping_tensor_by_tensor_is_refused():
    net = network()
    opt = SGDOLFree(net.parameters())
    backward(lambda x: (net(x) - x.sum(1, keepdim=True)).square().mean(), batch(0))
    for p in net.parameters():
        nn.utils.clip_grad_norm_([p], 1e-3)
    with pytest.raises(RuntimeError, match=r"multiplied by different factors .* clip_grad_norm_ of all parameters"):
        opt.step()


# Networks -------------------------------------------------------------------------------------------------------------


def network(dtype=torch.float32, norm=nn.Identity) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), norm(), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def batch(t: int, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(t))


def _ran(wrap, seed=0, steps=30):
    """A small network after some steps, its layer 1 wrapped; and its optimizer."""
    torch.manual_seed(seed)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)))
    opt = SGDOLFree(model.parameters())
    for _ in range(steps):
        x = torch.randn(16, 4)
        backward(lambda x, y: (model(x) - y).square().mean(), x, x.sum(1, keepdim=True))
        opt.step()
        opt.zero_grad()
    return model, opt


@pytest.mark.parametrize("compiled", ["module", "in place"])
def test_batch_norm_of_a_compiled_model_counts_each_half_once(compiled):
    """Look-backs moved the statistics: 110 batches were counted in 40 steps of two halves, and each recompiled."""

    def wrap(model):
        if compiled == "module":
            return torch.compile(model, backend="eager")
        model.compile(backend="eager")
        return model

    torch._dynamo.reset()
    plain, found = _ran(lambda model: model)[0], _ran(wrap)[0]
    statistics = dict(found.named_buffers())
    for name, value in plain.named_buffers():
        torch.testing.assert_close(
            statistics["_orig_mod." * (compiled == "module") + name], value, rtol=1e-5, atol=1e-6
        )
    assert int(plain[1].num_batches_tracked) == 60


@pytest.mark.parametrize("norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_a_buffer_that_a_forward_writes_and_reads_is_what_it_was_when_the_batch_is_run_again(norm):
    """It was refused: "does not evaluate the same batch each time". The power iteration moves once per half."""

    def model():
        torch.manual_seed(0)
        return norm(torch.nn.Linear(4, 3)), torch.randn(8, 4)

    layer, x = model()
    opt = SGDOLFree(layer.parameters(), lr=0.0)  # nothing moves but buffers
    for _ in range(5):
        backward(lambda x: layer(x).square().mean(), x)
        opt.step()
        opt.zero_grad()
    assert opt.diagnostics()["evaluations"] > 5
    plain, x = model()
    for _ in range(5):
        for half in x.chunk(2):
            plain(half)
    expected = dict(plain.named_buffers())
    assert expected
    assert all(torch.equal(value, expected[name]) for name, value in layer.named_buffers())


def test_autocast_around_the_whole_loop_does_not_use_casts_of_earlier_weights():
    """Weights are cast once within an autocast block; with a closure the run saw only the first weights."""

    def run(around):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        opt = SGDOLFree(model.parameters())
        x = torch.randn(32, 4)

        def losses():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return [(model(part) - part.sum(1, keepdim=True)).square().mean() / 2 for part in x.chunk(2)]

        with torch.autocast("cpu", dtype=torch.bfloat16) if around else contextlib.nullcontext():
            for _ in range(20):
                opt.step(closure_of(opt, losses))
        return model.weight.detach()

    assert torch.equal(run(True), run(False))


def test_the_average_of_a_layer_that_is_frozen_in_mid_run_reaches_its_weights():
    """It stayed where it was, 0.36 away. With weights of about t^8, 400 more steps leave (30/430)^9 of the distance."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    opt = SGDOLFree(model.parameters())
    for step in range(430):
        if step == 30:
            model[0].requires_grad_(False)
        x = torch.randn(16, 4)
        backward(lambda x, y: (model(x) - y).square().mean(), x, x.sum(1, keepdim=True) + torch.randn(16, 1))
        opt.step()
        opt.zero_grad()
    frozen = model[0].weight.detach().clone()
    with opt.averaged():
        torch.testing.assert_close(model[0].weight, frozen)
    assert torch.equal(model[0].weight, frozen)


@pytest.mark.parametrize(("steps", "asked", "sentences"), [(500, False, 1), (500, True, 0), (499, False, 0)])
def test_an_average_that_nobody_has_used_is_said_when_the_optimizer_goes(steps, asked, sentences):
    x = torch.zeros(2, requires_grad=True)
    opt = SGDOLFree([x])
    for t in range(steps):
        backward(lambda noise: (x - noise).square().mean(), torch.tensor([[t % 3], [t % 5]]) * 1.0)
        opt.step()
        opt.zero_grad()
    if asked:
        with opt.averaged():
            pass
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del opt
        gc.collect()
    assert [f"{steps} steps, and its averaged weights" in str(one.message) for one in said] == [True] * sentences


@pytest.mark.parametrize("steps", [0, 10])
def test_inference_mode_around_the_average_leaves_ordinary_tensors(steps):
    """The state was made or replaced inside, and the next return to the average raised."""
    net = network()
    opt = SGDOLFree(net.parameters())

    def train(count):
        for t in range(count):
            backward(lambda x: (net(x) - x.sum(1, keepdim=True)).square().mean(), batch(t))
            opt.step()
            opt.zero_grad()

    train(steps)
    with torch.inference_mode(), opt.averaged():
        inside = net(batch(0))
    with opt.averaged():
        assert torch.equal(inside, net(batch(0)))
    with torch.inference_mode():
        opt.averaged_state_dict(net)
    train(12 - steps)
    rollbacks = opt.diagnostics()["rollbacks"]
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(100)
    opt.moved()
    train(1)  # the loss has jumped: back to the average
    assert opt.diagnostics()["rollbacks"] == rollbacks + 1
    assert not any(v.is_inference() for held in opt.state.values() for v in held.values())


def test_the_same_samples_in_both_halves_are_said_once():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    opt = SGDOLFree(model.parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(12):
            x = torch.randn(8, 4).repeat(2, 1)
            backward(lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), x)
            opt.step()
            opt.zero_grad()
    assert ["the halves of the batch are the same samples" in str(one.message) for one in said] == [True]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("state"), r"must be what SGDOLFree.state_dict\(\) returned, got \['param_groups'\]"),
        (lambda state: state["state"][0].pop("average"), "damaged: parameter 0 has no tensor average"),
        (lambda state: state["state"][1].update(previous=3), "damaged: parameter 1 has no tensor previous"),
        (lambda state: state.update(state=[1]), "damaged: its state is not a dict of dicts"),
        (lambda state: state["param_groups"][0].pop("lr"), "damaged: its group 0 has no lr"),
        (lambda state: state["param_groups"][0]["rule"].update(smoothness=math.nan), "smoothness in the rule"),
        (lambda state: state["param_groups"][0]["rule"].update(smoothness="a"), "smoothness in the rule"),
        (lambda state: state["param_groups"][0]["rule"].update(bogus=1), "unknown entry 'bogus'"),
    ],
)
def test_a_damaged_state_is_refused_by_name_and_changes_nothing(damage, message):
    _, opt = _ran(lambda model: model, steps=3)
    state = copy.deepcopy(opt.state_dict())
    damage(state)
    _, other = _ran(lambda model: model, seed=1, steps=2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert other.diagnostics()["updates"] == 2
    assert all(
        torch.equal(before["state"][i]["average"], held["average"]) for i, held in other.state_dict()["state"].items()
    )


@pytest.mark.parametrize(
    ("optimizer", "option", "largest"),
    [(SGDOL, "lr", 200), (SGDOL, "weight_decay", 30), (SGDOLFree, "lr", 30), (SGDOLFree, "weight_decay", 30)],
)
def test_a_number_that_leaves_the_range_is_refused(optimizer, option, largest):
    """1e308 made all weights nan in the first update."""
    for value in (1e308, 10.0 ** (largest + 1)):
        with pytest.raises(ValueError, match=rf"^{option} must be .* at most 1e\+{largest}"):
            optimizer(torch.nn.Linear(1, 1).parameters(), **{"lr": 0.1, option: value})
