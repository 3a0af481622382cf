"""SGDOLFree under fully_shard (FSDP2), hybrid sharding and tensor parallelism with gloo: equality with one process.

The reference, which has the gradients of all ranks, is what every case is compared with, in float64. In Euclid's norm
each rank measures its whole gradient. In a metric it measures the piece of its gradient that it has of the parameters:
``counts`` tells the reference which. Numbers that all ranks have are equal to the bit.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from loops import closure_of
from ranks import on_ranks, reductions
from sharded import batches, full, model, objective, placed, replicas, shard
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from sgdol import SGDOLFree, reference_free
from sgdol.reference_kronecker import kronecker

STEPS = 15

STEEPER = 6
"""From this step on the inputs are five times as large, so that the curvature is 25 times what it was."""


def data(step: int, count: int) -> list[torch.Tensor]:
    return [x * (5.0 if step >= STEEPER else 1.0) for x in batches(step, count)]


def train(
    rank: int,
    world: int,
    kind: str = "nested",
    microbatches: int = 1,
    sync: bool = True,
    policy: dict | None = None,
    keeps: bool = False,
    evaluates: bool = False,
    **options,
) -> dict:
    net = shard(model(), kind, world, policy or {})
    if keeps:
        net.set_reshard_after_backward(False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opt = SGDOLFree(net.parameters(), **options)
    count = replicas(kind, world)
    mine = rank * count // world
    messages = []
    for step in range(STEPS):
        parts = data(step, count * microbatches)[mine::count]

        def losses(parts=parts):
            for i, x in enumerate(parts):
                if not sync:
                    net.set_requires_gradient_sync(i + 1 == microbatches)
                yield objective(net, x) / microbatches

        before = opt.diagnostics()["evaluations"]
        with reductions() as sent:
            opt.step(closure_of(opt, losses))
        messages.append((opt.diagnostics()["evaluations"] - before, sent))
        if evaluates:
            with torch.no_grad():  # after it the root module stays unsharded
                net(parts[0])
    with opt.averaged(), torch.no_grad():
        seen = full(net(batches(99, 1)[0])).clone()
    owners = []
    for p in net.parameters():
        owner = p.detach().clone()
        (owner.to_local() if isinstance(owner, DTensor) else owner).fill_(mine)
        owners.append(full(owner).flatten())
    return {
        "params": flat(net.parameters()),
        "average": flat(opt.state[p]["average"] for p in net.parameters()),
        "saved": flat(opt.averaged_state_dict(net).values()),
        "seen": seen,
        "owners": torch.cat(owners),
        "placed": placed(net, opt),
        "messages": messages,
        "told": [str(warning.message) for warning in told],
        "report": opt.diagnostics(),
        "rule": [group["rule"] for group in opt.param_groups],
    }


def flat(several) -> torch.Tensor:
    return torch.cat([full(p.detach()).flatten() for p in several])


def put(net, x) -> None:
    torch.nn.utils.vector_to_parameters(torch.as_tensor(x), net.parameters())


def expected(found: Sequence[dict], settings: dict) -> reference_free.Run:
    """What one process does with the gradients of all ranks."""
    count = replicas(settings.get("kind", ""), len(found))
    k = count * settings.get("microbatches", 1)
    net = model()

    def oracle(t: int, x: Any) -> tuple[float, Any]:
        put(net, x)
        losses = [objective(net, part) for part in data(t, k)]
        parts = [flat(torch.autograd.grad(loss, list(net.parameters()))).numpy() for loss in losses]
        return sum(loss.item() for loss in losses) / k, np.stack(parts)

    options = {name: value for name, value in settings.items() if name not in ENGINE}
    shapes = [tuple(p.shape) for p in net.parameters()]
    if settings.get("kind") == "tensor parallel":  # of the first layer each rank has the whole
        shapes[2:] = [(math.prod(shape),) for shape in shapes[2:]]
        options.setdefault("metric", lambda past, present, _: kronecker(past, present, shapes))
    else:  # all is sharded, and measured as in "rms"
        options.setdefault("metric", "rms")
    counts = None
    if options["metric"] == "rms":
        has = np.stack([sum(rank["owners"].numpy() == j % count for rank in found) > 0 for j in range(k)])
        counts = has * k / has.sum(axis=0)
    x = torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy().copy()
    sizes = [p.numel() for p in net.parameters()]
    return reference_free.sgdol_free(oracle, x, STEPS, tensors=sizes, counts=counts, **options)


ENGINE = ("kind", "microbatches", "sync", "policy", "keeps", "evaluates")
"""Settings that are not the optimizer's."""

EUCLID, RMS = {"metric": "euclidean"}, {"metric": "rms"}

