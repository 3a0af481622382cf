"""torch.distributed.checkpoint: what some ranks save, any other number of ranks loads, and goes on with.

Runs of four ranks are saved half-way, loaded by four, two and one, and finished. All have four gradients a step: they
end where one process does that nothing interrupts. Only SGDOLFree in a metric under fully_shard measures on each rank
the piece that it has: four ranks end where four do, and what two load is, to the bit, what was saved.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loops import closure_of
from pairs import pairwise
from ranks import on_ranks
from sharded import batches, full, model, objective, shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from sgdol import SGDOL, SGDOLFree
from sgdol.learners import FTRL

pytestmark = pytest.mark.filterwarnings(
    "ignore:SGDOL got one backward",  # pairs are among what is tested
    "ignore:torch.distributed is disabled, unavailable or uninitialized",  # torch's, of a single process
)

PARTS = 4
FULL = StateDictOptions(full_state_dict=True)
FORMS: dict[str, dict] = {
    "plain": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "as they are": {},
}
"""Options of get_state_dict and set_state_dict; or model and optimizer are given to save and load as they are."""

OPTIONS: dict[str, dict] = {
    "global": {},
    "neither momentum nor hindsight": {"momentum": 0.0, "learner": FTRL()},
    "tensor, momentum, averaging": {"granularity": "tensor", "momentum": 0.9, "averaging": 2},
    "pairs, group": {"granularity": "group"},
    "pairs, coordinate, momentum": {"granularity": "coordinate", "momentum": 0.5},
    "pairs, rms, hindsight": {"metric": "rms", "momentum": 0.0},
    "free, euclidean": {"metric": "euclidean"},
    "free, rms": {"metric": "rms"},
    "free, kronecker": {"metric": "kronecker"},
}
"""With pairs, every step has one backward of the whole batch, and two steps make an update."""

RUNS = [
    ("neither momentum nor hindsight", "fsdp", "flat"),
    ("tensor, momentum, averaging", "fsdp", "full"),
    ("pairs, coordinate, momentum", "fsdp", "as they are"),
    ("pairs, rms, hindsight", "fsdp", "plain"),
    ("global", "ddp", "flat"),
    ("free, euclidean", "fsdp", "full"),
    ("free, euclidean", "fsdp", "as they are"),
    ("free, rms", "fsdp", "flat"),
    ("free, rms", "ddp", "plain"),
]
PIECES = ("free, rms", "fsdp", "flat")
"""Each rank measures its piece, so that other numbers of ranks end elsewhere."""


def is_free(name: str) -> bool:
    return name.startswith("free")


def ends(name: str) -> tuple[int, int]:
    """After how many steps a run is saved, pairs in the middle of one; and how many there are."""
    if name == "free, kronecker":  # its bases have followed four times
        return 8, 16
    return (5, 10) if is_free(name) else (3, 6)


def save(folder: str, net, opt, form: str) -> None:
    if form == "as they are":
        dcp.save({"model": net, "optim": opt}, checkpoint_id=folder)
    else:
        model_state, optim_state = get_state_dict(net, opt, options=StateDictOptions(**FORMS[form]))
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)


def load(folder: str, net, opt, form: str) -> None:
    if form == "as they are":
        dcp.load({"model": net, "optim": opt}, checkpoint_id=folder)
        return
    options = StateDictOptions(**FORMS[form])
    model_state, optim_state = get_state_dict(net, opt, options=options)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, opt, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)


def build(name: str, engine: str, world: int, seed: int = 0) -> tuple[torch.nn.Module, Any]:
    net, free = model(seed), is_free(name)
    if free:
        net.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    if engine == "fsdp":
        shard(net, "nested", world, {})
    elif engine == "ddp":
        net = DistributedDataParallel(net, find_unused_parameters=free)
    weights = {"params": [p for p in net.parameters() if p.dim() > 1]}
    biases = {"params": [p for p in net.parameters() if p.dim() == 1]}
    if free:
        return net, SGDOLFree([{**weights, "weight_decay": 0.1}, biases], **OPTIONS[name])
    return net, SGDOL([{**weights, "lr": 0.05}, biases], lr=0.1, **OPTIONS[name])


def steps(net, opt, name: str, numbers, rank: int = 0, world: int = 1) -> None:
    """Every rank has the same number of the microbatches; where it is to have one gradient, they are one batch."""
    for step in numbers:
        mine = batches(step, PARTS)[rank::world]
        if is_free(name):
            opt.step(closure_of(opt, lambda mine=mine: (objective(net, x) / len(mine) for x in mine)))
            continue
        if name.startswith("pairs"):
            mine = [torch.cat(mine)]
        for i, x in enumerate(mine):
            if isinstance(net, DistributedDataParallel):
                net.require_backward_grad_sync = i + 1 == len(mine)  # what no_sync sets
            (objective(net, x) / len(mine)).backward()
        opt.step()
        opt.zero_grad()


def outcome(net, opt) -> dict:
    report = opt.diagnostics()
    return {
        "params": [full(p.detach()).clone() for p in net.parameters()],
        "state": [{k: full(v).clone() for k, v in opt.state.get(p, {}).items()} for p in net.parameters()],
        "rule": opt.param_groups[0].get("rule", {}),
        "step_size": report.pop("step_size"),
        "report": report,
    }


def place(folder: str, *run: str) -> str:
    return f"{folder}/{'-'.join(run)}".replace(" ", "")


def everything(rank: int, world: int, folder: str, first: bool) -> dict[Any, tuple[dict, dict]]:
    """Where each run was when it was saved or loaded, and in the end."""
    done = {}

    def finish(net, opt, name: str) -> tuple[dict, dict]:
        middle = copy.deepcopy(outcome(net, opt))
        steps(net, opt, name, range(*ends(name)), rank, world)
        return middle, outcome(net, opt)

    for run in RUNS:
        name, engine, form = run
        net, opt = build(name, engine, world, seed=0 if first else 1)
        if first:
            steps(net, opt, name, range(ends(name)[0]), rank, world)
            save(place(folder, *run), net, opt, form)
        else:
            load(place(folder, *run), net, opt, form)
        done[run] = finish(net, opt, name)
    if first:
        net, opt = build(PIECES[0], "fsdp", world, seed=1)
        load(place(folder, *PIECES), net, opt, PIECES[2])
        done["loaded by as many"] = finish(net, opt, PIECES[0])
    net, opt = build("free, kronecker", "fsdp", world)
    if first:
        steps(net, opt, "free, kronecker", range(8), rank, world)
        torch.save(get_state_dict(net, opt, options=FULL), f"{folder}/sharded-{rank}.pt")
    else:
        model_state, optim_state = torch.load(f"{folder}/whole.pt", weights_only=True)
        set_model_state_dict(net, model_state, options=FULL)
        opt.load_state_dict(optim_state)
        done["kronecker"] = finish(net, opt, "free, kronecker")
    return done


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[Any, Any]:
    """The folder of what four ranks saved, and where they and two others ended."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    net, opt = build("free, kronecker", "single", 1)
    steps(net, opt, "free, kronecker", range(8))
    torch.save((net.state_dict(), opt.state_dict()), f"{folder}/whole.pt")
    return {"folder": folder, 4: on_ranks(everything, 4, folder, True), 2: on_ranks(everything, 2, folder, False)}


