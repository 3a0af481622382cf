"""SGDOLFree(state_dtype=torch.bfloat16): what is kept, how it is rounded, and that all else goes on as before."""

import copy
import functools
import pickle

import free_problems
import pytest
import torch
import torch.distributed.checkpoint as dcp
from loops import batch, closure_of, fit, flat, network, plain, through_a_file
from pairs import pairwise
from ranks import on_ranks
from sharded import batches, full, model, objective, shard
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from sgdol import SGDOLFree
from sgdol.torch._rounding import rounded

Narrow = functools.partial(SGDOLFree, state_dtype=torch.bfloat16)
metrics = pytest.mark.parametrize("metric", ["rms", "kronecker", "euclidean"])


# Rounding -------------------------------------------------------------------------------------------------------------


def test_rounding_gives_a_neighbour_and_is_right_on_average():
    """Within five standard errors of a mean over 2,000 draws, for each of 400 numbers of all sizes and both signs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, generator=generator) * 10.0 ** torch.randint(-30, 30, (400,), generator=generator)
    draws = torch.stack([rounded(x, seed).double() for seed in range(2000)])
    below, above = (torch.sort(draws, dim=0).values[i] for i in (0, -1))
    spacing = 2.0 ** (torch.frexp(x.double()).exponent - 8)
    assert ((below <= x) & (x <= above) & (above - below <= spacing)).all()
    assert (draws.mean(0) - x).abs().le(5 * spacing / 2 / 2000**0.5).all()  # a draw deviates by at most spacing/2


@pytest.mark.parametrize("size", [1, 3, 4096, 4097, 70_000])
def test_numbers_of_bfloat16_stay_and_others_come_near(size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert torch.equal(rounded(x.bfloat16().float(), seed=1), x.bfloat16())
    assert ((rounded(x, seed=1).float() - x).abs() < x.abs() * 2**-7).all()
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    torch.testing.assert_close(rounded(special, seed=1).float(), special, equal_nan=True)


def test_errors_of_different_numbers_do_not_add_up():
    """The sum over many equal numbers deviates as a sum of independent errors does, though few numbers are drawn."""
    size, draws = 1 << 16, 400
    x = torch.full((size,), 1 + 2**-9)  # a quarter of the way from 1 to the next number
    errors = torch.stack([(rounded(x, seed).double() - x).sum() for seed in range(draws)]) * 2**7
    expected = (size * 0.25 * 0.75) ** 0.5
    assert abs(errors.mean()) < 5 * expected / draws**0.5
    assert abs(errors.std() / expected - 1) < 5 / (2 * draws) ** 0.5


# What is kept ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "wide", "narrow"), [("rms", 16, 10), ("euclidean", 12, 8), ("kronecker", 28, 24)])
def test_bytes_of_the_state_per_parameter(metric, wide, narrow):
    """Of one large and several small tensors; a square matrix has four factors of its size in "kronecker"."""
    for make, expected in ((SGDOLFree, wide), (Narrow, narrow)):
        net = torch.nn.Sequential(torch.nn.Linear(160, 160, bias=False), torch.nn.Linear(160, 2), torch.nn.Linear(2, 1))
        opt = make(net[:1].parameters() if metric == "kronecker" else net.parameters(), metric=metric)
        for t in range(3):
            x = torch.randn(8, 160, generator=torch.Generator().manual_seed(t))
            opt.step(closure_of(opt, lambda net=net, x=x: (net(part).square().mean() / 2 for part in x.chunk(2))))
        kept = sum(v.nbytes for state in opt.state.values() for v in state.values() if v.dim())
        count = sum(p.numel() for p in opt.state)
        assert kept == pytest.approx(expected * count, rel=0.01 if metric == "kronecker" else 0)


@metrics
def test_the_last_step_is_kept_to_the_precision_of_bfloat16(metric):
    net = plain(torch.float32)
    opt = Narrow(net.parameters(), metric=metric)
    for t in range(12):
        before, rejected = [p.detach().clone() for p in net.parameters()], opt.diagnostics()["rejections"]
        fit(net, opt, [t])
        if opt.diagnostics()["rejections"] > rejected:  # the step started from somewhere else
            continue
        for p, x in zip(net.parameters(), before, strict=True):
            kept = opt.state[p]["last_step"]
            assert kept.dtype == torch.bfloat16
            torch.testing.assert_close(kept.float(), p.detach() - x, rtol=2**-7, atol=0)


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a quality of long runs; how numbers are rounded and kept is tested above
@pytest.mark.parametrize("metric", ["rms", "kronecker"])
def test_a_small_network_trains_as_well_as_in_float32(metric):
    """The loss of the average over the last 20 of 300 batches, mean of three seeds: within 10 per cent."""
    ends = []
    for make in (SGDOLFree, Narrow):
        losses = []
        for seed in range(3):
            net = plain(torch.float32, seed)
            opt = make(net.parameters(), metric=metric)
            fit(net, opt, range(1000 * seed, 1000 * seed + 300))
            with opt.averaged(), torch.no_grad():
                x = torch.cat([batch(t, dtype=torch.float32) for t in range(5000, 5100)])
                losses.append((net(x) - x.sum(1, keepdim=True).sin()).square().mean())
        ends.append(torch.stack(losses).mean().item())
    assert ends[1] < 1.1 * ends[0]


def test_rejected_steps_and_returns_to_the_average_work():
    """As many as with a state in float64, where rounding does not decide: not on the ledge, where it grows."""
    counts = []
    for options in ({}, {"state_dtype": torch.bfloat16}):
        reports = [
            free_problems.train(problem, 60, metric="rms", **options).opt.diagnostics()
            for problem in ("cliff", "burst", "outlier")
        ]
        counts.append([sum(report[name] for report in reports) for name in ("rejections", "rollbacks")])
    assert all(count > 0 for count in counts[1])
    assert counts[0] == counts[1]


# Resuming -------------------------------------------------------------------------------------------------------------


@pairwise(
    metric=["rms", "kronecker", "euclidean"],
    way=["state_dict", "deepcopy", "pickle"],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    stop=[0, 1, 7],
)
def test_resuming_is_exact(metric, way, dtype, stop):
    net = network(dtype)
    opt = Narrow(net.parameters(), metric=metric)
    fit(net, opt, range(stop))
    if way == "state_dict":
        twin = network(dtype, seed=5)
        resumed = Narrow(twin.parameters(), metric=metric)
        for into, saved in zip((twin, resumed), through_a_file((net.state_dict(), opt.state_dict())), strict=True):
            into.load_state_dict(saved)
    else:
        twin, resumed = copy.deepcopy((net, opt)) if way == "deepcopy" else pickle.loads(pickle.dumps((net, opt)))
    for each, by in ((net, opt), (twin, resumed)):
        fit(each, by, range(stop, stop + 6))
    assert torch.equal(flat(net.parameters()), flat(twin.parameters()))
    states = zip(opt.state.values(), resumed.state.values(), strict=True)
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for a, b in states for name in a)


def test_the_random_numbers_of_the_program_are_its_own():
    runs = []
    for make in (SGDOLFree, Narrow):
        torch.manual_seed(1)
        net = plain(torch.float32)
        opt = make(net.parameters())
        for t in range(6):
            opt.step(
                closure_of(opt, lambda net=net, t=t: (net(x).square().mean() / 2 for x in batch(t).float().chunk(2)))
            )
        runs.append(torch.get_rng_state())
    assert torch.equal(*runs)


@metrics
@pytest.mark.parametrize("make", [SGDOLFree, Narrow], ids=["to float32", "to bfloat16"])
def test_a_state_of_the_other_type_is_converted(metric, make):
    """The type belongs to the program that runs, not to what it has learned."""
    net = plain(torch.float32)
    saver = Narrow if make is SGDOLFree else SGDOLFree
    opt = saver(net.parameters(), metric=metric)
    fit(net, opt, range(8))
    twin = copy.deepcopy(net)
    other = make(twin.parameters(), metric=metric)
    other.load_state_dict(through_a_file(opt.state_dict()))
    assert other.param_groups[0]["state_dtype"] == other.defaults["state_dtype"]
    for each, by in ((net, opt), (twin, other)):
        fit(each, by, [8])
    wanted = torch.float32 if make is SGDOLFree else torch.bfloat16
    assert all(state["momentum"].dtype == state["last_step"].dtype == wanted for state in other.state.values())
    steps = [flat(state["last_step"].float() for state in each.state.values()) for each in (opt, other)]
    assert (steps[0] - steps[1]).norm() < 0.02 * steps[0].norm()


def test_another_type_and_groups_that_differ_are_refused():
    for wrong in (torch.float16, torch.float32, "bfloat16"):
        with pytest.raises(ValueError, match=r"state_dtype must be None, for .*, or torch\.bfloat16, got"):
            SGDOLFree(plain().parameters(), state_dtype=wrong)
    first, second = ({"params": list(plain().parameters())} for _ in range(2))
    with pytest.raises(ValueError, match="state_dtype is the same for all parameter groups"):
        SGDOLFree([first, {**second, "state_dtype": torch.bfloat16}])


# Ranks ----------------------------------------------------------------------------------------------------------------

ENGINES = {
    2: {"ddp": "kronecker", "nested": "rms", "tensor parallel": "kronecker"},
    4: {"hybrid": "rms", "both": "rms"},
}


def build(engine: str, world: int, metric: str):
    net = model(dtype=torch.float32)
    net = DistributedDataParallel(net) if engine == "ddp" else shard(net, engine, world, {})
    return net, Narrow(net.parameters(), metric=metric)


def train(net, opt, rank: int, world: int, numbers) -> None:
    for t in numbers:
        parts = [x.float() for x in batches(t, 2 * world)]
        # Where ranks have pieces of one computation they have the same batch.
        mine = parts[rank::world] if opt.alone else parts
        opt.step(closure_of(opt, lambda mine=mine: (objective(net, x) / len(mine) for x in mine)))


def run(rank: int, world: int, folder: str) -> dict[str, dict]:
    found = {}
    for engine, metric in ENGINES[world].items():
        net, opt = build(engine, world, metric)
        opt.alone = engine in ("ddp", "nested", "hybrid")
        train(net, opt, rank, world, range(4))
        place = f"{folder}/{engine.replace(' ', '')}"
        saved = dict(zip(("model", "optim"), get_state_dict(net, opt), strict=True))
        dcp.save(saved, checkpoint_id=place)
        twin, resumed = build(engine, world, metric)
        resumed.alone = opt.alone
        state = dict(zip(("model", "optim"), get_state_dict(twin, resumed), strict=True))
        dcp.load(state, checkpoint_id=place)
        set_state_dict(twin, resumed, model_state_dict=state["model"], optim_state_dict=state["optim"])
        for each, by in ((net, opt), (twin, resumed)):
            train(each, by, rank, world, range(4, 8))
        found[engine] = {
            "params": [full(p.detach()) for p in net.parameters()],
            "resumed": [full(p.detach()) for p in twin.parameters()],
            "state": [full(opt.state[p]["momentum"]) for p in net.parameters()],
            "report": opt.diagnostics(),
        }
    return found


@pytest.mark.parametrize("world", list(ENGINES))
def test_ranks_have_the_same_bits_and_resume_with_them(world, tmp_path):
    """Replicas of a parameter are rounded alike on all ranks, also beside others of which ranks have pieces."""
    first, *others = on_ranks(run, world, str(tmp_path))
    for engine, found in first.items():
        assert all(torch.equal(a, b) for a, b in zip(found["params"], found["resumed"], strict=True)), engine
        assert all(momentum.dtype == torch.bfloat16 for momentum in found["state"]), engine
        for other in others:
            assert other[engine]["report"] == found["report"], engine
            for name in ("params", "state"):
                assert all(torch.equal(a, b) for a, b in zip(found[name], other[engine][name], strict=True)), engine
