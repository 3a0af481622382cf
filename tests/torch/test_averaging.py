"""Averages of the iterates: through torch's AveragedModel as users do, and those that the optimizers keep."""

import contextlib
import gc
import math

import numpy as np
import pytest
import torch
from loops import batch, both, feed, fit, flat, net_closure, network, plain, said
from torch import nn
from torch.optim.swa_utils import AveragedModel

from sgdol import SGDOL, SGDOLFree
from sgdol.torch import averaged_weights, backward, polynomial_average, random_iterate


class Two(torch.nn.Module):
    """A matrix and a scalar, to see that all parameters are treated alike."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(2, 3, dtype=dtype))
        self.scalar = torch.nn.Parameter(torch.zeros((), dtype=dtype))

    def become(self, value: float) -> None:
        with torch.no_grad():
            self.matrix.fill_(value)
            self.scalar.fill_(-value)


def averaged(values, avg_fn, dtype: torch.dtype = torch.float64) -> AveragedModel:
    """The averaged model after iterates that are ``value`` (and its negative) everywhere."""
    model = Two(dtype)
    average = AveragedModel(model, avg_fn=avg_fn)
    for value in values:
        model.become(value)
        average.update_parameters(model)
    return average


def everything(average: AveragedModel) -> np.ndarray:
    """All entries; the scalar's sign is turned back."""
    return np.append(average.module.matrix.detach().double().numpy().ravel(), -average.module.scalar.item())


def iterates(count: int) -> list[float]:
    return np.random.default_rng(0).normal(size=count).tolist()


# Polynomial averages --------------------------------------------------------------------------------------------------


