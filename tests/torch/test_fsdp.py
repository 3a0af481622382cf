"""fully_shard (FSDP2), hybrid sharding and tensor parallelism with gloo: equality with one process.

One process that runs the microbatches of all ranks, one backward after the other, is what every case is compared with:
parameters, step sizes and diagnostics, in float64 to 1e-10. Numbers that all ranks have are equal to the bit.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import one_step
from ranks import on_ranks, tensors
from sharded import batches, copies, full, model, objective, placed, replicas, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from sgdol import SGDOL
from sgdol.learners import FTRL

STEPS = 5


def groups(net, several: bool):
    if not several:
        return net.parameters()
    weights = [p for p in net.parameters() if p.dim() > 1]
    return [{"params": weights, "lr": 0.05}, {"params": [p for p in net.parameters() if p.dim() == 1]}]


def averages(net, opt) -> list[torch.Tensor]:
    return [full(opt.state[p]["average"]) for p in net.parameters() if "average" in opt.state.get(p, {})]


def alone(contributions: list[list[torch.Tensor]], clip: float | None, several: bool, options: dict) -> dict:
    """One process: at each step, the mean over each list of batches is one gradient."""
    net = model()
    opt = SGDOL(groups(net, several), **{"lr": 0.1, **options})
    step_sizes = []
    for every in contributions:
        for part in every:
            (objective(net, part) / len(every)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        one_step(opt, [])
        step_sizes.append([float(g["step_size"]) for g in opt.param_groups])
    return {
        "params": [p.detach() for p in net.parameters()],
        "averages": averages(net, opt),
        "step_sizes": step_sizes,
        "report": opt.diagnostics(),
    }


def train(
    rank: int,
    world: int,
    kind: str = "nested",
    microbatches: int = 1,
    sync: bool = True,
    clip: float | None = None,
    several: bool = False,
    policy: dict | None = None,
    divide: float | None = None,
    **options,
) -> dict:
    net = shard(model(), kind, world, policy or {})
    if divide is not None:
        for module in (net[0], net[2], net[4], net):
            module.set_gradient_divide_factor(divide)
    opt = SGDOL(groups(net, several), **{"lr": 0.1, **options})
    count = replicas(kind, world)
    mine = rank * count // world
    step_sizes, reduced = [], []
    for step in range(STEPS):
        parts = batches(step, count * microbatches)[mine::count]
        for i, x in enumerate(parts):
            if not sync:
                net.set_requires_gradient_sync(i + 1 == microbatches)
            (objective(net, x) / microbatches * (1 if divide is None else divide / count)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        with CommDebugMode() as communication:
            opt.step()
        reduced.append({str(k): v for k, v in communication.get_comm_counts().items() if v})
        opt.zero_grad()
        step_sizes.append([float(g["step_size"]) for g in opt.param_groups])
    return {
        "params": copies(net.parameters()),
        "averages": averages(net, opt),
        "placed": placed(net, opt),
        "step_sizes": step_sizes,
        "report": opt.diagnostics(),
        "reduced": reduced,
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups],
    }


# Programs that run on the ranks and, with the batches of all of them, in one process ----------------------------------


def rescaled_between(net, opt, parts, share) -> None:
    """Gradients are halved between two backward passes, on the second step thrown away."""
    for step in range(STEPS):
        for i in range(2):
            for x in parts(step, i):
                (objective(net, x) * share).backward()
            if i == 0 and step == 1:
                net.zero_grad(set_to_none=False)
            elif i == 0:
                for p in net.parameters():
                    p.grad.mul_(0.5)
        opt.step()
        opt.zero_grad()


def by_closure(net, opt, parts, share) -> None:
    calls = itertools.count()

    def closure():
        opt.zero_grad()
        for x in parts(next(calls), 0):
            (objective(net, x) * share).backward()

    for _ in range(STEPS):
        opt.step(closure)


def with_infinities(net, opt, parts, share) -> None:
    """One rank's batch has an infinity: nobody moves, and all go on together."""
    for step in range(STEPS):
        for x in parts(step, 0):
            mark = float("inf") if step == 2 and float(x[0, 0]) == float(batches(2, 2)[1][0, 0]) else 1.0
            (objective(net, x * mark) * share).backward()
        opt.step()
        opt.zero_grad()


