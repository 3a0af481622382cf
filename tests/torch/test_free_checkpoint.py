"""SGDOLFree in torch.distributed.checkpoint: what some ranks save, any other number of ranks loads, and goes on with.

Runs of four ranks are saved half-way, loaded by four, two and one, and finished. All have four gradients a step.
Where squares are those of whole gradients they end where one process does. In a metric under fully_shard each rank
measures the piece that it has: four ranks end where four do, and what two ranks load is, to the bit, what was saved.
"""

import copy
from typing import Any

import pytest
import torch
from checkpoints import FORMS, load, save
from closures import closure_of
from ranks import on_ranks
from sharded import batches, full, model, objective, shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from sgdol import SGDOLFree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

STEPS, SAVED, PARTS = 16, 8, 4
FULL = StateDictOptions(full_state_dict=True)

RUNS = [
    *(("fsdp", "euclidean", form) for form in FORMS),
    ("fsdp", "rms", "flat"),
    ("ddp", "rms", "plain"),
]


def is_by_pieces(run: tuple[str, ...]) -> bool:
    """Whether each rank measures its piece, so that other numbers of ranks end elsewhere."""
    return run[:2] == ("fsdp", "rms")


def build(engine: str, metric: str, world: int, seed: int = 0) -> tuple[torch.nn.Module, SGDOLFree]:
    net = model(seed)
    net.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    if engine == "fsdp":
        shard(net, "nested", world, {})
    elif engine == "ddp":
        net = DistributedDataParallel(net, find_unused_parameters=True)
    biases = [p for p in net.parameters() if p.dim() == 1]
    weights = [p for p in net.parameters() if p.dim() > 1]
    return net, SGDOLFree([{"params": weights, "weight_decay": 0.1}, {"params": biases}], metric=metric)


def steps(net, opt, numbers, rank: int = 0, world: int = 1) -> None:
    for step in numbers:
        mine = batches(step, PARTS)[rank::world]
        opt.step(closure_of(opt, lambda mine=mine: (objective(net, x) / len(mine) for x in mine)))


def outcome(net, opt) -> dict:
    report = opt.diagnostics()
    return {
        "params": [full(p.detach()).clone() for p in net.parameters()],
        "state": [{k: full(v).clone() for k, v in opt.state.get(p, {}).items()} for p in net.parameters()],
        "rule": opt.param_groups[0]["rule"],
        "counts": [report[name] for name in ("updates", "evaluations", "rejections", "rollbacks", "gradients")],
    }


def place(folder: str, *run: str) -> str:
    return f"{folder}/{'-'.join(run)}".replace(" ", "")


