"""Averages of the iterates, through torch's AveragedModel as users do."""

import math

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from sgdol import SGDOL
from sgdol.torch import averaged_weights, backward, polynomial_average, random_iterate

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # pairs are among what is tested


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
    return np.append(average.module.matrix.detach().numpy().ravel(), -average.module.scalar.item())


def iterates(count: int) -> list[float]:
    return np.random.default_rng(0).normal(size=count).tolist()


# Polynomial averages --------------------------------------------------------------------------------------------------


def weights_of_the_recursion(power: float, count: int) -> list[float]:
    """x_bar_t = (1 - w_t) x_bar_{t-1} + w_t x_t gives iterate t the weight w_t prod_{j>t} (1 - w_j)."""
    w = [min(1.0, (power + 1) / (t + power)) for t in range(1, count + 1)]
    return [w[t] * math.prod(1 - w_j for w_j in w[t + 1 :]) for t in range(count)]


@pytest.mark.parametrize("count", [2, 3, 20])
@pytest.mark.parametrize("power", [1.0, 2.5, 8.0])
def test_a_polynomial_average_is_the_weighted_mean_of_its_recursion(power, count):
    values = iterates(count)
    expected = np.dot(weights_of_the_recursion(power, count), values)
    np.testing.assert_allclose(everything(averaged(values, polynomial_average(power))), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("power", [0.0, 1.0, 2.5, 8.0])
def test_a_polynomial_average_is_the_weighted_mean_in_single_precision(power, count):
    values = iterates(count)
    expected = np.dot(weights_of_the_recursion(power, count), values)
    found = everything(averaged(values, polynomial_average(power), torch.float32))
    # 20 updates of numbers of order one, each with three roundings of 6e-8.
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("power", [0, 1, 2, 5])
def test_the_weights_of_an_integer_power_are_rising_factorials(power):
    """Iterate t has a weight in proportion to t (t + 1) ... (t + a - 1), which is about t^a."""
    count = 12
    rising = [math.prod(range(t, t + power)) for t in range(1, count + 1)]
    expected = np.array(rising) / sum(rising)
    np.testing.assert_allclose(weights_of_the_recursion(power, count), expected, rtol=1e-13)
    for t in range(count):  # the weight that iterate t really gets
        unit = [float(t == j) for j in range(count)]
        found = everything(averaged(unit, polynomial_average(power)))
        np.testing.assert_allclose(found, expected[t], rtol=1e-13)


@pytest.mark.parametrize("power", [0.0, 8.0])
def test_the_average_of_equal_iterates_is_that_iterate(power):
    np.testing.assert_array_equal(everything(averaged([0.3] * 50, polynomial_average(power))), 0.3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_averages_keep_the_type_of_the_parameters(dtype):
    average = averaged(iterates(3), polynomial_average(2), dtype)
    assert {p.dtype for p in average.module.parameters()} == {dtype}


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


@pytest.mark.parametrize("seed", range(10))
def test_all_parameters_hold_the_same_iterate(seed):
    drawn(seed, count=15)


def test_the_held_iterate_is_one_of_those_seen():
    values = iterates(10)
    assert everything(averaged(values, random_iterate(3)))[0] in values


def test_the_first_iterate_is_held_when_it_is_the_only_one():
    assert {drawn(seed, count=1) for seed in range(20)} == {1}


@pytest.mark.parametrize(("count", "threshold"), [(2, 10.83), (4, 16.27), (6, 20.52)])
def test_the_held_iterate_is_uniform_at_every_moment_of_a_run(count, threshold):
    # Pearson's chi-square with 1, 3 and 5 degrees of freedom: above this with probability 0.1 % if uniform. The seeds
    # are fixed, so it never fails by chance.
    counts = np.bincount([drawn(seed, count) for seed in range(400)], minlength=count + 1)[1:]
    assert np.sum((counts - 400 / count) ** 2 / (400 / count)) < threshold


def test_the_same_seed_holds_the_same_iterate():
    assert [drawn(seed, count=30) for seed in range(5)] == [drawn(seed, count=30) for seed in range(5)]


def test_different_seeds_hold_different_iterates():
    assert len({drawn(seed, count=100) for seed in range(10)}) > 5


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


def test_averaged_weights_are_there_inside_and_gone_outside():
    model, average = two_models()
    before = [p.detach().clone() for p in model.parameters()]
    with averaged_weights(model, average):
        assert all(torch.equal(p, q + 1) for p, q in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_averaged_weights_are_taken_out_again_after_an_error():
    model, average = two_models()
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="evaluation"), averaged_weights(model, average):
        raise RuntimeError("evaluation")
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_buffers_are_put_in_only_where_they_are_averaged(use_buffers):
    model, average = two_models(use_buffers)
    with averaged_weights(model, average):
        assert model[1].running_mean.tolist() == ([1.0] * 3 if use_buffers else [0.0] * 3)
    assert model[1].running_mean.tolist() == [0.0] * 3


def test_training_goes_on_as_if_nothing_had_been_put_in():
    def trained(look: bool) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.nn.Linear(2, 1)
        average = AveragedModel(x, avg_fn=polynomial_average())
        opt = SGDOL(x.parameters(), lr=0.1)
        for _ in range(6):
            (x(torch.randn(4, 2)) - 1).square().mean().backward()
            if look:
                with averaged_weights(x, average):
                    x(torch.ones(1, 2))
            opt.step()
            opt.zero_grad()
            average.update_parameters(x)
        return x.weight.detach()

    assert torch.equal(trained(True), trained(False))


# SGDOL(averaging=...) -------------------------------------------------------------------------------------------------


def two_parameters(dtype=torch.float64):
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype)), torch.nn.Parameter(torch.ones((), dtype=dtype))]