def evaluated(net, opt, parts, share) -> None:
    """A look at the averages in the middle changes nothing, and is a look at the averages."""
    with torch.no_grad():
        net(batches(99, 1)[0])
    for step in range(STEPS):
        one_step(opt, (objective(net, x) * share for x in parts(step, 0)))
        if step == 2:
            with opt.averaged(), torch.no_grad():
                opt.seen = net(batches(99, 1)[0])


def by_hand(net, opt, parts, share) -> None:
    """Gradients that were written by hand are one gradient a step."""
    for step in range(2 * STEPS):
        for x in parts(step, 0):
            (objective(net, x) * share).backward()
        written = [p.grad.clone() for p in net.parameters()]
        opt.zero_grad()
        for p, gradient in zip(net.parameters(), written, strict=True):
            p.grad = gradient
        one_step(opt, [])


def another_forward(net, opt, parts, share) -> None:
    """A method that only fully_shard knows to be a forward: what each rank had is not seen, so steps are paired."""
    net.other = lambda x: torch.nn.Sequential.forward(net, x)
    if isinstance(next(net.parameters()), DTensor):
        register_fsdp_forward_method(net, "other")
    for step in range(4):
        one_step(opt, ((net.other(x) - 1).square().mean() * share for x in parts(step, 0)))


def from_one_process(net, opt, parts, share) -> None:
    """The ordinary load_state_dict, with a state that one process has saved: each rank takes its piece."""
    opt.load_state_dict(saved_state())
    assert opt.pending
    for step in range(STEPS):
        one_step(opt, (objective(net, x) * share for x in parts(step, 0)))


PROGRAMS: dict[str, tuple[Callable, dict]] = {
    "rescaled between": (rescaled_between, {}),
    "rescaled between, coordinate": (rescaled_between, {"granularity": "coordinate"}),
    "closure": (by_closure, {}),
    "infinities": (with_infinities, {}),
    "averages": (evaluated, {"averaging": 2, "granularity": "tensor"}),
    "by hand": (by_hand, {}),
    "another forward": (another_forward, {}),
    "a state of one process": (from_one_process, {"granularity": "coordinate", "momentum": 0.9}),
}
AVERAGED = ("rescaled between, coordinate", "by hand", "another forward", "a state of one process")
"""Where the mean over the ranks is one gradient."""


def run_program(name: str, net, parts, share: float) -> dict:
    program, options = PROGRAMS[name]
    opt = SGDOL(net.parameters(), lr=0.1, **options)
    program(net, opt, parts, share)
    return {
        "params": copies(net.parameters()),
        "seen": getattr(opt, "seen", torch.zeros(())),
        "step_size": float(opt.param_groups[0]["step_size"]),
        "counts": [opt.diagnostics()[key] for key in ("updates", "skipped", "gradients")],
    }