def everything(rank: int, world: int, folder: str, first: bool) -> dict[tuple[str, ...], tuple[dict, dict]]:
    done = {}
    for run in RUNS if first or world < 4 else filter(is_by_pieces, RUNS):
        net, opt = build(*run[:2], world, seed=0 if first else 1)
        if first:
            steps(net, opt, range(SAVED), rank, world)
            save(place(folder, *run), net, opt, run[2])
        else:
            load(place(folder, *run), net, opt, run[2])
        middle = copy.deepcopy(outcome(net, opt))
        steps(net, opt, range(SAVED, STEPS), rank, world)
        done[run] = middle, outcome(net, opt)
    net, opt = build("fsdp", "kronecker", world)
    if first:
        steps(net, opt, range(SAVED), rank, world)
        states = get_state_dict(net, opt, options=FULL)
        torch.save(states, f"{folder}/sharded-{rank}.pt")
    else:
        model_state, optim_state = torch.load(f"{folder}/whole.pt", weights_only=True)
        set_model_state_dict(net, model_state, options=FULL)
        opt.load_state_dict(optim_state)
    middle = copy.deepcopy(outcome(net, opt))
    steps(net, opt, range(SAVED, STEPS), rank, world)
    done["kronecker"] = middle, outcome(net, opt)
    return done


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[Any, Any]:
    """The folder of what four ranks saved; where they were then and ended, and four and two others that loaded it."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    net, opt = build("single", "kronecker", 1)
    steps(net, opt, range(SAVED))
    torch.save((net.state_dict(), opt.state_dict()), f"{folder}/whole.pt")
    saved = on_ranks(everything, 4, folder, True)
    return {"folder": folder, "saved": saved, **{n: on_ranks(everything, n, folder, False) for n in (4, 2)}}


def assert_close(found: dict, wanted: dict) -> None:
    assert found["counts"] == wanted["counts"]
    for mine, theirs in zip(found["params"], wanted["params"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    for mine, theirs in zip(found["state"], wanted["state"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    assert found["rule"] == pytest.approx(wanted["rule"], rel=1e-8)


def uninterrupted(metric: str) -> dict:
    net, opt = build("single", metric, 1)
    steps(net, opt, range(STEPS))
    return outcome(net, opt)


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_ranks_load_to_the_bit_what_four_ranks_saved(ended, run):
    saved, _ = ended["saved"][0][run]
    for rank in ended[2]:
        loaded, _ = rank[run]
        assert loaded["rule"] == saved["rule"]
        assert loaded["state"][1].keys() >= {"momentum", "average"}
        assert not loaded["state"][0]  # of a parameter that has never had a gradient
        for a, b in zip(loaded["params"] + loaded["state"], saved["params"] + saved["state"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_ranks_end_where_those_do_that_nobody_interrupted(ended, run):
    _, wanted = ended["saved"][0][run]
    assert wanted["counts"][0] == STEPS
    assert wanted["counts"][4] == PARTS
    if is_by_pieces(run):
        for rank in ended[4]:
            assert_close(rank[run][1], wanted)
    else:
        assert_close(wanted, uninterrupted(run[1]))
        assert_close(ended[2][0][run][1], wanted)


@pytest.mark.parametrize(("run", "used"), [(run, i % 2 == 0) for i, run in enumerate(RUNS)])
def test_one_process_goes_on_where_four_ranks_were(ended, run, used):
    net, opt = build("single", run[1], 1, seed=1)
    if used:
        steps(net, opt, range(2))
    load(place(ended["folder"], *run), net, opt, run[2])
    steps(net, opt, range(SAVED, STEPS))
    if not is_by_pieces(run):
        assert_close(outcome(net, opt), uninterrupted(run[1]))
    assert opt.diagnostics()["updates"] == STEPS


MATRICES = ("0.weight", "2.weight")
"""The metric turns them; the third matrix has a single row."""


def test_one_process_measures_in_bases_what_ranks_have_measured_by_coordinates(ended):
    """Under fully_shard the Kronecker metric has squares. L and R begin as the sums over their rows and columns."""
    states = torch.load(f"{ended['folder']}/sharded-0.pt", weights_only=True)
    net, opt = build("single", "kronecker", 1, seed=1)
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
    steps(net, opt, range(SAVED, 4 * STEPS))
    after = opt.diagnostics()
    assert after["updates"] == 4 * STEPS
    assert after["rollbacks"] == before["rollbacks"]
    assert after["loss"] < 0.5 * before["loss"]


def test_ranks_measure_by_coordinates_what_one_process_has_measured_in_bases(ended):
    _, saved = torch.load(f"{ended['folder']}/whole.pt", weights_only=True)
    loaded, finished = ended[2][1]["kronecker"]
    net, opt = build("single", "kronecker", 1)
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
    net, opt = build("single", "rms", 1)
    with torch.no_grad():
        net[0].weight.mul_(1e3)
    copies = copy.deepcopy(net)
    other = SGDOLFree(copies.parameters())
    opt = SGDOLFree(net.parameters())
    get_state_dict(net, opt)
    assert opt.state
    steps(net, opt, range(3))
    steps(copies, other, range(3))
    for p, q in zip(net.parameters(), copies.parameters(), strict=True):
        assert torch.equal(p, q)
        assert opt.state.get(p, {}).keys() == other.state.get(q, {}).keys()