def steps(opt, params, count, seed=0):
    """So many updates with noisy gradients of ||x||^2 / 2, and the iterate after each."""
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(count):
        for _ in range(2):
            for p in params:
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                ((p * p.detach() + p * noise.to(p.dtype)).sum().real / 2).backward()
        opt.step()
        opt.zero_grad()
        seen.append([p.detach().clone() for p in params])
    return seen


def test_an_update_that_is_skipped_adds_nothing_to_the_average():
    params = two_parameters()
    opt = SGDOL(params, lr=0.1, averaging=8)
    steps(opt, params, 3)
    before = [opt.state[p]["average"].clone() for p in params]
    for g in (math.nan, 1.0):
        for p in params:
            (p * g).sum().backward()
    opt.step()
    assert opt.diagnostics()["skipped"] == 1
    assert all(torch.equal(opt.state[p]["average"], b) for p, b in zip(params, before, strict=True))


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


def test_complex_parameters_are_averaged_as_they_are():
    params = [torch.nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex128))]
    opt = SGDOL(params, lr=0.1, averaging=0)
    seen = []
    for g in (1 + 1j, 0.5j, 2.0 + 0j, -1j):
        for scale in (1.0, 1.5):
            params[0].grad = torch.tensor([g * scale], dtype=torch.complex128)
            opt.step()
        seen.append(params[0].detach().clone())
    torch.testing.assert_close(opt.state[params[0]]["average"], torch.stack(seen).mean(0))


def test_what_is_done_inside_is_undone_also_after_an_error():
    params = two_parameters()
    opt = SGDOL(params, lr=0.1, averaging=8)
    steps(opt, params, 2)
    last = [p.detach().clone() for p in params]

    def fail():
        with opt.averaged():
            with torch.no_grad():
                params[0].fill_(7.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(p, x) for p, x in zip(params, last, strict=True))
    steps(opt, params, 1)  # and training goes on


def test_training_inside_is_refused():
    params = two_parameters()
    opt = SGDOL(params, lr=0.1, averaging=8)
    with opt.averaged(), pytest.raises(RuntimeError, match=r"step\(\) inside averaged\(\)"):
        opt.step()


def test_nesting_is_refused():
    params = two_parameters()
    opt = SGDOL(params, lr=0.1, averaging=8)
    with opt.averaged(), pytest.raises(RuntimeError, match="does not nest"), opt.averaged():
        pass


def test_averaged_without_averages_says_what_to_do():
    with pytest.raises(RuntimeError, match="averaging=8"), SGDOL(two_parameters(), lr=0.1).averaged():
        pass


def test_before_the_first_update_the_average_is_the_weights():
    params = two_parameters()
    with SGDOL(params, lr=0.1, averaging=8).averaged():
        assert torch.equal(params[0], torch.ones(3).double())


def test_the_averaged_state_of_a_model_has_the_averages_and_leaves_the_model_as_it_is():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    opt = SGDOL(model.parameters(), lr=0.1, averaging=0)
    for _ in range(3):
        backward(lambda x: (model(x) * x[:, :2]).mean(), torch.randn(8, 3))
        opt.step()
        opt.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saved = opt.averaged_state_dict(model)
    with opt.averaged():
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert not torch.equal(saved["0.weight"], before["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