def mixed_precision(rank: int, world: int) -> list[torch.Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = shard(model(dtype=torch.float32), "nested", world, {"mp_policy": policy})
    opt = SGDOL(net.parameters(), lr=0.1)
    for step in range(STEPS):
        one_step(opt, [objective(net, batches(step, world)[rank].bfloat16())])
    return copies(net.parameters())


def saved_state() -> dict:
    """Of one process, in the middle of a pair."""
    net = model()
    opt = SGDOL(net.parameters(), lr=0.1, granularity="coordinate", momentum=0.9)
    for step in range(3):
        one_step(opt, [objective(net, torch.cat(batches(50 + step, 2)))])
    return copy.deepcopy(opt.state_dict())


def refused(rank: int, world: int) -> dict[str, str]:
    errors = {}

    def expect(name: str, error: type[Exception], call: Callable) -> None:
        try:
            call()
        except error as raised:
            errors[name] = str(raised)

    partial = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (world,)), [Partial()])
    expect("partial", ValueError, lambda: SGDOL([torch.nn.Parameter(partial)], lr=0.1))
    flat = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    opt = SGDOL(flat.parameters(), lr=0.1)
    objective(flat, batches(0, 1)[0]).backward()
    expect("flat", NotImplementedError, opt.step)
    net = fully_shard(model(), reshard_after_forward=False)
    net.set_reshard_after_backward(False)  # else the ranks would wait for each other in the forward already
    opt = SGDOL(net.parameters(), lr=0.1)
    net.set_requires_gradient_sync(False)
    for x in batches(0, 1 + rank):
        objective(net, x).backward()
    net.set_requires_gradient_sync(True)
    objective(net, batches(1, 1)[0]).backward()
    expect("uneven", RuntimeError, opt.step)
    return errors


def side_by_side(rank: int, world: int) -> list[torch.Tensor]:
    """Replicated and sharded DTensors by hand, side by side with an ordinary tensor, of a replicated loss."""
    mesh = init_device_mesh("cpu", (world,))
    values = [torch.linspace(1, 2, 6, dtype=torch.float64).view(3, 2) for _ in range(3)]
    params = [
        torch.nn.Parameter(distribute_tensor(values[0], mesh, [Replicate()])),
        torch.nn.Parameter(distribute_tensor(values[1], mesh, [Shard(1)])),
        torch.nn.Parameter(values[2].clone()),
    ]
    opt = SGDOL(params, lr=0.1, momentum=0.5)
    for step in range(4):
        one_step(opt, (sum((full(p) * x[:3, :2]).square().sum() for p in params) for x in batches(step, 2)))
    return copies(params)


def everything(rank: int, world: int) -> dict[str, Any]:
    done = {name: train(rank, world, **case) for name, (case, _) in CASES[world].items()}
    if world == 2:
        for name in PROGRAMS:
            net = shard(model(), "flat" if name == "another forward" else "nested", world, {})
            done[name] = run_program(name, net, lambda s, i: [batches(s, 2 * world)[rank + i * world]], 1.0)
        done["mixed"] = mixed_precision(rank, world)
        done["refused"] = refused(rank, world)
        done["side by side"] = side_by_side(rank, world)
    return done


NORMS, PAIRS, REDUCED = "each backward of each rank", "two steps", "each backward, averaged over the ranks"
"""What the independent gradients of an update are."""

