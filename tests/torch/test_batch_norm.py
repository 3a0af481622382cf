"""BatchNorm sees every sample once: its running statistics are those of one evaluation of the batches as they were run.

SGDOLFree runs some batches again: at another point, or at the average.
"""

import copy
import math

import pytest
import torch
from loops import OPTIMIZERS, batch, fit, net_closure, network, pairs
from torch import nn

from sgdol import SGDOLFree
from sgdol.torch import backward

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # pairs are among what is tested


def by_backward(net, opt, t):
    fit(net, opt, [t])


def by_closure(net, opt, t):
    opt.step(net_closure(opt, net, batch(t, dtype=torch.float32)))


def by_pairs(net, opt, t):
    pairs(net, opt, [t])


def as_it_is(net):
    return net


def compiled(net):
    return torch.compile(net, backend="eager")


def compiled_in_place(net):
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    ("name", "one", "options", "wrap"),
    [
        ("SGDOL", by_backward, {}, as_it_is),
        ("SGDOL", by_closure, {"granularity": "coordinate"}, as_it_is),
        ("SGDOL", by_pairs, {"estimator": "paper"}, as_it_is),
        ("SGDOLFree", by_backward, {}, as_it_is),
        ("SGDOLFree", by_closure, {}, as_it_is),
        ("SGDOLFree", by_backward, {}, compiled),
        ("SGDOLFree", by_closure, {}, compiled_in_place),
    ],
)
def test_statistics_are_those_of_one_evaluation_of_each_sample(name, one, options, wrap):
    """Of a compiled model, 110 batches were counted in 40 steps of two halves, and each recompiled."""
    torch._dynamo.reset()
    net = network(torch.float32)
    model = wrap(net)
    opt = OPTIMIZERS[name](net.parameters(), **options)
    parts = 1 if one is by_pairs else 2
    for t in range(16 // parts):
        shadow = copy.deepcopy(net[:2])
        for part in batch(t, dtype=torch.float32).chunk(parts):
            shadow(part)
        one(model, opt, t)
        for (buffer, a), b in zip(net.named_buffers(), shadow.buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=f"step {t}, {buffer}")
    assert int(net[1].num_batches_tracked) == 16
    report = opt.diagnostics()
    assert report["updates"] == 8
    assert name == "SGDOL" or report["evaluations"] > report["updates"] + 5


@pytest.mark.parametrize("steps", [0, 4])
def test_statistics_survive_a_batch_that_is_not_finite(steps):
    net = network()
    opt = SGDOLFree(net.parameters())
    fit(net, opt, range(steps))
    before = copy.deepcopy(net.state_dict())
    opt.step(net_closure(opt, net, batch(4) * math.nan))
    opt.zero_grad()
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert opt.diagnostics()["skipped"] == 1
    assert all(map(math.isfinite, fit(net, opt, range(5, 20))))


class Counter(nn.Module):
    """Its buffer is another tensor after each forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return (x @ self.weight)[:, None]


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


@pytest.mark.parametrize(
    "make",
    [
        Counter,
        lambda: torch.nn.utils.spectral_norm(linear()),
        lambda: torch.nn.utils.parametrizations.spectral_norm(linear()),
    ],
    ids=["replaced", "spectral norm", "parametrized spectral norm"],
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_a_buffer_that_a_forward_writes_and_reads_is_what_it_was_when_the_batch_is_run_again(make):
    """It was refused: "does not evaluate the same batch each time". The power iteration moves once per half."""
    net, plain = make(), make()
    opt = SGDOLFree(net.parameters(), lr=0.0)  # nothing moves but buffers
    for t in range(5):
        x = batch(t, dtype=torch.float32)
        backward(lambda x: net(x).square().mean(), x)
        opt.step()
        opt.zero_grad()
        for half in x.chunk(2):
            plain(half)
    assert opt.diagnostics()["evaluations"] > 5
    expected = dict(plain.named_buffers())
    assert expected
    assert all(torch.equal(value, expected[name]) for name, value in net.named_buffers())
