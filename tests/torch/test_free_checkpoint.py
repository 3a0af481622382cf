"""SGDOLFree in torch.distributed.checkpoint: what some ranks save, any other number of ranks loads, and goes on with.

Runs of four ranks are saved half-way, loaded by four, two and one, and finished. All have four gradients a step.
Where squares are those of whole gradients they end where one process does. In a metric under fully_shard each rank
measures the piece that it has: four ranks end where four do, and what two ranks load is, to the bit, what was saved.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from checkpoints import FORMS, load, save
from closures import closure_of
from ranks import launch
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
    ("fsdp", "rms", "plain"),
    ("fsdp", "rms", "flat"),
    ("ddp", "rms", "plain"),
    ("ddp", "rms", "flat"),
]


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


def worker(rank: int, world: int, folder: str, first: bool) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous{world}{first}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    done = {}
    try:
        for run in RUNS:
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
        torch.save(done, f"{folder}/{world}{first}-{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """What four ranks saved; and where they ended, and four and two others that loaded it."""
    path = str(tmp_path_factory.mktemp("checkpoint"))
    net, opt = build("single", "kronecker", 1)
    steps(net, opt, range(SAVED))
    torch.save((net.state_dict(), opt.state_dict()), f"{path}/whole.pt")
    for world, first in ((4, True), (4, False), (2, False)):
        launch(worker, (world, path, first), world)
    return path


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
@pytest.mark.parametrize("world", [4, 2])
def test_ranks_load_to_the_bit_what_four_ranks_saved(folder, world, run):
    saved, _ = torch.load(f"{folder}/4True-0.pt", weights_only=True)[run]
    for rank in range(world):
        loaded, _ = torch.load(f"{folder}/{world}False-{rank}.pt", weights_only=True)[run]
        assert loaded["rule"] == saved["rule"]
        assert loaded["state"][1].keys() >= {"momentum", "average"}
        assert not loaded["state"][0]  # of a parameter that has never had a gradient
        for a, b in zip(loaded["params"] + loaded["state"], saved["params"] + saved["state"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_ranks_end_where_those_do_that_nobody_interrupted(folder, run):
    _, wanted = torch.load(f"{folder}/4True-0.pt", weights_only=True)[run]
    assert wanted["counts"][0] == STEPS
    assert wanted["counts"][4] == PARTS
    for rank in range(4):
        assert_close(torch.load(f"{folder}/4False-{rank}.pt", weights_only=True)[run][1], wanted)
    if run[:2] != ("fsdp", "rms"):
        assert_close(wanted, uninterrupted(run[1]))
        assert_close(torch.load(f"{folder}/2False-0.pt", weights_only=True)[run][1], wanted)


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_one_process_goes_on_where_four_ranks_were(folder, run, used):
    net, opt = build("single", run[1], 1, seed=1)
    if used:
        steps(net, opt, range(2))
    load(place(folder, *run), net, opt, run[2])
    steps(net, opt, range(SAVED, STEPS))
    if run[:2] != ("fsdp", "rms"):
        assert_close(outcome(net, opt), uninterrupted(run[1]))
    assert opt.diagnostics()["updates"] == STEPS


MATRICES = ("0.weight", "2.weight")
"""The metric turns them; the third matrix has a single row."""


def test_one_process_measures_in_bases_what_ranks_have_measured_by_coordinates(folder):
    """Under fully_shard the Kronecker metric has squares. L and R begin as the sums over their rows and columns."""
    states = torch.load(f"{folder}/sharded-0.pt", weights_only=True)
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


def test_ranks_measure_by_coordinates_what_one_process_has_measured_in_bases(folder):
    _, saved = torch.load(f"{folder}/whole.pt", weights_only=True)
    loaded, ended = torch.load(f"{folder}/2False-1.pt", weights_only=True)["kronecker"]
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
    assert ended["rule"]["mean_loss"] < loaded["rule"]["mean_loss"]


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