CASES: dict[int, dict[str, tuple[dict, str]]] = {
    2: {
        "global": ({}, NORMS),
        "global, one module, clipped": ({"kind": "flat", "clip": 0.5}, NORMS),
        "global, two microbatches, one reduction, clipped": ({"microbatches": 2, "sync": False, "clip": 0.5}, NORMS),
        "global, momentum, the gradients' statistics": ({"momentum": 0.5, "statistics": "gradient"}, NORMS),
        "global, not resharded after forward": ({"policy": {"reshard_after_forward": False}}, NORMS),
        "global, offloaded": ({"policy": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}, NORMS),
        "global, another divisor": ({"divide": 8.0, "microbatches": 2}, NORMS),
        "global, averaging, maximize": ({"averaging": 2, "maximize": True}, NORMS),
        "group, weight decay": ({"granularity": "group", "several": True, "weight_decay": 0.1}, NORMS),
        "tensor, momentum": ({"granularity": "tensor", "momentum": 0.9, "microbatches": 2, "sync": False}, NORMS),
        "coordinate": ({"granularity": "coordinate", "weight_decay": 0.1}, PAIRS),
        "coordinate, momentum, two microbatches": (
            {"granularity": "coordinate", "momentum": 0.9, "microbatches": 2, "clip": 0.5},
            REDUCED,
        ),
        "coordinate, one reduction": ({"granularity": "coordinate", "microbatches": 2, "sync": False}, PAIRS),
        "default learner, too long a step": ({"lr": 7.0, "kappa": 1.0}, NORMS),
        "epochs, ftrl, no momentum": ({"epoch": 3, "learner": FTRL(), "momentum": 0.0, "microbatches": 2}, NORMS),
        "rms": ({"metric": "rms"}, PAIRS),
        "rms, two microbatches": ({"metric": "rms", "lr": 1.0, "microbatches": 2}, REDUCED),
        "rms, tensor, ftrl": (
            {"metric": "rms", "learner": FTRL(), "granularity": "tensor", "momentum": 0.0, "microbatches": 2},
            REDUCED,
        ),
        "paper, two groups": ({"estimator": "paper", "momentum": 0.9, "several": True}, PAIRS),
        "tensor parallel": ({"kind": "tensor parallel", "momentum": 0.9}, PAIRS),
        "tensor parallel, two microbatches": ({"kind": "tensor parallel", "microbatches": 2}, NORMS),
        "tensor parallel, coordinate": (
            {"kind": "tensor parallel", "microbatches": 2, "granularity": "coordinate"},
            NORMS,
        ),
    },
    4: {
        "global, clipped": ({"clip": 0.5}, NORMS),
        "coordinate, three microbatches": ({"microbatches": 3, "granularity": "coordinate"}, REDUCED),
        "hybrid, rms": ({"kind": "hybrid", "metric": "rms", "microbatches": 2}, REDUCED),
        "hybrid, one reduction": ({"kind": "hybrid", "microbatches": 2, "sync": False, "momentum": 0.9}, NORMS),
        "hybrid, coordinate": ({"kind": "hybrid", "microbatches": 2, "granularity": "coordinate"}, REDUCED),
        "fully sharded and tensor parallel": ({"kind": "both", "momentum": 0.9}, NORMS),
        "fully sharded and tensor parallel, coordinate": ({"kind": "both", "granularity": "coordinate"}, PAIRS),
    },
}
"""For each number of ranks: the settings of a run, and where its independent gradients come from."""

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")

SUMS = {"gradients": 1, "coordinate": 1, "products": 1, "metric": 1}
"""All-reduces of an update: for the gradients' statistics, and what each of these adds. Coordinates to show what they
did; products with the momentum and with the last direction together; a metric for the mean that normalises it."""

ENGINE = ("kind", "microbatches", "sync", "clip", "several", "policy", "divide")
"""Settings that are not the optimizer's."""


def expected(world: int, settings: dict, source: str) -> dict:
    count, microbatches = replicas(settings.get("kind", ""), world), settings.get("microbatches", 1)
    contributions = []
    for step in range(STEPS):
        every = batches(step, count * microbatches)
        size = {NORMS: 1, PAIRS: len(every), REDUCED: count}[source]
        contributions.append([torch.cat(every[i : i + size]) for i in range(0, len(every), size)])
    options = {k: v for k, v in settings.items() if k not in ENGINE}
    return alone(contributions, settings.get("clip"), settings.get("several", False), options)


@functools.cache
def results_of(world: int) -> list[dict]:
    """All runs of one world size in one set of processes, once: starting them is what takes the time."""
    return on_ranks(everything, world)


@pytest.fixture(params=list(CASES))
def results(request) -> tuple[int, list[dict]]:
    return request.param, results_of(request.param)


@pytest.fixture
def two() -> list[dict]:
    return results_of(2)


def test_all_ranks_know_the_same_bits(results):
    world, ranks = results
    for name in CASES[world]:
        for other in ranks[1:]:
            for a, b in zip(tensors(ranks[0][name]), tensors(other[name]), strict=True):
                assert torch.equal(a, b), name
            assert other[name]["step_sizes"] == ranks[0][name]["step_sizes"], name