CASES: dict[int, dict[str, dict]] = {
    2: {
        "default": {},
        "rms": RMS,
        "euclidean": EUCLID,
        "rms, one module, weight decay": {"kind": "flat", "weight_decay": 0.1, **RMS},
        "rms, two microbatches, one reduction": {"microbatches": 2, "sync": False, **RMS},
        "euclidean, two microbatches, one reduction": {"microbatches": 2, "sync": False, **EUCLID},
        "rms, not resharded after forward": {"policy": {"reshard_after_forward": False}, **RMS},
        "rms, not resharded after backward, evaluated": {"keeps": True, "evaluates": True, **RMS},
        "rms, offloaded": {"policy": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, **RMS},
        "default, tensor parallel": {"kind": "tensor parallel", "microbatches": 2},
        "euclidean, tensor parallel": {"kind": "tensor parallel", "microbatches": 2, **EUCLID},
    },
    4: {
        "default": {},
        "rms, hybrid": {"kind": "hybrid", **RMS},
        "euclidean, hybrid, one reduction": {"kind": "hybrid", "microbatches": 2, "sync": False, **EUCLID},
        "rms, fully sharded and tensor parallel": {"kind": "both", **RMS},
        "euclidean, fully sharded and tensor parallel": {"kind": "both", **EUCLID},
    },
}


def everything(rank: int, world: int) -> dict[str, dict]:
    return {name: train(rank, world, **case) for name, case in CASES[world].items()}


@functools.cache
def results_of(world: int) -> list[dict]:
    """All runs of one world size in one set of processes, once: starting them is what takes the time."""
    return on_ranks(everything, world)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in CASES.items() for name in cases])
def test_the_ranks_are_equal_to_one_process(world, name):
    found, settings = [rank[name] for rank in results_of(world)], CASES[world][name]
    run = expected(found, settings)
    report = found[0]["report"]
    assert report["gradients"] == replicas(settings.get("kind", ""), world) * settings.get("microbatches", 1)
    for count in ("evaluations", "rejections", "rollbacks", "skipped"):
        assert report[count] == getattr(run, count), count
    assert report["step_size"][0] == pytest.approx(run.step_sizes[-1], rel=1e-8)
    assert report["smoothness"] == pytest.approx(run.smoothness[-1], rel=1e-8)
    for mine, theirs in ((found[0]["params"], run.iterates[-1]), (found[0]["average"], run.averages[-1])):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-8, atol=1e-8 * abs(theirs).max())


def test_the_default_metric_measures_sharded_matrices_by_coordinates_and_says_nothing():
    for rank in results_of(2):
        assert torch.equal(rank["default"]["params"], rank["rms"]["params"])
        assert not rank["default"]["told"]


def test_steps_are_taken_back_and_runs_return_to_their_average():
    """Else equality would say nothing of sharded parameters that are moved there."""
    reports = [run["report"] for world in CASES for run in results_of(world)[0].values()]
    assert sum(report["rejections"] > 0 for report in reports) >= 3
    assert sum(report["rollbacks"] > 0 for report in reports) >= 3


@pytest.mark.parametrize("world", list(CASES))
def test_all_ranks_know_the_same_bits_and_state_is_spread_as_its_parameter_is(world):
    ranks = results_of(world)
    for name in CASES[world]:
        first, *others = (rank[name] for rank in ranks)
        assert first["placed"], name
        for other in others:
            assert all(other[key] == first[key] for key in ("rule", "report", "placed")), name
            assert torch.equal(other["params"], first["params"]), name


@pytest.mark.parametrize("world", list(CASES))
def test_the_average_is_what_is_evaluated_and_saved(world):
    net = model()
    for name in CASES[world]:
        for found in (rank[name] for rank in results_of(world)):
            put(net, found["average"])
            torch.testing.assert_close(found["seen"], net(batches(99, 1)[0]).detach(), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found["saved"], found["average"])


@pytest.mark.parametrize("name", [name for name, case in CASES[2].items() if "kind" not in case])
def test_messages_are_few_and_small(name):
    """Two an evaluation: numbers of each tensor, and the loss. Three a step: of D, usual length and direction."""
    count = len(list(model().parameters()))
    own = 1 if CASES[2][name].get("metric") == "euclidean" else 3
    for step, (evaluations, numbers) in enumerate(results_of(2)[0][name]["messages"]):
        assert max(numbers) <= 7 * count
        elsewhere = evaluations - 1  # with the products of its gradients
        if step:  # the first step makes its first D, and probes
            assert 2 * evaluations + own - 1 <= len(numbers) <= 2 * evaluations + elsewhere + own, step
        if step and not elsewhere:
            assert numbers[:2] == [7 * count, 2]
            assert set(numbers[2:]) == {count}
