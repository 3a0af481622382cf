"""torch.distributed.checkpoint: what some ranks save, any other number of ranks loads, and goes on with.

Runs of four ranks are saved after three of six steps, loaded by one and by two ranks, and finished. A run of one
process on the same microbatches, which nothing interrupts, is what all of them are compared with, in float64 to 1e-10.
"""

import copy
from typing import Any

import pytest
import torch
from checkpoints import FORMS, load, save
from ranks import on_ranks
from sharded import batches, full, model, objective
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sgdol import SGDOL
from sgdol.learners import FTRL

pytestmark = pytest.mark.filterwarnings(
    "ignore:SGDOL got one backward",  # pairs are among what is tested
    "ignore:torch.distributed is disabled, unavailable or uninitialized",  # torch's, of a single process
)

STEPS, SAVED, PARTS = 6, 3, 4
"""An odd number of steps before saving: in the middle of a pair, for runs that take pairs."""


PAIRED = "paired"
OPTIONS: dict[str, dict] = {
    "global": {},
    "neither momentum nor hindsight": {"momentum": 0.0, "learner": FTRL()},
    "tensor, momentum, averaging": {"granularity": "tensor", "momentum": 0.9, "averaging": 2},
    "group, pairs": {"granularity": "group", PAIRED: True},
    "coordinate, pairs, momentum": {"granularity": "coordinate", "momentum": 0.5, PAIRED: True},
    "rms, hindsight, pairs": {"metric": "rms", "momentum": 0.0, PAIRED: True},
}
"""With pairs, every step has one backward of the whole batch, and two steps make an update."""


def build(engine: str, name: str, seed: int = 0) -> tuple[torch.nn.Module, SGDOL]:
    net = model(seed)
    if engine == "fsdp":
        fully_shard(net[0])
        fully_shard(net)
    elif engine == "ddp":
        net = DistributedDataParallel(net)
    options = {k: v for k, v in OPTIONS[name].items() if k != PAIRED}
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    return net, SGDOL([{"params": weights, "lr": 0.05}, {"params": biases}], lr=0.1, **options)


def steps(net, opt, name: str, numbers, rank: int = 0, world: int = 1) -> None:
    """Every rank has the same number of the microbatches; where it is to have one gradient, they are one batch."""
    for step in numbers:
        mine = batches(step, PARTS)[rank::world]
        if OPTIONS[name].get(PAIRED):
            mine = [torch.cat(mine)]
        for i, x in enumerate(mine):
            last = i + 1 == len(mine)
            if isinstance(net, DistributedDataParallel):
                net.require_backward_grad_sync = last  # what no_sync sets
            (objective(net, x) / len(mine)).backward()
        opt.step()
        opt.zero_grad()


def outcome(net, opt) -> dict:
    report = opt.diagnostics()
    step_size = report.pop("step_size")
    return {
        "params": [full(p.detach()).clone() for p in net.parameters()],
        "averages": [full(opt.state[p]["average"]) for p in net.parameters() if "average" in opt.state.get(p, {})],
        "step_size": step_size,
        "report": report,
    }


def runs(engines: list[str]) -> list[tuple[str, str, str]]:
    """Every engine with every setting, in one form each but for the first setting."""
    forms = {name: ["plain"] for name in OPTIONS}
    forms["global"] = list(FORMS)
    forms["coordinate, pairs, momentum"] = ["plain", "as they are"]
    # Pairs take the mean over the ranks as one gradient under fully_shard only; under DDP every rank has its own.
    return [
        (engine, name, form)
        for engine in engines
        for name, several in forms.items()
        for form in several
        if not (engine == "ddp" and form == "as they are")  # a wrapped model has other names
        and not (OPTIONS[name].get(PAIRED) and (engine == "ddp" or (name == "group, pairs" and engine != "single")))
    ]


