"""Models that are wrapped, wrapped again or joined after the optimizer has begun: every rank is still one gradient."""

import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import connect, on_ranks
from torch.nn.parallel import DistributedDataParallel

from sgdol import SGDOL

WORLD = 2


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 1, dtype=torch.float64)


def passes(net, opt, rank: int, step: int, count: int = 2) -> None:
    """One step of so many backward passes, on data of this rank's own."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    for _ in range(count):
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        (net(x) - x.sum(1, keepdim=True)).square().mean().div(count).backward()
    opt.step()
    opt.zero_grad()


def outcome(net, opt) -> dict:
    return {"k": opt.diagnostics()["gradients"], "params": [p.detach().clone() for p in net.parameters()]}


def wrapped_late(rank: int, before) -> dict:
    """One step alone, then wrapped."""
    net = model()
    opt = SGDOL(net.parameters(), lr=0.1)
    before()
    passes(net, opt, 0, step=0)  # the same on all ranks: nothing has drifted yet
    before()
    wrapped = DistributedDataParallel(net)
    for step in range(1, 20):
        passes(wrapped, opt, rank, step)
    return outcome(net, opt)


def wrapped_again(rank: int) -> dict:
    """A second wrapper of the same module, the first one thrown away, but not collected."""
    net = model()
    opt = SGDOL(net.parameters(), lr=0.1)
    wrapped = DistributedDataParallel(net, process_group=dist.new_group([0, 1]))
    wrapped.itself = [wrapped]  # only the garbage collector takes this away
    passes(wrapped, opt, rank, 0)
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    gc.disable()
    wrapped = DistributedDataParallel(net, process_group=alone)
    gc.enable()
    passes(wrapped, opt, rank, 1)
    return outcome(net, opt)


def joined(rank: int, **options) -> dict:
    net = DistributedDataParallel(model())
    opt = SGDOL(net.parameters(), lr=0.1)
    made = 0
    try:
        with net.join(**options):
            for step in range(3 + rank):
                passes(net, opt, rank, step, count=1)
                made += 1
    except (NotImplementedError, RuntimeError) as error:
        return {"said": f"{type(error).__name__}: {error}", "made": made, **outcome(net, opt)}
    return {"said": "", "made": made, **outcome(net, opt)}


def everything(rank: int, world: int, rendezvous: str) -> dict[str, dict]:
    warnings.simplefilter("ignore")

    def begin() -> None:
        if not dist.is_initialized():
            connect(rendezvous, rank, world)

    calls = iter([lambda: None, begin])
    done = {"a step before there are ranks": wrapped_late(rank, lambda: next(calls)())}
    done["a step before the wrapper"] = wrapped_late(rank, begin)
    done["wrapped again"] = wrapped_again(rank)
    done["thrown"] = joined(rank, throw_on_early_termination=True)
    done["joined"] = joined(rank)
    return done


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    rendezvous = tmp_path_factory.mktemp("world") / "rendezvous"
    return on_ranks(everything, WORLD, str(rendezvous), connected=False)


@pytest.mark.parametrize("case", ["a step before there are ranks", "a step before the wrapper"])
def test_a_model_that_is_wrapped_after_a_step_has_every_rank_as_gradients(ranks, case):
    assert [rank[case]["k"] for rank in ranks] == [2 * WORLD] * WORLD
    for a, b in zip(ranks[0][case]["params"], ranks[1][case]["params"], strict=True):
        assert torch.equal(a, b)


def test_of_two_wrappers_the_one_that_is_in_use_counts(ranks):
    """The first averages over both ranks, the second over one: k is that of the second."""
    assert [rank["wrapped again"]["k"] for rank in ranks] == [2, 2]


def test_uneven_inputs_under_join_are_refused_before_anything_hangs(ranks):
    for rank in ranks:
        assert rank["joined"]["said"].startswith("NotImplementedError")
        assert "throw_on_early_termination=True" in rank["joined"]["said"]
        assert rank["joined"]["made"] == 0


def test_join_that_ends_at_the_first_rank_without_inputs_works(ranks):
    for rank in ranks:
        assert rank["thrown"]["said"].startswith("RuntimeError")
        assert "exhausted" in rank["thrown"]["said"]
        assert (rank["thrown"]["made"], rank["thrown"]["k"]) == (3, WORLD)
    for a, b in zip(ranks[0]["thrown"]["params"], ranks[1]["thrown"]["params"], strict=True):
        assert torch.equal(a, b)