def weights_of_the_recursion(power: float, count: int) -> list[float]:
    """x_bar_t = (1 - w_t) x_bar_{t-1} + w_t x_t gives iterate t the weight w_t prod_{j>t} (1 - w_j)."""
    w = [min(1.0, (power + 1) / (t + power)) for t in range(1, count + 1)]
    return [w[t] * math.prod(1 - w_j for w_j in w[t + 1 :]) for t in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("power", [0.0, 2.5, 8.0])
def test_a_polynomial_average_is_the_weighted_mean_of_its_recursion(power, count):
    """Single precision: 20 updates of numbers of order one, each with three roundings of 6e-8."""
    values = iterates(count)
    expected = np.dot(weights_of_the_recursion(power, count), values)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 4e-6), (torch.bfloat16, 0.1)):
        average = averaged(values, polynomial_average(power), dtype)
        assert {p.dtype for p in average.module.parameters()} == {dtype}
        np.testing.assert_allclose(everything(average), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("power", [-1.0, math.inf, math.nan])
def test_a_bad_power_is_refused(power):
    with pytest.raises(ValueError, match=rf"power must be finite and at least 0, got {power}"):
        polynomial_average(power)


# The uniformly random iterate -----------------------------------------------------------------------------------------


def drawn(seed: int, count: int) -> int:
    """Which of the iterates 1, ..., count is held in the end."""
    found = everything(averaged([float(t) for t in range(1, count + 1)], random_iterate(seed)))
    assert len(set(found)) == 1, "parameters hold different iterates"
    return int(found[0])


@pytest.mark.parametrize(("count", "threshold"), [(2, 10.83), (6, 20.52)])
def test_the_held_iterate_is_uniform_at_every_moment_of_a_run(count, threshold):
    # Pearson's chi-square with 1 and 5 degrees of freedom: above this with probability 0.1 % if uniform. The seeds
    # are fixed, so it never fails by chance.
    counts = np.bincount([drawn(seed, count) for seed in range(400)], minlength=count + 1)[1:]
    assert np.sum((counts - 400 / count) ** 2 / (400 / count)) < threshold


def test_the_seed_decides_which_iterate_is_held():
    held = [drawn(seed, count=100) for seed in range(10)]
    assert held == [drawn(seed, count=100) for seed in range(10)]
    assert len(set(held)) > 5


def test_the_draw_does_not_touch_the_global_generators():
    """An average must not change the training that it watches."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn(0, count=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_resumed_draw_holds_what_an_uninterrupted_one_does():
    values = [float(t) for t in range(1, 41)]
    first = averaged(values[:17], random_iterate(2))
    model = Two()
    second = AveragedModel(model, avg_fn=random_iterate(2))
    second.load_state_dict(first.state_dict())
    for value in values[17:]:
        model.become(value)
        second.update_parameters(model)
    assert everything(second)[0] == drawn(2, count=40)


def test_the_held_iterate_does_not_move_with_the_model():
    """The function hands out a copy, not the parameter that the optimizer goes on to change."""
    current = torch.ones(3)
    held = random_iterate(0)(torch.zeros(3), current, 0)
    current.add_(1)
    assert held.tolist() == [1.0, 1.0, 1.0]


# Putting averages into the model --------------------------------------------------------------------------------------


def two_models(use_buffers=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    average = AveragedModel(model, avg_fn=polynomial_average(), use_buffers=use_buffers)
    with torch.no_grad():
        for tensor in [*average.module.parameters(), average.module[1].running_mean]:
            tensor.add_(1.0)
    return model, average


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_weights_are_there_inside_and_gone_outside_also_after_an_error(use_buffers):
    """Buffers are put in only where they are averaged."""
    model, average = two_models(use_buffers)
    before = flat(model.parameters())
    with contextlib.suppress(KeyError), averaged_weights(model, average):
        assert torch.equal(flat(model.parameters()), flat(average.module.parameters()))
        assert model[1].running_mean.tolist() == [float(use_buffers)] * 3
        raise KeyError
    assert torch.equal(flat(model.parameters()), before)
    assert model[1].running_mean.tolist() == [0.0] * 3


# Those that the optimizers keep ---------------------------------------------------------------------------------------


def averaging(make):
    """The options with which an optimizer has an average."""
    return {} if make is SGDOLFree else {"averaging": 8.0}


def trained(make, steps=12, net=None):
    net = net or network()
    opt = make(net.parameters(), **averaging(make))
    fit(net, opt, range(steps))
    return net, opt


@both
def test_the_average_is_there_inside_and_the_weights_outside_also_after_an_error(make):
    net, opt = trained(make)
    last, average = flat(net.parameters()), flat(opt.state[p]["average"] for p in net.parameters())
    assert not torch.equal(last, average)
    with contextlib.suppress(KeyError), opt.averaged():
        assert torch.equal(flat(net.parameters()), average)
        with torch.no_grad():
            net[0].weight.fill_(7.0)
        raise KeyError
    assert torch.equal(flat(net.parameters()), last)
    fit(net, opt, [12])  # and training goes on, as if nobody had looked
    other, twin = trained(make)
    fit(other, twin, [12])
    assert torch.equal(flat(net.parameters()), flat(other.parameters()))


@both
def test_nothing_but_evaluating_and_saving_is_done_inside(make):
    net, opt = trained(make, 3)
    with opt.averaged():
        with pytest.raises(RuntimeError, match=r"step\(\) inside averaged\(\)"):
            fit(net, opt, [3])
        with pytest.raises(RuntimeError, match="does not nest"), opt.averaged():
            pass
    opt.zero_grad()
    fit(net, opt, [3])


@both
def test_the_averaged_state_of_a_model_has_the_averages_and_leaves_the_model_as_it_is(make):
    net, opt = trained(make)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    saved = opt.averaged_state_dict(net)
    with opt.averaged():
        expected = {name: value.clone() for name, value in net.state_dict().items()}
        inside = opt.averaged_state_dict(net)
    assert saved.keys() == inside.keys() == before.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert all(torch.equal(inside[name], expected[name]) for name in saved)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("steps", [0, 10])
@both
def test_inference_mode_around_the_average_leaves_ordinary_tensors(make, steps):
    """The state was made or replaced inside, and the next return to the average raised."""
    net, opt = trained(make, steps, plain())
    with torch.inference_mode(), opt.averaged():
        inside = net(batch(0))
    with opt.averaged():
        assert torch.equal(inside, net(batch(0)))
    with torch.inference_mode():
        opt.averaged_state_dict(net)
    fit(net, opt, range(12 - steps))
    assert not any(v.is_inference() for held in opt.state.values() for v in held.values())
    if make is SGDOLFree:
        rollbacks = opt.diagnostics()["rollbacks"]
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(100)
        opt.moved()
        fit(net, opt, [0])  # the loss has jumped: back to the average
        assert opt.diagnostics()["rollbacks"] == rollbacks + 1


@both
def test_a_skipped_update_adds_nothing_to_the_average(make):
    net, opt = trained(make, 3, plain())
    before = flat(opt.state[p]["average"] for p in net.parameters())
    opt.step(net_closure(opt, net, batch(3) * math.nan))
    assert opt.diagnostics()["skipped"] == 1
    assert torch.equal(flat(opt.state[p]["average"] for p in net.parameters()), before)


def two_parameters(dtype=torch.float64):
    return [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones((), dtype=dtype))]


def steps(opt, params, count, seed=0):
    """So many updates with noisy gradients of ||x||^2 / 2, and the iterate after each."""
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(count):
        for _ in range(2):
            for p in params:
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
                ((p * p.detach() + p * noise).sum() / 2).backward()
        opt.step()
        opt.zero_grad()
        seen.append([p.detach().clone() for p in params])
    return seen


def test_a_parameter_that_rests_is_averaged_too():
    params = two_parameters()
    opt = SGDOL(params, lr=0.1, averaging=0)
    both = steps(opt, params, 2)
    alone = steps(opt, params[:1], 2, seed=1)
    expected = (both[0][1] + 3 * both[1][1]) / 4  # it stayed where update 2 had put it
    torch.testing.assert_close(opt.state[params[1]]["average"], expected, rtol=1e-13, atol=0)
    mean = (both[0][0] + both[1][0] + alone[0][0] + alone[1][0]) / 4
    torch.testing.assert_close(opt.state[params[0]]["average"], mean, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_half_precision_are_kept_in_single(dtype):
    params = two_parameters(dtype)
    opt = SGDOL(params, lr=0.1, averaging=0)
    seen = steps(opt, params, 40)
    mean = torch.stack([x[0].float() for x in seen]).mean(0)
    torch.testing.assert_close(opt.state[params[0]]["average"], mean, rtol=1e-5, atol=1e-6)
    with opt.averaged():
        assert torch.equal(params[0], mean.to(dtype))
        assert params[0].dtype == dtype


@pytest.mark.filterwarnings("ignore:SGDOL got one backward")
def test_complex_parameters_are_averaged_as_they_are():
    x = nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex128))
    opt = SGDOL([x], lr=0.1, averaging=0)
    seen = []
    for g in (1 + 1j, 0.5j, 2.0 + 0j, -1j):
        feed(opt, x, g, 1.5 * g)
        seen.append(x.detach().clone())
    torch.testing.assert_close(opt.state[x]["average"], torch.stack(seen).mean(0))


def test_averaged_without_averages_says_what_to_do():
    with pytest.raises(RuntimeError, match="averaging=8"), SGDOL(two_parameters(), lr=0.1).averaged():
        pass


@pytest.mark.parametrize(("steps", "asked", "sentences"), [(500, False, 1), (500, True, 0), (499, False, 0)])
def test_an_average_that_nobody_has_used_is_said_when_the_optimizer_goes(steps, asked, sentences):
    x = torch.zeros(2, requires_grad=True)
    opt = SGDOLFree([x], metric="euclidean")
    for t in range(steps):
        backward(lambda noise: (x - noise).square().mean(), torch.tensor([[t % 3], [t % 5]]) * 1.0)
        opt.step()
        opt.zero_grad()
    if asked:
        with opt.averaged():
            pass
    with said() as heard:
        del opt
        gc.collect()
    assert [f"{steps} steps, and its averaged weights" in one for one in heard] == [True] * sentences