def test_the_ranks_are_equal_to_one_process(results):
    world, ranks = results
    for name, (settings, source) in CASES[world].items():
        found, wanted = ranks[0][name], expected(world, settings, source)
        reports = [{k: v for k, v in run["report"].items() if k != "step_size"} for run in (found, wanted)]
        assert reports[0] == pytest.approx(reports[1], rel=1e-9), name
        assert found["report"]["updates"] == (STEPS // 2 if source == PAIRS else STEPS), name
        torch.testing.assert_close(
            found["params"], wanted["params"], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
        torch.testing.assert_close(found["averages"], wanted["averages"], rtol=1e-10, atol=1e-12)
        for a, b in zip(found["step_sizes"], wanted["step_sizes"], strict=True):
            assert a == pytest.approx(b, rel=1e-10), name


def test_state_is_spread_as_its_parameter_is(results):
    world, ranks = results
    assert all(rank[name]["placed"] for rank in ranks for name in CASES[world])


def test_an_update_communicates_a_few_sums_and_nothing_else(results):
    world, ranks = results
    for name, (settings, source) in CASES[world].items():
        coordinates = settings.get("granularity") == "coordinate"
        needs = {
            "gradients": True,
            "coordinate": coordinates,
            "products": not coordinates  # products of coordinates stay on their ranks
            and (
                (bool(settings.get("momentum", 0.9)) and settings.get("statistics") != "gradient")
                or not isinstance(settings.get("learner"), FTRL)
            ),
            "metric": "metric" in settings,
        }
        count = sum(SUMS[part] for part, needed in needs.items() if needed)
        for step, reduced in enumerate(ranks[0][name]["reduced"]):
            holds = source == PAIRS and step % 2 == 0
            # The first D of a metric is made of the present gradients, which have to be summed before.
            first = needs["metric"] and step == (source == PAIRS)
            found = reduced.pop("c10d.allreduce_", 0)
            assert found in ([0] if holds else range(count, count + 3) if first else [count]), (name, step)
            assert not reduced, (name, step)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs_do_the_same_on_ranks_as_in_one_process(two, name):
    wanted = run_program(name, model(), lambda step, i: batches(step, 4)[2 * i : 2 * i + 2], 0.5)
    if name in AVERAGED:
        wanted = run_program(name, model(), lambda step, i: [torch.cat(batches(step, 4)[2 * i : 2 * i + 2])], 1.0)
    for rank in two:
        found = rank[name]
        torch.testing.assert_close(found["params"], wanted["params"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found["seen"], wanted["seen"], rtol=1e-10, atol=1e-12)
        assert found["step_size"] == pytest.approx(wanted["step_size"], rel=1e-10)
        assert found["counts"] == wanted["counts"]


def test_mixed_precision_measures_the_gradients_that_it_reduces(two):
    """One process computes the same bfloat16 gradients; sums of two in float32 may differ in the last bits."""
    net = model(dtype=torch.float32)
    opt = SGDOL(net.parameters(), lr=0.1)
    for step in range(STEPS):
        for x in batches(step, 2):
            low = {name: p.bfloat16() for name, p in net.named_parameters()}
            x = x.bfloat16()
            output = torch.func.functional_call(net, low, (x,))
            ((output - x.sum(1, keepdim=True)).square().mean() / 2).backward()
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(two[0]["mixed"], [p.detach() for p in net.parameters()], rtol=1e-4, atol=1e-5)


def test_partial_parameters_flat_parameters_and_uneven_passes_are_refused(two):
    for rank in two:
        assert "use fully_shard" in rank["refused"]["flat"]
        assert "sharded or replicated" in rank["refused"]["partial"]
        assert "2 ranks ran 5 in all" in rank["refused"]["uneven"]


def test_replicated_sharded_and_ordinary_parameters_together(two):
    params = [torch.nn.Parameter(torch.linspace(1, 2, 6, dtype=torch.float64).view(3, 2)) for _ in range(3)]
    opt = SGDOL(params, lr=0.1, momentum=0.5)
    for step in range(4):
        one_step(opt, (sum((p * x[:3, :2]).square().sum() for p in params) for x in batches(step, 2)))
    for rank in two:
        torch.testing.assert_close(rank["side by side"], [p.detach() for p in params], rtol=1e-10, atol=1e-12)