def uninterrupted(name: str) -> dict:
    net, opt = build(name, "single", 1)
    steps(net, opt, name, range(ends(name)[1]))
    return outcome(net, opt)


def assert_same(found: dict, wanted: dict, name: str) -> None:
    tolerance = 1e-9 if is_free(name) else 1e-10
    of_interest = ("momentum", "average", "metric.square") if is_free(name) else ("average",)
    torch.testing.assert_close(found["params"], wanted["params"], rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(found["state"], wanted["state"], strict=True):
        assert (mine.keys() if is_free(name) else ()) == (theirs.keys() if is_free(name) else ())
        for key in filter(theirs.__contains__, of_interest):
            torch.testing.assert_close(mine[key], theirs[key], rtol=tolerance, atol=tolerance)
    assert found["rule"] == pytest.approx(wanted["rule"], rel=1e-8)
    assert found["step_size"] == pytest.approx(wanted["step_size"], rel=10 * tolerance)
    assert found["report"] == pytest.approx(wanted["report"], rel=10 * tolerance)


@pytest.mark.parametrize("run", RUNS, ids=", ".join)
def test_ranks_end_where_one_process_does_that_nothing_interrupted(ended, run):
    """Four that saved, and two that loaded what the four had saved half-way."""
    if run == PIECES:
        for one, other in zip(ended[4], ended[4], strict=True):
            assert_same(one["loaded by as many"][1], other[run][1], run[0])
        return
    wanted = uninterrupted(run[0])
    for rank in (*ended[4], *ended[2]):
        assert_same(rank[run][1], wanted, run[0])


@pytest.mark.parametrize("run", [run for run in RUNS if is_free(run[0])], ids=", ".join)
def test_ranks_load_to_the_bit_what_four_ranks_saved(ended, run):
    saved, _ = ended[4][0][run]
    for rank in ended[2]:
        loaded, _ = rank[run]
        assert loaded["rule"] == saved["rule"]
        assert loaded["state"][1].keys() >= {"momentum", "average"}
        assert not loaded["state"][0]  # of a parameter that has never had a gradient
        for a, b in zip(loaded["params"] + loaded["state"], saved["params"] + saved["state"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(("number", "run"), list(enumerate(RUNS)))
def test_one_process_goes_on_where_four_ranks_were(ended, number, run):
    name, _, form = run
    net, opt = build(name, "single", 1, seed=1)
    if is_free(name) and number % 2:  # one that has been used
        steps(net, opt, name, range(2))
    load(place(ended["folder"], *run), net, opt, form)
    assert getattr(opt, "pending", False) == name.startswith("pairs")
    steps(net, opt, name, range(*ends(name)))
    if run == PIECES:
        assert opt.diagnostics()["updates"] == ends(name)[1]
    else:
        assert_same(outcome(net, opt), uninterrupted(name), name)


@pairwise(name=[name for name in OPTIONS if not is_free(name)], form=list(FORMS), fresh=[True, False])
def test_a_single_process_saves_and_loads(tmp_path, name, form, fresh):
    """Into a new optimizer, and into one that has been on."""
    net, opt = build(name, "single", 1)
    saved, last = ends(name)
    steps(net, opt, name, range(saved))
    save(str(tmp_path / "checkpoint"), net, opt, form)
    if fresh:
        net, opt = build(name, "single", 1, seed=1)
    else:
        steps(net, opt, name, range(saved, saved + (2 if form == "flat" else 1)))
    load(str(tmp_path / "checkpoint"), net, opt, form)
    steps(net, opt, name, range(saved, last))
    assert_same(outcome(net, opt), uninterrupted(name), name)


def test_only_a_checkpoint_gets_what_is_not_there_yet():
    """An ordinary state dict stays small, and the zeros do not stay in memory."""
    name = "neither momentum nor hindsight"
    net, opt = build(name, "single", 1)
    steps(net, opt, name, range(2))
    assert opt.state_dict()["state"] == {}
    _, state = get_state_dict(net, opt)
    assert {key for values in state["state"].values() for key in values} == {"held_gradient"}
    assert not any(values["held_gradient"].any() for values in state["state"].values())
    steps(net, opt, name, range(2, 3))
    assert opt.state_dict()["state"] == {}
    assert not opt.state


def test_a_pair_whose_held_gradient_was_dropped_starts_anew():
    net, opt = build("pairs, group", "single", 1)
    steps(net, opt, "pairs, group", range(1))
    state = copy.deepcopy(opt.state_dict())
    state["state"] = {}
    _, fresh = build("pairs, group", "single", 1)
    with pytest.warns(UserWarning, match="starts anew"):
        fresh.load_state_dict(state)
    assert not fresh.pending


MATRICES = ("0.weight", "2.weight")
"""The metric turns them; the third matrix has a single row."""


def test_one_process_measures_in_bases_what_ranks_have_measured_by_coordinates(ended):
    """Under fully_shard the Kronecker metric has squares. L and R begin as the sums over their rows and columns."""
    states = torch.load(f"{ended['folder']}/sharded-0.pt", weights_only=True)
    net, opt = build("free, kronecker", "single", 1, seed=1)
    set_state_dict(net, opt, model_state_dict=states[0], optim_state_dict=states[1], options=FULL)
    for name in MATRICES:
        held, saved = opt.state[net.get_parameter(name)], states[1]["state"][name]
        v = saved["metric.square"]
        assert "metric.square" not in held
        torch.testing.assert_close(held["metric.left"], v.sum(1).diag())
        torch.testing.assert_close(held["metric.right"], v.sum(0).diag())
        torch.testing.assert_close(held["metric.rows"], v.sum(1))
        assert held["metric.weight"] == saved["metric.weight"] > 0
    before = opt.diagnostics()
    steps(net, opt, "free, kronecker", range(8, 64))
    after = opt.diagnostics()
    assert after["updates"] == 64
    assert after["rollbacks"] == before["rollbacks"]
    assert after["loss"] < 0.5 * before["loss"]


def test_ranks_measure_by_coordinates_what_one_process_has_measured_in_bases(ended):
    _, saved = torch.load(f"{ended['folder']}/whole.pt", weights_only=True)
    loaded, finished = ended[2][1]["kronecker"]
    net, opt = build("free, kronecker", "single", 1)
    params = [p for group in opt.param_groups for p in group["params"]]
    for name, p in net.named_parameters():
        if name not in MATRICES:
            continue
        held = saved["state"][next(i for i, q in enumerate(params) if q is p)]
        kept = loaded["state"][next(i for i, q in enumerate(net.parameters()) if q is p)]
        torch.testing.assert_close(kept["metric.square"].sum(1), held["metric.left"].diagonal())
        torch.testing.assert_close(kept["metric.square"].sum(0), held["metric.right"].diagonal())
        momentum = held["metric.left_basis"] @ held["momentum"] @ held["metric.right_basis"].T
        torch.testing.assert_close(kept["momentum"], momentum)
        assert {key for key in kept if key.startswith("metric.")} == {"metric.square", "metric.weight"}
    assert finished["rule"]["mean_loss"] < loaded["rule"]["mean_loss"]


def test_being_asked_by_a_checkpoint_before_the_first_step_changes_nothing():
    found = []
    for asked in (False, True):
        net, _ = build("free, rms", "single", 1)
        with torch.no_grad():
            net[0].weight.mul_(1e3)
        opt = SGDOLFree(net.parameters())
        if asked:
            get_state_dict(net, opt)
            assert opt.state
        steps(net, opt, "free, rms", range(3))
        found.append(([p.detach() for p in net.parameters()], [list(opt.state.get(p, ())) for p in net.parameters()]))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]
