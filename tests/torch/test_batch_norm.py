"""BatchNorm sees every sample once: its running statistics are those of one pass over the batches as they were run."""

import copy

import pytest
import torch
from closures import closure_of, one_step
from torch.nn.functional import cross_entropy

from sgdol import SGDOL

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # pairs are among what is tested

BATCHES = 6


def build() -> torch.nn.Sequential:
    """The first BatchNorm sees the data themselves, so that its statistics do not depend on how the others train."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (3 + 2 * torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(BATCHES)
    ]


def microbatches(model, opt, batches):
    for inputs, targets in batches:
        one_step(opt, (cross_entropy(model(x), y) / 2 for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True)))
    return [x for inputs, _ in batches for x in inputs.chunk(2)]


def consecutive_batches(model, opt, batches):
    for x, y in batches:
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
    return [x for x, _ in batches]


def closure(model, opt, batches):
    stream = iter(batches)
    for _ in range(BATCHES):
        opt.step(closure_of(opt, lambda: [cross_entropy(model(x), y) for x, y in [next(stream)]]))
    assert next(stream, None) is None
    return [x for x, _ in batches]


@pytest.mark.parametrize("granularity", ["global", "coordinate"])
@pytest.mark.parametrize(
    ("protocol", "estimator"),
    [
        (microbatches, "symmetric"),
        (consecutive_batches, "symmetric"),
        (consecutive_batches, "paper"),
        (closure, "symmetric"),
        (closure, "paper"),
    ],
)
def test_running_statistics_are_updated_once_per_sample(protocol, estimator, granularity, batches):
    model = build()
    once = copy.deepcopy(model[0])
    opt = SGDOL(model.parameters(), lr=0.1, estimator=estimator, granularity=granularity)
    passes = protocol(model, opt, batches)
    for x in passes:
        once(x)
    assert opt.diagnostics()["updates"] == (BATCHES if protocol is microbatches else BATCHES // 2)
    assert sum(len(x) for x in passes) == 8 * BATCHES
    assert model[0].num_batches_tracked == model[2].num_batches_tracked == len(passes)
    assert torch.equal(model[0].running_mean, once.running_mean)
    assert torch.equal(model[0].running_var, once.running_var)


def test_a_microbatch_is_normalised_by_its_own_statistics(batches):
    """What the documentation says of it: the statistics are those of the microbatch, not of the batch."""
    x, _ = batches[0]
    norm = torch.nn.BatchNorm1d(5)
    halves = torch.cat([norm(half) for half in x.chunk(2)])
    assert torch.allclose(halves[:4].mean(0), torch.zeros(5), atol=1e-6)
    assert not torch.allclose(halves, norm(x), atol=0.1)