def everything(rank: int, world: int, folder: str, first: bool) -> dict[tuple[str, str, str], dict]:
    done = {}
    for engine, name, form in runs(["fsdp", "ddp"]):
        path = f"{folder}/{engine}-{name}-{form}".replace(" ", "")
        net, opt = build(engine, name, seed=0 if first else 1)
        if first:
            steps(net, opt, name, range(SAVED), rank, world)
            save(path, net, opt, form)
        else:
            load(path, net, opt, form)
        steps(net, opt, name, range(SAVED, STEPS), rank, world)
        done[engine, name, form] = outcome(net, opt)
    return done


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[Any, Any]:
    """The folder of what four ranks saved, and where they and two others ended."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return {"folder": folder, 4: on_ranks(everything, 4, folder, True), 2: on_ranks(everything, 2, folder, False)}


def uninterrupted(name: str) -> dict:
    net, opt = build("single", name)
    steps(net, opt, name, range(STEPS))
    return outcome(net, opt)


def assert_same(found: dict, wanted: dict, label: object) -> None:
    for key in ("params", "averages"):
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-10, atol=1e-12, msg=lambda m: f"{label}: {m}")
    assert found["step_size"] == pytest.approx(wanted["step_size"], rel=1e-10), label
    assert found["report"] == pytest.approx(wanted["report"], rel=1e-9), label


@pytest.mark.parametrize("world", [4, 2])
def test_ranks_end_where_one_process_does(ended, world):
    """Four that were not interrupted, and two that loaded what the four had saved half-way."""
    wanted = {name: uninterrupted(name) for name in OPTIONS}
    for rank in ended[world]:
        for case, found in rank.items():
            assert_same(found, wanted[case[1]], case)


@pytest.mark.parametrize(("engine", "name", "form"), runs(["fsdp", "ddp"]))
def test_one_process_goes_on_where_four_ranks_were(ended, engine, name, form):
    net, opt = build("single", name, seed=1)
    load(f"{ended['folder']}/{engine}-{name}-{form}".replace(" ", ""), net, opt, form)
    assert opt.pending == OPTIONS[name].get(PAIRED, False)
    steps(net, opt, name, range(SAVED, STEPS))
    assert_same(outcome(net, opt), uninterrupted(name), (engine, name, form))


@pytest.mark.parametrize(("engine", "name", "form"), runs(["single"]))
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_a_single_process_saves_and_loads(tmp_path, engine, name, form, fresh):
    """Into a new optimizer, and into one that has been on."""
    net, opt = build(engine, name)
    steps(net, opt, name, range(SAVED))
    save(str(tmp_path / "checkpoint"), net, opt, form)
    if fresh:
        net, opt = build(engine, name, seed=1)
    else:
        steps(net, opt, name, range(SAVED, SAVED + (2 if form == "flat" else 1)))
    load(str(tmp_path / "checkpoint"), net, opt, form)
    steps(net, opt, name, range(SAVED, STEPS))
    assert_same(outcome(net, opt), uninterrupted(name), (name, form))


def test_only_a_checkpoint_gets_what_is_not_there_yet():
    """An ordinary state dict stays small, and the zeros do not stay in memory."""
    name = "neither momentum nor hindsight"
    net, opt = build("single", name)
    steps(net, opt, name, range(2))
    assert opt.state_dict()["state"] == {}
    _, state = get_state_dict(net, opt)
    assert {key for values in state["state"].values() for key in values} == {"held_gradient"}
    assert not any(values["held_gradient"].any() for values in state["state"].values())
    steps(net, opt, name, range(2, 3))
    assert opt.state_dict()["state"] == {}
    assert not opt.state


def test_a_pair_whose_held_gradient_was_dropped_starts_anew():
    net, opt = build("single", "group, pairs")
    steps(net, opt, "group, pairs", range(1))
    state = copy.deepcopy(opt.state_dict())
    state["state"] = {}
    _, fresh = build("single", "group, pairs")
    with pytest.warns(UserWarning, match="starts anew"):
        fresh.load_state_dict(state)
    assert not fresh.pending
